"""The bytes that a save writes of a state that changed in part, and its time.  Prints JSON.

Run: python benchmarks/unchanged/run.py [URL] [--layers 16] [--layer-mib 64] [--repeat 5]

One rank saves after an earlier save in the same folder, by default a temporary one.  The same bytes, a
hundredth of all bytes in rows of one layer, one changed layer, a LoRA beside a frozen base, or all layers are
saved.  ``restart`` is the same bytes in a new process.  ``written`` is the part of the bytes written.
``time`` is the median of the seconds, divided by that of the save of all layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import reknit
from benchmarks.reports import machine, software

MIB = 1 << 20


class Job:
    """A model whose layers are one matrix each, and its saves."""

    def __init__(self, url: str, layers: int, layer_mib: int) -> None:
        torch.manual_seed(0)
        self.url, self.step = url, 0
        rows = layer_mib * MIB // 4096
        self.layers = [torch.nn.Parameter(torch.randn(rows, 1024)) for _ in range(layers)]
        self.lora = torch.nn.Parameter(torch.randn(max(1, layers * rows // 100), 1024))

    def save(self, *, lora: bool = False) -> tuple[float, float]:
        """Return the seconds of a save, and the part of its bytes that was written."""
        self.step += 1
        for layer in self.layers:
            layer.requires_grad_(not lora)
        model = torch.nn.ParameterList([*self.layers, *([self.lora] if lora else [])])
        begin = time.perf_counter()
        report = reknit.save(f"{self.url}/step_{self.step}", {"model": model}, overwrite=True).result()
        seconds = time.perf_counter() - begin
        return seconds, 1 - report.reused_nbytes / report.nbytes

    def change(self, *tensors: torch.Tensor) -> None:
        """Change tensors as a step of training does."""
        with torch.no_grad():
            for tensor in tensors:
                tensor.add_(1)


def restarted(job: Job) -> tuple[float, float]:
    """Return the figures of the first save in a new process; its imports count, too."""
    command = [sys.executable, __file__, job.url, "--first", str(job.step + 1)]
    command += ["--layers", str(len(job.layers)), "--layer-mib", str(job.layers[0].nbytes // MIB)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job.step += 1
    seconds, written = json.loads(done.stdout)
    return seconds, written


def measured(job: Job, repeat: int) -> dict[str, Any]:
    """Return the figures of all cases."""
    found: dict[str, list[tuple[float, float]]] = {}
    job.save()
    found["restart"] = [restarted(job)]  # the new process makes the same random numbers
    for _ in range(repeat):
        job.change(*job.layers)
        found.setdefault("all layers", []).append(job.save())
        found.setdefault("the same bytes", []).append(job.save())
        job.change(job.layers[0][: len(job.lora)])
        found.setdefault("1 % in a layer", []).append(job.save())
        job.change(job.layers[len(job.layers) // 2])
        found.setdefault(f"1 of {len(job.layers)} layers", []).append(job.save())
    job.save(lora=True)
    for _ in range(repeat):
        job.change(job.lora)
        found.setdefault("LoRA of 1 %", []).append(job.save(lora=True))
    whole = statistics.median(seconds for seconds, _ in found["all layers"])
    return {
        name: {
            "written": round(statistics.median(part for _, part in figures), 4),
            "time": round(statistics.median(seconds for seconds, _ in figures) / whole, 2),
        }
        for name, figures in found.items()
    } | {"seconds of all layers": round(whole, 3)}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", nargs="?")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--layer-mib", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = args.url or folder
        if args.first is None:
            job = Job(f"{url}/unchanged-{uuid.uuid4().hex[:8]}", args.layers, args.layer_mib)
            about = {"machine": machine(), "software": software("torch", "reknit")}
            print(json.dumps(about | measured(job, args.repeat), indent=1))
        else:
            job = Job(args.url, args.layers, args.layer_mib)
            job.step = args.first - 1
            print(json.dumps(job.save()))


if __name__ == "__main__":
    main()
