"""The cost of saves and loads on this machine's device, against plain copies of the same bytes in one run.

(a) For how long does `save(wait=False)` stop training, eager and lazy, against a copy to pinned memory?
(b) How much slower are training steps beside a save, against steps beside such a copy?
(c) How long does a load take, against a copy from pinned memory and a plain read of the files?
And how much memory do they take, of the device and of the host?

One process, and one device of the kind that torch has as its accelerator.  All measurements take turns.
Without a device nothing is measured, which is not an error.  Prints a table to stderr and JSON to stdout.

Run: python benchmarks/gpu/run.py [--gib 4] [--rounds 5] [--index 0] [--dir .] [--out FILE]
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.ranks import scratch
from benchmarks.reports import deliver, machine, software

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.gpu.measure import Bench

ROWS = (
    ("memcpy to host", "{memcpy}, device to host", ()),
    ("save eager", "save(wait=False) returns, eager", ("memcpy to host",)),
    ("save lazy", "save(wait=False) returns, lazy", ("memcpy to host",)),
    ("steps", "{window} training steps", ()),
    ("steps beside memcpy", "... beside a {memcpy}", ("steps",)),
    ("steps beside save eager", "... with an eager save before them", ("steps",)),
    ("steps beside save lazy", "... with a lazy save before them", ("steps",)),
    ("memcpy to device", "{memcpy}, host to device", ()),
    ("read", "plain read of the files, in the page cache", ()),
    ("load", "load", ("memcpy to device", "read")),
)
"""The measurements: key, text, and the keys of the limits, of which the slowest is compared."""

COPIES = ("memcpy to host", "memcpy to device", "read", "load")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0, help="GiB of state: parameters and two moments")
    parser.add_argument(
        "--width", type=int, default=4096, help="of a layer; the state has one tensor of each"
    )
    parser.add_argument("--batch", type=int, default=4096, help="rows of a training step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--index", type=int, default=0, help="which of the devices")
    parser.add_argument("--dir", default=".", help="folder for checkpoints, with twice their size free")
    parser.add_argument("--out", type=Path, help="file for the JSON, besides stdout")
    args = parser.parse_args(arguments)
    if reason := why_not(args.index):
        print(f"nothing was measured: {reason}", file=sys.stderr)
        result: dict[str, Any] = {"skipped": reason}
    else:
        result = measured(args)
        print(drawn(result), file=sys.stderr)
    deliver(result, args.out)
    return 0


def why_not(index: int) -> str | None:
    """Return the reason if there is no such device; None if there is one."""
    import torch

    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        return (
            f"torch {torch.__version__} finds no accelerator here; where there is one, run this with a "
            "Python whose torch was built for it"
        )
    if index >= accelerator.device_count():
        return f"there are {accelerator.device_count()} devices, and no device {index}"
    return None


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all rounds; of a simulated device only those of its memory."""
    import torch

    import reknit
    from benchmarks.gpu.measure import Bench
    from benchmarks.gpu.training import Training
    from tests.accelerator import installed

    torch.set_float32_matmul_precision("high")
    device = torch.device(torch.accelerator.current_accelerator().type, args.index)  # type: ignore[union-attr]
    torch.accelerator.set_device_index(args.index)
    with scratch(args.dir) as folder, ExitStack() as stack:
        stack.callback(reknit.close)
        bench = Bench(Training(device, int(args.gib * (1 << 30)), args.width, args.batch), folder)
        for _ in range(args.rounds):
            bench.round()
        bench.watch_memory()
    simulated = installed() is not None
    return {
        "device": _name(device),
        "simulated": simulated,
        "machine": machine(),
        "software": software("torch", "reknit"),
        "gib": round(bench.link.nbytes / (1 << 30), 3),
        "tensors": len(bench.training.tensors()),
        "rounds": args.rounds,
        "pinned": bench.link.is_pinned,
        "rows": rows(bench, simulated=simulated),
        "memory MiB": bench.memory,
    }


def rows(bench: Bench, *, simulated: bool) -> list[dict[str, Any]]:
    """Return the rows of the table.  A simulated device has no speed, so its times are left out."""
    words = {"memcpy": "pinned memcpy" if bench.link.is_pinned else "memcpy", "window": bench.window}
    found = []
    for name, text, limits in ROWS:
        row: dict[str, Any] = {"what": text.format(**words), "against": " and ".join(limits)}
        seconds = bench.median(name)
        if not simulated and seconds is not None:
            row["s"] = seconds
            row["GB/s"] = round(bench.link.nbytes / 1e9 / seconds, 1) if name in COPIES else None
            row["ratio"] = bench.ratio(name, *limits) if limits else None
            row["s of each round"] = [round(value, 5) for value in bench.times[name]]
        found.append(row)
    return found


def drawn(result: dict[str, Any]) -> str:
    """Return a table for people."""
    lines = [
        f"{result['device']}: {result['gib']} GiB of state in {result['tensors']} tensors, "
        f"medians of {result['rounds']} rounds",
        f"{result['machine']}, {result['software']}",
    ]
    if result["simulated"]:
        lines.append("the device is simulated: it has no speed, so all times are left out")
    if not result["pinned"]:
        lines.append("torch pins no memory for this kind of device, so copies are of pageable memory")
    lines += ["", f"{'':48s}{'s':>10s}{'GB/s':>8s}{'ratio':>8s}"]
    for row in result["rows"]:
        cells = [_cell(row.get("s"), 10, 4), _cell(row.get("GB/s"), 8, 1), _cell(row.get("ratio"), 8, 2)]
        against = f"  to {row['against']}" if row["against"] else ""
        lines.append(f"{row['what']:48s}{''.join(cells)}{against}")
    lines += ["", f"{'most memory beside the state, MiB':48s}{'device':>10s}{'host':>8s}"]
    for name, most in result["memory MiB"].items():
        lines.append(f"{name:48s}{_cell(most['device'], 10, 0)}{_cell(most['host'], 8, 0)}")
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}s}"


def _name(device: Any) -> str:
    import torch

    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device} ({name(device)})" if name is not None else str(device)


if __name__ == "__main__":
    sys.exit(main())
