"""What does a backend cost beside its raw client?  Put and get of one file, in one run.

Each measurement is a process of its own, and those of reknit and of the raw client alternate.  Prints a
table to stderr and JSON to stdout.  Object stores are those that scripts/servers has up.

Run: python benchmarks/storage/run.py [--mib 1024] [--repeat 3] [--threads 2] [--only local s3 gcs azure]
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
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

from benchmarks.storage.places import PLACES, folder, prepare  # noqa: E402  (found by the line above)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

MIB = 1 << 20
PIECE = 8 * MIB


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
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=PLACES, default=PLACES)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(measure(Job(*json.loads(arguments.job)))))
        return 0
    rows = []
    for place in arguments.only:
        if (url := folder(place)) is None:
            print(f"{place}: not measured, scripts/servers up {place}", file=sys.stderr)
            continue
        rows += compare(place, url, arguments)
    print(json.dumps({"mib": arguments.mib, "threads": arguments.threads, "rows": rows}, indent=1))
    return 0


def compare(place: str, url: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all that is done at a place, and tell it."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    try:
        for _ in range(arguments.repeat):
            for who in ("raw", "reknit"):
                at = f"{url}/{uuid.uuid4().hex[:8]}"
                for what in ("put", "get", "remove"):
                    job = Job(place, who, what, at, arguments.mib, arguments.threads)
                    found.setdefault((what, who), []).append(apart(job))
    finally:
        if place == "local":
            shutil.rmtree(url, ignore_errors=True)
    rows = []
    for what in ("put", "get"):
        row: dict[str, Any] = {"place": place, "what": what}
        for who in ("raw", "reknit"):
            runs = found[what, who]
            for name in runs[0]:
                row[f"{who} {name}"] = round(statistics.median(run[name] for run in runs), 2)
        row["ratio"] = round(row["reknit MB/s"] / row["raw MB/s"], 3)
        rows.append(row)
        tell(row)
    return rows


def tell(row: dict[str, Any]) -> None:
    sides = "   ".join(
        f"{who}: {row[f'{who} MB/s']:7.0f} MB/s {row[f'{who} CPU s/GB']:5.2f} CPU s/GB "
        f"{row[f'{who} extra MiB']:5.0f} MiB more"
        for who in ("raw", "reknit")
    )
    print(f"{row['place']:6s} {row['what']:4s} {sides}   ratio {row['ratio']:.2f}", file=sys.stderr)


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

    actions: dict[str, Callable[[str, NDArray[np.uint8], ThreadPoolExecutor], None]]
    side = ours if job.who == "reknit" else raw.side(job.place)
    actions = {"put": side.put, "get": side.get, "remove": side.remove}
    data = np.full(job.mib * MIB, 3, np.uint8)
    if job.what == "put":
        some = np.random.default_rng(1).integers(0, 256, 64 * MIB, np.uint8)
        for start in range(0, len(data), len(some)):
            data[start : start + len(some)] = some[: len(data) - start]
    with ThreadPoolExecutor(job.threads) as pool:
        list(pool.map(time.sleep, [0.01] * job.threads))
        Path("/proc/self/clear_refs").write_text("5")
        before, used = memory(), cpu()
        begin = time.perf_counter()
        actions[job.what](job.url, data, pool)
        seconds = time.perf_counter() - begin
    found = {
        "MB/s": data.nbytes / 1e6 / seconds,
        "CPU s/GB": (cpu() - used) / (data.nbytes / 1e9),
        "extra MiB": (memory() - before) / MIB,
    }
    if job.what == "get":
        check(data)
    return found


def check(data: NDArray[np.uint8]) -> None:
    """Raise unless what was read is what `measure` puts."""
    expected = np.random.default_rng(1).integers(0, 256, 64 * MIB, np.uint8)
    for start in range(0, len(data), len(expected)):
        part = data[start : start + len(expected)]
        assert np.array_equal(part, expected[: len(part)])


def memory() -> int:
    """Return the most memory that this process has held since it was asked to forget."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this needs Linux")


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
