"""The cost of a backend beside its raw client: put and get of one file, in one run.

Each measurement is a process of its own, and those of reknit and of the raw client alternate.  Each
begins when the machine is idle, or after a limited wait.  A save and a load of one array stand
beside the same client.  Prints a table to stderr and JSON to stdout; with --keep, both go to
benchmarks/results/.  Servers must be up (`scripts/servers`).

With --hdfs it compares one stream with sub-files, and numbers of reading threads, on HDFS only.

Run: python benchmarks/storage/run.py [--mib 1024] [--repeat 10] [--threads 2] [--keep]
     [--only local mem s3 gcs azure hdfs] [--hdfs]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.aims import ratio  # noqa: E402
from benchmarks.reports import RESULTS, judged, keep, machine, show, software  # noqa: E402
from benchmarks.storage.limits import limits  # noqa: E402  (found by the line above)
from benchmarks.storage.places import PLACES, clear, folder, prepare  # noqa: E402
from benchmarks.storage.timing import MIB, timed, wait_until_idle  # noqa: E402

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from benchmarks.reports import Row

ROWS = (
    ("put", "put", "reknit"),
    ("get", "get", "reknit"),
    ("save", "put", "whole"),
    ("load", "get", "whole"),
)
"""A row, the operation of the raw client, and who does the same: the backend, or a save or a load."""
MEASURES = ("MB/s", "CPU s/GB", "extra MiB")


class Job(NamedTuple):
    """One measurement: `who` does `what` with a file of `mib` MiB at `url`."""

    place: str
    who: str
    what: str
    url: str
    mib: int
    threads: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=PLACES, default=PLACES)
    parser.add_argument("--idle", type=float, default=0.85, help="share of the machine that has to be idle")
    parser.add_argument("--wait", type=float, default=60, help="the longest wait for that, in seconds")
    parser.add_argument("--keep", action="store_true", help=f"write to {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--hdfs", action="store_true", help="measure sub-files and reading threads on HDFS")
    parser.add_argument("--sync", action="store_true", help="with --hdfs: DataNodes write to their disks")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(measure(Job(*json.loads(arguments.job)))))
        return 0
    if arguments.hdfs:
        from benchmarks.storage import hdfs

        return hdfs.answer(arguments.mib, arguments.repeat, "power" if arguments.sync else "process")
    result = measure_all(arguments)
    table = drawn(result)
    print(table, file=sys.stderr)
    show(judged("storage", ratios(result["rows"])))
    print(json.dumps(result, indent=1))
    if arguments.keep:
        keep(result, RESULTS / "storage.json")
        (RESULTS / "storage.txt").write_text(f"{table}\n")
    return 0


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all places, and the limits of the machine."""
    reported: dict[str, Any] = {
        "machine": machine(),
        "software": software("numpy", "obstore", "hdfs-native", "reknit"),
        "load average before": os.getloadavg()[0],
        "mib": arguments.mib,
        "threads": arguments.threads,
        "repeat": arguments.repeat,
    }
    at = folder("local")
    assert at is not None
    wait_until_idle(arguments.idle, arguments.wait)
    try:
        reported["limits MB/s"] = limits(Path(at), arguments.mib * MIB, arguments.threads, arguments.repeat)
    finally:
        clear("local", at)
    reported["rows"] = []
    for place in arguments.only:
        if (url := folder(place)) is None:
            print(f"{place}: not measured, scripts/servers up {place}", file=sys.stderr)
            continue
        reported["rows"] += compare(place, url, arguments)
    return reported


