"""One way to time: all ranks begin together, with a page cache that is surely empty or full.

The limits are here too: plain copies, reads and writes of the same bytes; and the memory and the contents.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

PIECE = 8 << 20
PAGE = mmap.PAGESIZE
COLD = 0.01
"""The largest part of a cold checkpoint that may be in the page cache."""
ENDS = (KeyboardInterrupt, SystemExit)
"""Errors that end a run; all others are results, also those of DCP, which do not derive from `Exception`."""


class Bench:
    """The ranks of a run, whose slowest one counts, and the folder that they measure in.

    Ranks of `tests.ranks.run` have joined already; they print nothing, since their caller prints all rows.
    """

    def __init__(self, folder: str, *, repeat: int = 1) -> None:
        import torch
        import torch.distributed as dist

        self._prints = not dist.is_initialized()
        if self._prints:
            torch.set_num_threads(1)
            dist.init_process_group("gloo")
        self.dist, self.folder, self.repeat = dist, folder, repeat
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.least_warm, self.most_cold = 1.0, 0.0

    def slowest(self, *values: float) -> list[float]:
        """Return the largest of every rank's values."""
        return self._reduced(self.dist.ReduceOp.MAX, values)

    def mean(self, *values: float) -> list[float]:
        return [value / self.world for value in self._reduced(self.dist.ReduceOp.SUM, values)]

    def total(self, *values: int) -> list[int]:
        """Return the sums of every rank's values."""
        return [round(value) for value in self._reduced(self.dist.ReduceOp.SUM, values)]

    def _reduced(self, how: Any, values: tuple[float, ...]) -> list[float]:
        import torch

        reduced = torch.tensor(values, dtype=torch.float64)
        self.dist.all_reduce(reduced, how)
        return [float(value) for value in reduced]

    def together(self, action: Callable[[], Any]) -> float:
        """Run an action on all ranks at once, and return the seconds of the slowest.

        An error on one rank ends the action on all, so that no rank waits for it.
        """
        failure: BaseException | None = None
        self.dist.barrier()
        begin = time.perf_counter()
        try:
            action()
        except ENDS:
            raise
        except BaseException as error:  # raised below, once the other ranks have received the failure
            failure = error
        taken, failed = self.slowest(time.perf_counter() - begin, float(failure is not None))
        if failure is not None:
            raise failure
        if failed:
            raise RuntimeError("it failed on another rank")
        return taken

    def settled(self, action: Callable[[], Any]) -> float:
        """Return the seconds of the slowest rank, after dirty pages were written back."""
        self.settle()
        return self.together(action)

    def timed(
        self,
        name: str,
        action: Callable[[], Any],
        before: Callable[[], Any] | None = None,
        repeat: int | None = None,
    ) -> float:
        """Return the best time of the slowest rank, and print it."""
        times = []
        for _ in range(repeat or self.repeat):
            if before is not None:
                before()
            times.append(self.together(action))
        self.say(f"{name:60s} {min(times):8.3f} s")
        return round(min(times), 4)

    def attempt(self, name: str, action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the results of an action, or the reason of its failure."""
        try:
            return action()
        except ENDS:
            raise
        except BaseException as error:  # a failure is a result too
            reason = why(error)
            self.say(f"{name:60s} {reason}")
            return {"error": reason}

    def on_root(self, action: Callable[[], None]) -> None:
        """Act on the root while the others wait."""
        self.dist.barrier()
        if self.rank == 0:
            action()
        self.dist.barrier()

    def drop(self, url: str) -> None:
        """Remove a folder of this machine or of HDFS when all ranks are done with it."""
        self.on_root(lambda: remove(url))

    def settle(self) -> None:
        """Write all dirty pages back, so that the next contestant does not pay for them."""
        self.on_root(os.sync)

    def cold(self, folder: str) -> None:
        """Drop a folder's files from the page cache, and check that they are gone; those of HDFS stay."""
        if folder.startswith("hdfs://"):
            return

        def drop() -> None:
            evict(folder)
            self.most_cold = max(self.most_cold, resident(folder))

        self.on_root(drop)
        if self.rank == 0 and self.most_cold > COLD:
            self.say(f"not cold: {self.most_cold:.1%} of a checkpoint stayed in the page cache")

    def warm(self, folder: str) -> None:
        """Read a folder's files into the page cache, and check that they are there."""

        def read() -> None:
            buffer = bytearray(PIECE)
            for path in _files(folder):
                with path.open("rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass
            self.least_warm = min(self.least_warm, resident(folder))

        self.on_root(read)

    def cache_check(self) -> dict[str, float]:
        """Return the largest cached part when cold, and the smallest when warm."""
        return {
            "resident_when_cold_at_most": round(self.most_cold, 4),
            "resident_when_warm_at_least": round(self.least_warm, 4),
        }

    def say(self, text: str) -> None:
        if self.rank == 0 and self._prints:
            print(text, flush=True)


def why(error: BaseException) -> str:
    """Return an error in one line; of a long text the end, which has the cause."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"


def phases(report: Any) -> dict[str, float]:
    """Return the seconds of each phase, summed over its threads."""
    seconds: dict[str, float] = {}
    for record in getattr(report, "phases", ()):
        seconds[record.phase] = round(seconds.get(record.phase, 0.0) + record.seconds, 4)
    return seconds


def remove(url: str) -> None:
    """Remove a folder of this machine or of HDFS."""
    if url.startswith("hdfs://"):
        import hdfs_native

        server, _, path = url.removeprefix("hdfs://").partition("/")
        hdfs_native.Client(f"hdfs://{server}").delete(f"/{path}", True)
    else:
        shutil.rmtree(url, ignore_errors=True)


def _files(folder: str) -> list[Path]:
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def evict(folder: str) -> None:
    """Drop a folder's files from the page cache."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def data_files(folder: str) -> list[str]:
    """Return the tensor files of a reknit checkpoint, sorted: one after another by item, then by rank."""
    return [str(path) for path in _files(folder) if path.suffix == ".safetensors"]


def resident(folder: str) -> float:
    """Return the part of a folder's files that is in the page cache, between 0 and 1."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    found = pages = 0
    for path in _files(folder):
        if not (nbytes := path.stat().st_size):
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            there = np.zeros(-(-nbytes // PAGE), np.uint8)
            if libc.mincore(view.ctypes.data, nbytes, there.ctypes.data) != 0:
                raise OSError(ctypes.get_errno(), "mincore", str(path))
            found, pages = found + int((there & 1).sum()), pages + len(there)
            del view  # else the file cannot be unmapped
    return found / pages if pages else 0.0


def io_counts() -> tuple[int, int]:
    """Return the bytes that this process has read by system calls, and from a disk."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"]), int(counts["read_bytes"])


