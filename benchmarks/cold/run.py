"""The cost of the first call of a fresh process: reknit, torch DCP, torch.save, safetensors and Orbax.

Each figure is the median, with the smallest and the largest, of several calls, each in fresh processes, by
turns with its rivals.  The time of a call is that of the slowest rank, with the import of the library, after
torch (or JAX).  With ``--drop-caches`` (as root) the page cache is emptied before each call, else all files
are in memory.  Then many processes on this machine save at once, each for itself, and the files are counted
that a rank opens before the first one of the checkpoint.  Prints JSON, and the ratios with their aims to
stderr.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.ranks import RanksFailedError, free_port, options, scratch
from benchmarks.reports import deliver, judged, ratio, show
from benchmarks.turns import in_turn

if TYPE_CHECKING:
    import argparse

    from benchmarks.reports import Row

PAIRS = (
    # ranks, MiB a rank, call
    (1, 16, "import"),
    (1, 16, "save"),
    (1, 16, "load"),
    (1, 16, "background"),
    (2, 16, "save"),
    (2, 16, "load"),
    (2, 16, "background"),
    (2, 16, "resumed"),
    (2, 16, "prepared"),
    (2, 512, "background"),
    (2, 512, "resumed"),
    (2, 512, "prepared"),
    (2, 1024, "save"),
    (2, 1024, "load"),
)
ALONE = (("torch", 16), ("safetensors", 16), ("orbax", 16))
"""Rivals of one process, with the MiB of its state."""
AHEAD = ("prepared", "resumed")
"""Saves in the background after a call of reknit, by a rival after none."""
RIVALS = {"dcp": "DCP", "dcp-process": "DCP's process"}
"""The rivals of a pair; the process saves in the background only."""
CROWDS = (1, 8, 64)
LARGE_MIB = 512


def call(args: argparse.Namespace, library: str, what: str, folder: str, mib: int, *, ranks: int = 1) -> Any:
    """Return the results of each rank of one call, in fresh processes."""
    if args.drop_caches:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    port = free_port()
    common = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    if ranks > 1:
        common.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("call.py"))]
    command += [library, what, folder, str(mib)]
    several = ranks > 1
    return _ended(
        [
            subprocess.Popen(
                command,
                env=dict(common, RANK=str(rank), LOCAL_RANK=str(rank)) if several else common,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ],
        args.timeout,
    )


def _ended(processes: list[subprocess.Popen[str]], timeout_s: float) -> list[dict[str, Any]]:
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        for _, errors in outputs:  # the first to fail is not always the one with the cause
            sys.stderr.write(errors[-5000:])
        raise RanksFailedError(f"processes ended with {[process.returncode for process in processes]}")
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
    }


class Turns:
    """Calls of several libraries by turns, each to a folder of its own."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self._args, self._folder = args, folder

    def take(self, libraries: tuple[str, ...], what: str, mib: int, ranks: int) -> dict[str, Any]:
        """Return the spread of the seconds of the slowest rank, and the results of the last call."""
        last: dict[str, Any] = {}
        for library in libraries:
            if what == "load":
                self._fresh(library, "save", mib, ranks)

        def one(library: str, number: int) -> dict[str, float]:
            same = "background" if what in AHEAD and library != "reknit" else what
            if what != "load":
                shutil.rmtree(self._path(library), ignore_errors=True)
            if same == "resumed":
                step = f"{self._path(library)}/step_00000000"
                call(self._args, library, "save", step, mib, ranks=ranks)
            last[library] = call(self._args, library, same, self._path(library), mib, ranks=ranks)
            return {"s": max(result["s"] for result in last[library])}

        repeat = self._args.repeat if mib < LARGE_MIB else self._args.repeat_large
        ways = {library: partial(one, library) for library in libraries}
        seconds = in_turn(ways, repeat, warm_up=False).of("s")
        for library in libraries:
            shutil.rmtree(self._path(library), ignore_errors=True)
        found = {library: {**spread(seconds[library]), "last": last[library][0]} for library in libraries}
        print(
            f"{ranks} x {mib} MiB {what}: { ({k: v['median'] for k, v in found.items()}) }", file=sys.stderr
        )
        return found

    def starts(self) -> dict[str, float]:
        """Return the median seconds of an import in a process with NumPy, and of a process with `--help`."""
        help_s = []
        for _ in range(self._args.repeat):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-m", "reknit", "--help"], stdout=subprocess.DEVNULL, check=True)
            help_s.append(time.perf_counter() - begin)
        imported = self.take(("reknit-numpy",), "import", 1, 1)["reknit-numpy"]["median"]
        return {"import reknit, s": imported, "reknit --help, s": round(statistics.median(help_s), 4)}

    def count(self, what: str) -> int:
        """Return the number of files that a rank opens before the first file of the checkpoint."""
        first, _ = call(self._args, "reknit", f"count-{what}", self._path("reknit"), 1, ranks=2)
        return int(first["opened"])

    def crowd(self, library: str, size: int) -> dict[str, float]:
        """Return the spread of first saves of processes that save at once, each for itself."""
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("call.py"))]
        processes = [
            subprocess.Popen(
                [*command, library, "save", f"{self._path(library)}-{number}", "1"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(size)
        ]
        found = spread([result["s"] for result in _ended(processes, self._args.timeout)])
        for number in range(size):
            shutil.rmtree(f"{self._path(library)}-{number}")
        return found

    def _fresh(self, library: str, what: str, mib: int, ranks: int) -> None:
        shutil.rmtree(self._path(library), ignore_errors=True)
        call(self._args, library, what, self._path(library), mib, ranks=ranks)

    def _path(self, library: str) -> str:
        return f"{self._folder}/{library}"


def measured(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return all measurements."""
    turns = Turns(args, folder)
    result: dict[str, Any] = {
        "cores": os.cpu_count(),
        "repeat": args.repeat,
        "repeat_large": args.repeat_large,
        "page_cache": "dropped" if args.drop_caches else "warm",
    }
    result["pairs"] = []
    for ranks, mib, what in PAIRS:
        if mib <= args.most_mib and (what in args.calls or not args.calls):
            process = what in ("background", *AHEAD)
            found = turns.take(("reknit", "dcp", *(["dcp-process"] if process else [])), what, mib, ranks)
            result["pairs"].append({"ranks": ranks, "mib": mib, "call": what, **found})
    result["start"] = turns.starts()
    if args.calls:
        return result | {"alone": []}
    result["alone"] = []
    for rival, mib in ALONE:
        for what in ("save", "load"):
            pair = ("reknit-jax" if rival == "orbax" else "reknit", rival)
            found = turns.take(pair, what, mib, 1)
            result["alone"].append({"rival": rival, "mib": mib, "call": what, **found})
    result["opened"] = {what: turns.count(what) for what in ("save", "load")}  # the load reads that save
    result["crowd"] = {size: turns.crowd("reknit-numpy", size) for size in CROWDS if size <= args.crowd}
    return result


def rows(result: dict[str, Any]) -> list[Row]:
    """Return the ratios and figures."""
    found: list[Row] = []
    cold = ", cold" if result["page_cache"] == "dropped" else ""
    for pair in result["pairs"]:
        what = f"{pair['ranks']} x {pair['mib']} MiB, first {pair['call']}{cold}: reknit over"
        found += [
            (f"{what} {name}", ratio(pair["reknit"]["median"], pair[rival]["median"]))
            for rival, name in RIVALS.items()
            if rival in pair
        ]
    for pair in result["alone"]:
        ours = pair["reknit-jax" if pair["rival"] == "orbax" else "reknit"]["median"]
        what = f"1 x {pair['mib']} MiB, first {pair['call']}{cold}: reknit over {pair['rival']}"
        found.append((what, ratio(ours, pair[pair["rival"]]["median"])))
    found += result["start"].items()
    last = {pair["call"]: pair["reknit"]["last"] for pair in reversed(result["pairs"])}
    if "import" in last:
        found.append(("import, modules of reknit", last["import"]["own_modules"]))
    if "background" in last:
        agent = last["background"]["agent"]
        found += [
            ("idle agent, private MiB", agent["private_mib"]),
            ("idle agent, threads", agent["threads"]),
        ]
    return found


def main(arguments: list[str]) -> int:
    """Measure everything, and print it."""
    parser = options(__doc__, timeout_s=120.0)
    parser.add_argument(
        "calls", nargs="*", metavar="CALL", help="such as `save` or `resumed`, all without one"
    )
    parser.add_argument("--repeat", type=int, default=10, help="calls of each library per figure")
    large = f"the same for states of {LARGE_MIB} MiB and more a rank"
    parser.add_argument("--repeat-large", type=int, default=10, help=large)
    parser.add_argument("--most-mib", type=int, default=1024, help="leave larger states out")
    parser.add_argument("--crowd", type=int, default=64, help="most processes that save at once")
    parser.add_argument("--drop-caches", action="store_true", help="empty the page cache first (as root)")
    args = parser.parse_args(arguments)
    with scratch(args.dir) as folder:
        result = measured(args, os.path.abspath(folder))  # Orbax takes no other paths
    result["rows"] = judged("cold", rows(result))
    show(result["rows"])
    deliver(result, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
