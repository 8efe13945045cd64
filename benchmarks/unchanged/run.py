"""The bytes that a save writes of a state that changed in part, and its time, with the aims.  Prints JSON.

Run: python benchmarks/unchanged/run.py [URL] [--layers 100] [--layer-kib 10486] [--repeat 10]

One rank saves after an earlier save in the same folder, by default a temporary one: a GiB in equal layers.
The same bytes, one changed layer (1 %), a LoRA beside a frozen base, or all layers are saved by turns.  With
"after a restart", a new process makes the state that was saved last, changes it, and saves first.  Times are
divided by the one of a save of all layers, in a new process too if they are those of a new process.
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

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import reknit
from benchmarks.aims import ratio
from benchmarks.reports import Row, judged, machine, show, software

ALL, RESTARTED = "all layers", ", after a restart"


class Job:
    """A model whose layers are one matrix each, and its saves."""

    def __init__(self, url: str, layers: int, layer_kib: int) -> None:
        torch.manual_seed(0)
        self.url, self.step = url, 0
        rows = max(1, layer_kib // 4)
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


def changed(job: Job, what: str, number: int) -> tuple[float, float]:
    """Change a part of the layers, and return the figures of a save."""
    layers = {"the same bytes": [], "1 % changed": [job.layers[number % len(job.layers)]], ALL: job.layers}
    job.change(*layers[what])
    return job.save()


CASES = ("the same bytes", "1 % changed", ALL)


def restarted(job: Job, what: str, number: int, layer_kib: int) -> tuple[float, float]:
    """Return the figures of the first save in a new process; reknit's imports count, too."""
    job.save()  # the new process makes the same random numbers
    command = [sys.executable, __file__, job.url, "--first", str(job.step), what, str(number)]
    command += ["--layers", str(len(job.layers)), "--layer-kib", str(layer_kib)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job.step += 1
    seconds, written = json.loads(done.stdout)
    return seconds, written


def measured(job: Job, repeat: int, layer_kib: int) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds and the written part of all cases, by round."""
    found: dict[str, list[tuple[float, float]]] = {}
    job.save()
    for number in range(repeat):
        for what in CASES:
            found.setdefault(what + RESTARTED, []).append(restarted(job, what, number, layer_kib))
    for number in range(repeat):
        for what in (ALL, *CASES[:2]):
            found.setdefault(what, []).append(changed(job, what, number))
    job.save(lora=True)
    for _ in range(repeat):
        job.change(job.lora)
        found.setdefault("LoRA of 1 %", []).append(job.save(lora=True))
    return found


def rows(found: dict[str, list[tuple[float, float]]]) -> list[Row]:
    """Return the part of the bytes that each case writes, and its time over that of a save of all."""
    reported: list[Row] = []
    for name, figures in found.items():
        whole = found[ALL + RESTARTED * name.endswith(RESTARTED)]
        seconds, parts = zip(*figures, strict=True)
        time_ratio = round(ratio(seconds, [each for each, _ in whole]), 3)
        reported.append((f"{name}: bytes written / all", round(statistics.median(parts), 4)))
        reported.append((f"{name}: time / a save of all", time_ratio))
    return reported


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", nargs="?")
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--layer-kib", type=int, default=10_486)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--first", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = args.url or folder
        if args.first is None:
            job = Job(f"{url}/unchanged-{uuid.uuid4().hex[:8]}", args.layers, args.layer_kib)
            found = measured(job, args.repeat, args.layer_kib)
            about = {"machine": machine(), "software": software("torch", "reknit"), "figures": found}
            judgements = judged("unchanged", rows(found))
            print(json.dumps(about | {"rows": judgements}, indent=1))
            show(judgements)
        else:
            job = Job(args.url, args.layers, args.layer_kib)
            job.step = int(args.first[0])
            print(json.dumps(changed(job, args.first[1], int(args.first[2]))))


if __name__ == "__main__":
    main()