def pinned(nbytes: int) -> memoryview:
    """Return page-aligned memory whose pages are mapped already."""
    memory = mmap.mmap(-1, max(-(-nbytes // PAGE) * PAGE, PAGE))
    np.frombuffer(memory, np.uint8)[::PAGE] = 1
    return memoryview(memory)


def raw_read(paths: Sequence[str], memory: memoryview, threads: int, *, direct: bool) -> None:
    """Read whole files, one after another, in pieces of 8 MiB."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            nbytes = os.fstat(fd).st_size
            # Direct reads are whole pages, including the last one.
            whole = -(-nbytes // PAGE) * PAGE

            def piece(start: int, fd: int = fd, whole: int = whole) -> int:
                return os.preadv(fd, [memory[start : min(start + PIECE, whole)]], start)

            with ThreadPoolExecutor(threads) as pool:
                done = sum(pool.map(piece, range(0, nbytes, PIECE)))
            if done != nbytes:
                raise OSError(f"{done} of the {nbytes} bytes of {path} were read")
        finally:
            os.close(fd)


def raw_write(path: str, data: memoryview, *, direct: bool, threads: int = 2) -> None:
    """Write and sync a new file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0), 0o644)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda k: os.pwrite(fd, data[k : k + PIECE], k), range(0, len(data), PIECE)))
        os.fsync(fd)
    finally:
        os.close(fd)


