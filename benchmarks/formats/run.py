"""How fast are checkpoints of other programs read in place, and imported?  Against their own libraries.

Each pair is measured in one process, in turns: reknit, then the owner, several times; medians count, from a
warm cache.  The parts:

dcp      full and 1/8 of each tensor, by reknit.load and by dcp.load, of a checkpoint that one process saved.
hf       full and 1/8 of each tensor, by reknit.load and by safetensors, of a folder of Hugging Face.
import   reknit import of a large model of Hugging Face, with its peak of memory, and again after a kill.

Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reknit.frameworks.custom import Held, registered

if TYPE_CHECKING:
    from collections.abc import Callable

PARTS = 8
"""A slice is one of so many equal parts of each tensor, by its first dimension."""
WIDTH = 4096


def tensors(mib: int) -> dict[str, Any]:
    """Return tensors of 16 MiB each."""
    import torch

    names = [f"layers.{number}.weight" for number in range(max(mib // 16, 1))]
    return {name: torch.randn(16 * (1 << 20) // 4 // WIDTH, WIDTH) for name in names}


def in_turns(calls: dict[str, Callable[[], object]], repeat: int) -> dict[str, Any]:
    """Return the median seconds of each call, measured in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeat):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - begin)
    medians = {f"{name}_s": round(statistics.median(times), 4) for name, times in found.items()}
    ratios = sorted(one / two for one, two in zip(*found.values(), strict=True))
    return medians | {"ratio": round(statistics.median(ratios), 3), "ratios": [round(r, 3) for r in ratios]}


def target(state: dict[str, Any], parts: int) -> dict[str, Any]:
    """Return memory for a part of each tensor, or for all of it."""
    import torch

    return {name: torch.empty(one.shape[0] // parts, one.shape[1]) for name, one in state.items()}


class Part:
    """The first rows of each tensor, as a rank of a sharded job would hold them."""

    def __init__(self, state: dict[str, Any], part: dict[str, Any]) -> None:
        self.held = [
            Held(name, tuple(state[name].shape), "float32", (0, 0), tuple(one.shape), one)
            for name, one in part.items()
        ]


class PartFramework:
    """The adapter of `Part`."""

    def matches(self, value: Any) -> bool:
        return isinstance(value, Part)

    def holdings(self, value: Any, rank: int, size: int) -> list[Held]:
        held: list[Held] = value.held
        return held

    def restore(self, value: Any, held: Any, values: Any) -> None: ...


def load_part(folder: str, state: dict[str, Any], part: dict[str, Any]) -> Any:
    """Load the first rows of each tensor by reknit, in one call."""
    import reknit

    with registered(PartFramework()):
        return reknit.load(folder, {"model": Part(state, part)})


def measure_dcp(state: dict[str, Any], folder: str, repeat: int) -> dict[str, Any]:
    """Compare with dcp.load."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import reknit

    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=0, world_size=1)
    dcp.save({"model": state}, checkpoint_id=folder)
    out, theirs = target(state, 1), target(state, 1)
    report = reknit.load(folder, {"model": out})
    result = {
        "full": in_turns(
            {
                "reknit": lambda: reknit.load(folder, {"model": out}),
                "dcp": lambda: dcp.load({"model": theirs}, checkpoint_id=folder),
            },
            repeat,
        )
        | {"read_of_needed": round(report.nbytes_read / report.nbytes_wanted, 4)}
    }
    assert all(torch.equal(out[name], state[name]) for name in state)
    result["eighth"] = measure_eighth(state, folder, repeat)
    dist.destroy_process_group()
    return result


def measure_eighth(state: dict[str, Any], folder: str, repeat: int) -> dict[str, Any]:
    """Compare reads of one eighth of each tensor: `read` of reknit, and a plan of DCP for the same boxes."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    part = target(state, PARTS)

    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Any:
            return part[read_item.dest_index.fqn.removeprefix("model.")]

        def commit_tensor(self, read_item: Any, tensor: Any) -> None: ...

    def by_dcp() -> None:
        reader = FileSystemReader(folder)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, True)
        items = [
            ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(f"model.{name}", torch.Size([0, 0])),
                torch.Size([0, 0]),
                MetadataIndex(f"model.{name}", torch.Size([0, 0])),
                torch.Size([0, 0]),
                one.shape,
            )
            for name, one in part.items()
        ]
        reader.read_data(LoadPlan(items), Planner()).wait()

    return in_turns({"reknit": lambda: load_part(folder, state, part), "dcp": by_dcp}, repeat)


