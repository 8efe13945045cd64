"""Sections 4.3 and 6.4 of NSDI: HDFS with more writers, with more sub-files, and with joins side by side.

One file is written in one stream and in 2, 4 and 8 sub-files.  Then 1 to 16 writers write a file each, in
one stream and in sub-files.  Last, the sub-files of several files are joined, one file after another and all
at once.  All ways alternate in one run.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.paper.jobs import places
from benchmarks.paper.results import About, Measured, Row, small
from benchmarks.storage.ours import write
from benchmarks.turns import in_turn
from reknit.stores.hdfs.store import open_hdfs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Ways = Mapping[str, Callable[[int], object]]

ABOUT = About(
    name="hdfs",
    source="NSDI sections 4.3 and 6.4",
    title="HDFS: writers, sub-files, and joins side by side",
    paper="a file reaches 3 GB/s in sub-files where one client writes less than 0.1 GB/s (more than 30 "
    "times); joins in parallel and fewer metadata requests take 150 ms a file instead of 3 s (20 times).",
)
MIB = 1 << 20
SUB_FILES = (2, 4, 8)
WRITERS = (1, 2, 4, 8, 16)
JOINED_FILES, PARTS = 16, 8
WHY = (
    "one DataNode, and the client waits half a second to close most files, whether they have sub-files or not"
)


def measure(scratch: Path) -> Measured:
    """Measure on HDFS, or skip all if it cannot be started."""
    url, reason = places.hdfs()
    if reason:
        return Measured([], {"HDFS": reason})
    mib, each, rounds = (8, 1, 1) if small() else (64, 8, 3)
    data = np.random.default_rng(0).integers(0, 256, mib * MIB, np.uint8)
    rows = [*_sub_files(url, data, rounds), *_writers(url, data[: each * MIB], rounds)]
    rows += _joins(url, 4 if small() else JOINED_FILES, rounds)
    store = open_hdfs(url)
    store.client.ask("delete", url, lambda client: client.delete(store.place.folder, recursive=True))
    return Measured(
        rows,
        {"more than one DataNode": "the server of this machine has one NameNode and one DataNode"},
        [
            f"One file of {mib} MiB; writers write {each} MiB each. Every file is synced.",
            "Joins: sub-files of 4 KiB, so that only requests to the NameNode are measured.",
        ],
    )


def _seconds(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way, which alternate."""

    def timed(work: Callable[[int], object], number: int) -> dict[str, float]:
        begin = time.perf_counter()
        work(number)
        return {"s": time.perf_counter() - begin}

    taken = in_turn({way: partial(timed, work) for way, work in ways.items()}, rounds, warm_up=False)
    assert not taken.failed, taken.failed
    return taken.of("s")


def _speeds(ways: Ways, rounds: int, nbytes: int) -> dict[str, list[float]]:
    """Return the megabytes per second of each way."""
    seconds = _seconds(ways, rounds)
    return {way: [nbytes / 1e6 / each for each in all_] for way, all_ in seconds.items()}


def _sub_files(url: str, data: NDArray[np.uint8], rounds: int) -> list[Row]:
    """Write one file in one stream, and in sub-files."""

    def written(at: str, name: str, number: int) -> None:
        store = open_hdfs(at)
        with ThreadPoolExecutor(2) as pool:
            write(store, f"{name}-{number}", data, pool)
        store.delete(f"{name}-{number}")

    streams: dict[str, Any] = {"one stream": partial(written, f"{url}?concat=none", "stream")}
    for count in SUB_FILES:
        part = -(-len(data) // MIB // count)
        at = f"{url}?part_mib={part}&concurrency={count}"
        streams[f"{count} sub-files"] = partial(written, at, f"split-{count}")
    speeds = _speeds(streams, rounds, len(data))
    return [
        Row(
            f"one writer, {count} sub-files",
            "MB/s",
            {"reknit": speeds[f"{count} sub-files"], "one stream": speeds["one stream"]},
            "one stream",
            paper=(30.0,) if count == max(SUB_FILES) else (),
            why=WHY,
            more=True,
        )
        for count in SUB_FILES
    ]


def _writers(url: str, data: NDArray[np.uint8], rounds: int) -> list[Row]:
    """Write a file by each of several writers at once, in one stream and in sub-files."""
    part = max(len(data) // MIB // 4, 1)

    def one(at: str, name: str) -> None:
        store = open_hdfs(at)
        with ThreadPoolExecutor(2) as pool:
            write(store, name, data, pool)
        store.delete(name)

    def all_(at: str, kind: str, count: int, number: int) -> None:
        names = [f"{kind}-{count}-{number}-{writer}" for writer in range(count)]
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(partial(one, at), names))

    rows = []
    for count in WRITERS[:2] if small() else WRITERS:
        ways = {
            "reknit": partial(all_, f"{url}?part_mib={part}&concurrency=4", "split", count),
            "one stream": partial(all_, f"{url}?concat=none", "stream", count),
        }
        speeds = _speeds(ways, rounds, count * len(data))
        what = f"{count} writer{'s' * (count > 1)}, a file each, 4 sub-files"
        rows.append(Row(what, "MB/s in all", speeds, "one stream", why=WHY, more=True))
    return rows


def _joins(url: str, count: int, rounds: int) -> list[Row]:
    """Join the sub-files of several files, one file after another and all files at once."""
    store = open_hdfs(url)
    requests = store.requests
    assert requests is not None
    made: dict[tuple[str, int], list[list[str]]] = {}
    for kind in ("serial", "parallel"):
        for number in range(rounds):
            files = [
                [f"{store.place.folder}/{kind}/{number}-{file}/part-{part}" for part in range(PARTS)]
                for file in range(count)
            ]
            with ThreadPoolExecutor(8) as pool:
                names = [name for parts in files for name in parts]
                list(pool.map(lambda name: store.placement.write(name, [bytes(4096)]), names))
            made[kind, number] = files

    def join(parts: list[str]) -> None:
        requests.concat(parts[0], parts[1:], url)

    def serial(number: int) -> None:
        for parts in made["serial", number]:
            join(parts)

    def parallel(number: int) -> None:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(join, made["parallel", number]))

    seconds = _seconds({"serial": serial, "reknit": parallel}, rounds)
    taken = {who: [1e3 * each / count for each in all_] for who, all_ in seconds.items()}
    why = "the NameNode of this machine is near and serves few clients, and its lock orders all joins"
    return [
        Row(
            f"joins of {count} files of {PARTS} sub-files, at once",
            "ms a file",
            taken,
            "serial",
            paper=(20.0,),
            why=why,
        )
    ]