def copier(tensors: list[Any]) -> Callable[[], None]:
    """Return a function that copies all tensors, one after another, to memory that is already mapped."""
    import torch

    arrays = [t.detach().contiguous().view(-1).view(torch.uint8).numpy() for t in tensors]
    ends = np.cumsum([a.nbytes for a in arrays])
    target = np.empty(ends[-1], np.uint8)
    parts = [target[end - a.nbytes : end] for a, end in zip(arrays, ends, strict=True)]

    def copy() -> None:
        for part, array in zip(parts, arrays, strict=True):
            np.copyto(part, array)

    copy()  # maps every page of the target
    return copy


def raw_reads(bench: Bench, folder: str, quick: bool) -> dict[str, float]:
    """Return the time of every way to read the data files of a cold checkpoint, each rank its own.

    A sharded checkpoint has as many files per item as ranks.
    """
    paths = data_files(folder)[bench.rank :: bench.world]
    memory = pinned(max((os.path.getsize(path) for path in paths), default=0))
    found: dict[str, float] = {}
    for direct in (False, True):
        if direct and not _takes_direct(bench, paths):
            continue
        for threads in (2,) if quick else (1, 2, 4):
            name = f"{'O_DIRECT' if direct else 'buffered'}, {threads} thread{'s' * (threads > 1)}"
            found[name] = bench.timed(
                f"raw read, {name}",
                partial(raw_read, paths, memory, threads, direct=direct),
                lambda: bench.cold(folder),
            )
    return found


def _takes_direct(bench: Bench, paths: Sequence[str]) -> bool:
    """Return whether the file system has O_DIRECT, on all ranks."""
    refused = 0.0
    for path in paths[:1]:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            refused = 1.0
    return bench.slowest(refused)[0] == 0.0


def tensors(state: Any) -> list[Any]:
    """Return the local tensors of a nested state."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list):
        return [tensor for value in state for tensor in tensors(value)]
    return [state.to_local() if hasattr(state, "to_local") else state]


def fingerprint(state: Any) -> str:
    """Return a digest of everything that a state holds on this rank."""
    import torch

    seen = xxhash.xxh3_64()
    for tensor in tensors(state):
        seen.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return seen.hexdigest()


class Contents:
    """The contents that a state must have after every load.

    They are its present ones, or with `known=False` those after the first load that is checked.
    """

    def __init__(self, bench: Bench, state: Any, *, known: bool = True) -> None:
        self._bench, self._state = bench, state
        self._expected = fingerprint(state) if known else ""

    def checked(self, load: Callable[[], Any]) -> Callable[[], Any]:
        """Return a load after it has restored the contents once, outside of the measurement.

        Raises `ValueError` on every rank if the loaded contents differ on any rank.
        """
        self.wipe()
        self._bench.together(load)
        self.check()
        return load

    def wipe(self) -> None:
        """Replace all contents by zeros."""
        import torch

        with torch.no_grad():
            for tensor in tensors(self._state):
                tensor.zero_()

    def check(self) -> None:
        """Raise `ValueError` on every rank if the contents differ on any."""
        found = fingerprint(self._state)
        self._expected = self._expected or found
        if self._bench.slowest(float(found != self._expected))[0]:
            raise ValueError("the loaded contents differ from the saved ones")


class PeakMemory:
    """Watches memory: `extra` has the most bytes above the start, for each kind that `look` returns."""

    def __init__(self, look: Callable[[], Sequence[int]], every_s: float) -> None:
        self._look, self._every_s = look, every_s
        self._before = look()
        self.extra = [0 for _ in self._before]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        over = False
        while not over:
            over = self._over.wait(self._every_s)
            now = zip(self.extra, self._look(), self._before, strict=True)
            self.extra = [max(most, found - before) for most, found, before in now]


def own_memory() -> tuple[int, int]:
    """Return this process's anonymous and shared memory, and all shared memory of the host."""
    own = _fields("/proc/self/status", ("RssAnon", "RssShmem"))
    return sum(own), sum(_fields("/proc/meminfo", ("Shmem",)))


def _fields(path: str, names: Iterable[str]) -> list[int]:
    lines: Mapping[str, str] = dict(
        line.split(":", 1) for line in Path(path).read_text().splitlines() if ":" in line
    )
    return [int(lines[name].split()[0]) * 1024 for name in names]


def gib_of(nbytes: float) -> float:
    return round(nbytes / (1 << 30), 4)
