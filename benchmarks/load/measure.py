"""The tools of every part: a page cache that is surely empty or full, memory, raw reads, contents."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from benchmarks.ranks import Bench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

PIECE = 8 << 20
PAGE = mmap.PAGESIZE
COLD = 0.01
"""The largest part of a cold checkpoint that may be in the page cache."""


class LoadBench(Bench):
    """The ranks of a run, with control of the page cache."""

    def __init__(self, folder: str, *, repeat: int) -> None:
        super().__init__(folder)
        self.repeat = repeat
        self.least_warm = 1.0
        self.most_cold = 0.0

    def cold(self, folder: str) -> None:
        """Drop a folder's files from the page cache, and check that they are gone."""

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

    def on_root(self, action: Callable[[], None]) -> None:
        """Act on the root while the others wait."""
        self.dist.barrier()
        if self.rank == 0:
            action()
        self.dist.barrier()

    def together(self, action: Callable[[], Any]) -> float:
        """Run an action on all ranks at once, and return the seconds of the slowest.

        An error on one rank ends the action on all, so that no rank waits for it.
        """
        failure: Exception | None = None
        self.dist.barrier()
        begin = time.perf_counter()
        try:
            action()
        except Exception as error:  # raised below, once the other ranks have received the failure
            failure = error
        taken, failed = self.slowest(time.perf_counter() - begin, float(failure is not None))
        if failure is not None:
            raise failure
        if failed:
            raise RuntimeError("it failed on another rank")
        return taken

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

    def total(self, *values: int) -> list[int]:
        """Return the sums of every rank's values."""
        return [round(value) for value in self._reduced(self.dist.ReduceOp.SUM, values)]

    def attempt(self, name: str, action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the results of an action, or the reason of its failure."""
        try:
            return action()
        except Exception as error:  # a failure is a result too
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.say(f"{name:60s} {reason}")
            return {"error": reason}

    def cache_check(self) -> dict[str, float]:
        """Return the largest cached part when cold, and the smallest when warm."""
        return {
            "resident_when_cold_at_most": round(self.most_cold, 4),
            "resident_when_warm_at_least": round(self.least_warm, 4),
        }


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


def raw_reads(bench: LoadBench, folder: str, quick: bool) -> dict[str, float]:
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


def _takes_direct(bench: LoadBench, paths: Sequence[str]) -> bool:
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
        return [tensor for value in state.values() for tensor in tensors(value)]
    return [state.to_local() if hasattr(state, "to_local") else state]


def fingerprint(state: Any) -> str:
    """Return a digest of everything that a state holds on this rank."""
    import torch

    seen = xxhash.xxh3_64()
    for tensor in tensors(state):
        seen.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return seen.hexdigest()


class Contents:
    """The contents that a state must have after every load: its present ones."""

    def __init__(self, bench: LoadBench, state: Any) -> None:
        self._bench, self._state = bench, state
        self._expected = fingerprint(state)

    def checked(self, load: Callable[[], Any]) -> Callable[[], Any]:
        """Return a load after it has restored the contents once, outside of the measurement.

        Raises `ValueError` on every rank if the loaded contents differ on any rank.
        """
        for tensor in tensors(self._state):
            tensor.zero_()
        self._bench.together(load)
        if self._bench.slowest(float(fingerprint(self._state) != self._expected))[0]:
            raise ValueError("the loaded contents differ from the saved ones")
        return load


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
