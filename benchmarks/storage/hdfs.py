"""How much sooner is a file on HDFS in sub-files than in one stream, and read in ranges than in one go?

One file is written in one stream and in sub-files by reknit, and in one stream by the client alone, and
then read by 1, 2, 4 and 8 threads that read a part each.  Ways alternate, all in one run; figures are
medians.  Prints a table to stderr and JSON to stdout.  Needs: scripts/servers up hdfs

Run: python benchmarks/storage/hdfs.py [--mib 256] [--repeat 3] [--sync]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hdfs_native import Client, WriteOptions

from reknit.storage.hdfs import HdfsStorage, open_hdfs

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.options import Durability

STATE = Path(__file__).parents[2] / ".servers/hdfs.json"
MIB = 1 << 20
PIECE = 8 * MIB
THREADS = (1, 2, 4, 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--sync", action="store_true", help="have DataNodes write to their disks (durability power)"
    )
    arguments = parser.parse_args()
    if not STATE.exists():
        print("needs a server: scripts/servers up hdfs", file=sys.stderr)
        return 1
    url = f"{json.loads(STATE.read_text())['endpoint']}/bench-{uuid.uuid4().hex[:8]}"
    data = np.random.default_rng(0).integers(0, 256, arguments.mib * MIB, np.uint8)
    result = measure(url, data, arguments.repeat, "power" if arguments.sync else "process")
    show(result)
    print(json.dumps(result))
    return 0


def measure(url: str, data: np.ndarray[Any, Any], repeat: int, durability: Durability) -> dict[str, Any]:
    """Return the megabytes per second of each way, and the processor time of this process per gigabyte."""
    split = open_hdfs(url, durability)
    stream = open_hdfs(f"{url}?concat=none", durability)
    client, path = Client(url[: url.index("/", 7)]), url[url.index("/", 7) :]
    ways: dict[str, Callable[[], None]] = {
        "write, client alone, one stream": lambda: write_raw(client, f"{path}/raw", data),
        "write, one stream": lambda: write(stream, "stream", data),
        "write, sub-files": lambda: write(split, "split", data),
    }
    write(split, "read", data)
    for threads in THREADS:
        ways[f"read, {threads} threads"] = partial(read, split, "read", data, threads)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    try:
        for _ in range(repeat):
            for way, work in ways.items():
                begin, used = time.perf_counter(), time.process_time()
                work()
                seconds, used = time.perf_counter() - begin, time.process_time() - used
                found[way].append((seconds, used))
                for name in ("stream", "split"):
                    split.delete(name)
                client.delete(f"{path}/raw")
    finally:
        client.delete(path, True)
    rows = {
        way: {
            "mb_per_s": round(len(data) / 1e6 / statistics.median(seconds for seconds, _ in times), 1),
            "cpu_s_per_gb": round(statistics.median(used for _, used in times) / (len(data) / 1e9), 2),
        }
        for way, times in found.items()
    }
    ratio = rows["write, sub-files"]["mb_per_s"] / rows["write, one stream"]["mb_per_s"]
    return {
        "nbytes": len(data),
        "repeat": repeat,
        "durability": durability,
        "ways": rows,
        "sub-files over one stream": round(ratio, 2),
    }


def write(storage: HdfsStorage, name: str, data: np.ndarray[Any, Any]) -> None:
    """Write as the engine does: pieces in order, from two threads."""
    writer = storage.create(name, len(data))
    with ThreadPoolExecutor(2) as pool:
        starts = range(0, len(data), PIECE)
        list(pool.map(lambda start: writer.write(start, data[start : start + PIECE].data), starts))
    writer.finish()


def write_raw(client: Client, path: str, data: np.ndarray[Any, Any]) -> None:
    with client.create(path, WriteOptions(overwrite=True, create_parent=True)) as file:
        for start in range(0, len(data), PIECE):
            file.write(data[start : start + PIECE].tobytes())


def read(storage: HdfsStorage, name: str, data: np.ndarray[Any, Any], threads: int) -> None:
    """Read with so many threads, each of which asks for one range at a time."""
    one = open_hdfs(f"{storage.url}?concurrency=1")
    out = np.empty(len(data), np.uint8)
    with ThreadPoolExecutor(threads) as pool:
        starts = range(0, len(data), PIECE)
        list(pool.map(lambda start: one.read_into(name, start, [out[start : start + PIECE].data]), starts))
    assert np.array_equal(out, data)


def show(result: dict[str, Any]) -> None:
    """Print a table for people."""
    print(f"{result['nbytes'] / MIB:g} MiB, median of {result['repeat']}", file=sys.stderr)
    for way, row in result["ways"].items():
        print(f"{way:34s} {row['mb_per_s']:8.1f} MB/s {row['cpu_s_per_gb']:6.2f} CPU s/GB", file=sys.stderr)
    print(f"sub-files over one stream: {result['sub-files over one stream']:g}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
