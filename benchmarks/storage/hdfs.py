"""A file on HDFS in sub-files beside one in one stream, and read in ranges beside a read in one go.

One file is written by reknit in one stream and in sub-files, and by the client alone in one stream.  Then
1, 2, 4 and 8 threads read a part each.  All ways alternate in one run; figures are medians.
Run by ``scripts/bench storage --hdfs``.
"""

from __future__ import annotations

import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.storage.ours import read, write
from benchmarks.storage.places import folder
from benchmarks.storage.raw import Hdfs, UnsyncedHdfs
from benchmarks.storage.timing import MIB, timed
from benchmarks.turns import in_turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from reknit.options import Durability

THREADS = (1, 2, 4, 8)


def answer(mib: int, repeat: int, durability: Durability) -> int:
    """Measure, and print a table to stderr and JSON to stdout."""
    if (url := folder("hdfs")) is None:
        print("needs a server: scripts/servers up hdfs", file=sys.stderr)
        return 1
    data = np.random.default_rng(0).integers(0, 256, mib * MIB, np.uint8)
    result = measure(url, data, repeat, durability)
    show(result)
    print(json.dumps(result))
    return 0


def measure(url: str, data: NDArray[np.uint8], repeat: int, durability: Durability) -> dict[str, Any]:
    """Return the megabytes per second of each way, and the processor time of this process per gigabyte."""
    from reknit.stores.hdfs.store import open_hdfs

    split = open_hdfs(url, durability)
    stream = open_hdfs(f"{url}?concat=none", durability)
    raw = Hdfs() if durability == "power" else UnsyncedHdfs()
    with ThreadPoolExecutor(2) as pool:
        ways: dict[str, Callable[[], object]] = {
            "write, client alone, one stream": lambda: raw.put(f"{url}/raw", data, pool),
            "write, one stream": lambda: write(stream, "stream", data, pool),
            "write, sub-files": lambda: write(split, "split", data, pool),
        }
        write(split, "read", data, pool)
        for threads in THREADS:
            ways[f"read, {threads} threads"] = partial(read_by, threads, f"{url}?concurrency=1", data)

        def measured(work: Callable[[], object], number: int) -> dict[str, float]:
            found = timed(work, len(data))
            for name in ("stream", "split", "raw/file"):
                split.delete(name)
            return found

        try:
            parts = {way: partial(measured, work) for way, work in ways.items()}
            taken = in_turn(parts, repeat, warm_up=False)
        finally:
            split.delete("read")
    assert not taken.failed, taken.failed
    rows = {
        way: {
            "mb_per_s": round(statistics.median(found["MB/s"]), 1),
            "cpu_s_per_gb": round(statistics.median(found["CPU s/GB"]), 2),
        }
        for way, found in taken.figures.items()
    }
    ratio = rows["write, sub-files"]["mb_per_s"] / rows["write, one stream"]["mb_per_s"]
    return {
        "nbytes": len(data),
        "repeat": repeat,
        "durability": durability,
        "ways": rows,
        "sub-files over one stream": round(ratio, 2),
    }


def read_by(threads: int, url: str, data: NDArray[np.uint8]) -> None:
    """Read with so many threads, each of which asks for one range at a time."""
    from reknit.stores.hdfs.store import open_hdfs

    out = np.empty(len(data), np.uint8)
    with ThreadPoolExecutor(threads) as pool:
        read(open_hdfs(url), "read", out, pool)
    assert np.array_equal(out, data)


def show(result: dict[str, Any]) -> None:
    """Print a table for people."""
    print(f"{result['nbytes'] / MIB:g} MiB, median of {result['repeat']}", file=sys.stderr)
    for way, row in result["ways"].items():
        print(f"{way:34s} {row['mb_per_s']:8.1f} MB/s {row['cpu_s_per_gb']:6.2f} CPU s/GB", file=sys.stderr)
    print(f"sub-files over one stream: {result['sub-files over one stream']:g}", file=sys.stderr)