def compare(place: str, url: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all operations at a place, and print and return their rows."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    try:
        for _ in range(arguments.repeat):
            for who in ("raw", "reknit", "whole"):
                at = f"{url}/{uuid.uuid4().hex[:8]}"
                for what in ("put", "get", "remove"):
                    idle = wait_until_idle(arguments.idle, arguments.wait if what != "remove" else 0)
                    job = Job(place, who, what, at, arguments.mib, arguments.threads)
                    found.setdefault((what, who), []).append(apart(job) | {"idle": idle})
    finally:
        clear(place, url)
    rows = []
    for what, act, who in ROWS:
        row: dict[str, Any] = {"place": place, "what": what}
        sides = {"raw": found[act, "raw"], "reknit": found[act, who]}
        for name, runs in sides.items():
            for measure in MEASURES:
                row[f"{name} {measure}"] = round(statistics.median(run[measure] for run in runs), 2)
            row[f"{name} MB/s of each run"] = [round(run["MB/s"], 1) for run in runs]
        row["ratio"] = round(ratio(row["reknit MB/s of each run"], row["raw MB/s of each run"]), 3)
        row["least idle"] = round(min(run["idle"] for runs in sides.values() for run in runs), 2)
        rows.append(row)
        print(line(row), file=sys.stderr, flush=True)
    return rows


def ratios(rows: list[dict[str, Any]]) -> list[Row]:
    """Return the speed of reknit over the one of the raw client in each row."""
    return [(f"{row['place']} {row['what']}: reknit / raw client", row["ratio"]) for row in rows]


def drawn(result: dict[str, Any]) -> str:
    """Return a table for people."""
    most = ", ".join(f"{name} {value:.0f}" for name, value in result["limits MB/s"].items())
    return "\n".join(
        (
            f"one file of {result['mib']} MiB, {result['threads']} threads, medians of {result['repeat']}",
            f"{result['machine']}, {result['software']}",
            f"at most, MB/s: {most}",
            f"load average before: {result['load average before']:.1f}",
            "",
            f"{'':11s}{'MB/s':>15s}{'':9s}{'CPU s/GB':>14s}{'extra MiB':>16s}",
            f"{'':11s}{'raw':>7s}{'reknit':>8s}{'ratio':>7s}{'raw':>9s}{'reknit':>8s}{'raw':>8s}{'reknit':>8s}"
            f"{'least idle':>12s}",
            *map(line, result["rows"]),
        )
    )


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['place']:6s} {row['what']:4s}"]
    cells += [f"{row['raw MB/s']:7.0f}{row['reknit MB/s']:8.0f}{row['ratio']:7.2f}"]
    cells += [f"{row['raw CPU s/GB']:9.2f}{row['reknit CPU s/GB']:8.2f}"]
    cells += [f"{row['raw extra MiB']:8.0f}{row['reknit extra MiB']:8.0f}{row['least idle']:12.2f}"]
    return "".join(cells)


def apart(job: Job) -> dict[str, float]:
    """Do a job in a process of its own."""
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{job} failed: {done.stderr[-2000:]}")
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def measure(job: Job) -> dict[str, float]:
    prepare(job.place)
    from benchmarks.storage import ours, raw

    known: dict[str, raw.Side] = {"reknit": ours.Ours(), "whole": ours.Whole()}
    side = known.get(job.who) or raw.side(job.place)
    actions = {"put": side.put, "get": side.get, "remove": side.remove}
    data = np.full(job.mib * MIB, 3, np.uint8)
    if job.what == "put":
        some = np.random.default_rng(1).integers(0, 256, 64 * MIB, np.uint8)
        for start in range(0, len(data), len(some)):
            data[start : start + len(some)] = some[: len(data) - start]
    with ThreadPoolExecutor(job.threads) as pool:
        list(pool.map(time.sleep, [0.01] * job.threads))
        found = timed(lambda: actions[job.what](job.url, data, pool), data.nbytes)
    if job.what == "get":
        check(data)
    return found


def check(data: NDArray[np.uint8]) -> None:
    """Raise unless the bytes equal the file of `measure`."""
    expected = np.random.default_rng(1).integers(0, 256, 64 * MIB, np.uint8)
    for start in range(0, len(data), len(expected)):
        part = data[start : start + len(expected)]
        assert np.array_equal(part, expected[: len(part)])


if __name__ == "__main__":
    sys.exit(main())