def measure_hf(state: dict[str, Any], folder: str, repeat: int) -> dict[str, Any]:
    """Compare with safetensors."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    import reknit

    os.makedirs(folder)
    names = list(state)
    where: dict[str, str] = {}
    for number in range(4):
        file = f"model-{number}.safetensors"
        part = names[number::4]
        if part:
            save_file({name: state[name] for name in part}, f"{folder}/{file}")
        where |= dict.fromkeys(part, file)
    Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    out, files = target(state, 1), sorted(set(where.values()))
    eighth = target(state, PARTS)

    def by_safetensors() -> None:
        for file in files:
            for name, one in load_file(f"{folder}/{file}").items():
                out[name].copy_(one)

    def slices_by_safetensors() -> None:
        for file in files:
            with safe_open(f"{folder}/{file}", "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is not a dict
                    eighth[name].copy_(opened.get_slice(name)[: eighth[name].shape[0]])

    return {
        "full": in_turns(
            {"reknit": lambda: reknit.load(folder, {"model": out}), "safetensors": by_safetensors}, repeat
        ),
        "eighth": in_turns(
            {"reknit": lambda: load_part(folder, state, eighth), "safetensors": slices_by_safetensors},
            repeat,
        ),
    }


def write_model(folder: str, mib: int) -> int:
    """Write a folder of Hugging Face with files of 512 MiB, and return their number."""
    import numpy as np
    from safetensors.numpy import save_file

    os.makedirs(folder)
    where: dict[str, str] = {}
    number = 0
    data = np.random.default_rng(0).random((64 << 20) // 8)
    for number in range(max(mib // 512, 1)):
        file = f"model-{number}.safetensors"
        part = {f"layers.{number}.{part}": data + part for part in range(8)}
        save_file(part, f"{folder}/{file}")
        where |= dict.fromkeys(part, file)
    Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return number + 1


IMPORT = """
import sys
from reknit.cli.main import main
status = main(["import", *sys.argv[1:]])
with open("/proc/self/status") as file:
    peak = next(line.split()[1] for line in file if line.startswith("VmHWM"))
print(peak, file=sys.stderr)
sys.exit(status)
"""


def measure_import(source: str, out: str) -> dict[str, Any]:
    """Import a checkpoint in processes of their own: once, and once more after a kill."""
    command = [sys.executable, "-c", IMPORT, source]
    begin = time.perf_counter()
    ran = subprocess.run([*command, f"{out}/a"], check=True, capture_output=True)
    took = time.perf_counter() - begin
    shutil.rmtree(f"{out}/a")
    process = subprocess.Popen([*command, f"{out}/b"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(took * 0.7)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = subprocess.run([*command, f"{out}/b", "--json"], check=True, capture_output=True)
    again = json.loads(done.stdout)
    return {
        "seconds": round(took, 2),
        "peak_mib": int(ran.stderr.split()[-1]) >> 10,
        "after_kill": {"kept": again["num_kept"], "written": again["num_files"]},
    }


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoints")
    parser.add_argument("--import-mib", type=int, default=4096, help="size of the checkpoint to import")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--parts", nargs="*", default=["dcp", "hf", "import"])
    parser.add_argument("--dir", default=None)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = tempfile.mkdtemp(dir=args.dir)
    try:
        state = tensors(args.mib)
        result: dict[str, Any] = {"mib": args.mib}
        if "dcp" in args.parts:
            result["dcp"] = measure_dcp(state, f"{folder}/dcp", args.repeat)
        if "hf" in args.parts:
            result["hf"] = measure_hf(state, f"{folder}/hf", args.repeat)
        del state
        if "import" in args.parts:
            names = write_model(f"{folder}/large", args.import_mib)
            result["import"] = {
                "mib": args.import_mib,
                "files": names,
                **measure_import(f"{folder}/large", folder),
            }
        print(json.dumps(result, indent=2))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
