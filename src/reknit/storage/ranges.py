"""Ranges of a file: read many small runs at once, check that a range lies inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reknit.errors import StorageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

NEAR_NBYTES = 4096
"""Runs that begin within so many bytes are read with the bytes between, which are on pages read anyway."""
STRETCH_NBYTES = 1 << 20
"""Bytes that are read at once for near runs: they stay in the processor's cache."""


def check_size(nbytes: int) -> None:
    """Raise `UsageError` for a number that cannot be the size of a file."""
    if nbytes < 0:
        raise UsageError(f"a file cannot have {nbytes} bytes")


def check_start(start: int) -> None:
    """Raise `UsageError` for a number that cannot be the first byte of a read."""
    if start < 0:
        raise UsageError(f"a read cannot start at byte {start}")


def filled(start: int, buffers: list[memoryview]) -> list[NDArray[np.uint8]]:
    """Return the non-empty buffers that a read from byte `start` on fills.  Raises `UsageError`."""
    check_start(start)
    return [np.frombuffer(buffer, np.uint8) for buffer in buffers if buffer.nbytes]


def check_inside(start: int, nbytes: int, whole_nbytes: int, url: str) -> None:
    """Raise `StorageError` unless bytes to be written lie inside the `whole_nbytes` of a file."""
    if not 0 <= start <= whole_nbytes - nbytes:
        raise StorageError(
            f"bytes {start} to {start + nbytes} lie outside the {whole_nbytes} of {url}", path=url
        )


def read_runs(
    read_into: Callable[[str, int, list[memoryview]], None],
    path: str,
    starts: NDArray[np.int64],
    nbytes: int,
    buffer: memoryview,
) -> None:
    """Carry out `Storage.read_runs` with the `read_into` of a store."""
    out = checked_runs(starts, nbytes, buffer)
    if not out.size:
        read_into(path, 0, [])
    elif not near(starts):
        for start, run in zip(starts.tolist(), out, strict=True):
            read_into(path, start, [run.data])
    else:
        for begin, stretch, first, last in _stretches(starts, nbytes):
            read_into(path, begin, [stretch.data])
            take_runs(stretch, starts[first:last] - begin, out[first:last])


def checked_runs(starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> NDArray[np.uint8]:
    """Return the buffer with a row for each run.  Raises `UsageError` unless it has just their size."""
    if nbytes < 0 or buffer.nbytes != len(starts) * nbytes:
        raise UsageError(f"{len(starts)} runs of {nbytes} bytes do not fill a buffer of {buffer.nbytes}")
    if len(starts):
        check_start(int(starts[0]))
    return np.frombuffer(buffer, np.uint8).reshape(len(starts), nbytes)


def near(starts: NDArray[np.int64]) -> bool:
    """Return whether runs begin so near each other that separate reads gain nothing."""
    return len(starts) > 1 and int(starts[-1]) - int(starts[0]) < NEAR_NBYTES * (len(starts) - 1)


def take_runs(data: NDArray[np.uint8], starts: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Copy the runs that begin at `starts` in `data` to the rows of `out`."""
    # A run as one element: NumPy copies such an element at once.
    run = np.dtype((np.void, out.shape[1]))
    windows = np.ndarray((len(data) - run.itemsize + 1,), run, data, strides=(1,))
    out.view(run)[:, 0] = windows[starts]


def _stretches(starts: NDArray[np.int64], nbytes: int) -> Iterator[tuple[int, NDArray[np.uint8], int, int]]:
    """Group runs: yield the start of a group in the file, memory for it with its holes, and its runs.

    A group has at most `STRETCH_NBYTES` bytes, or is one run.
    """
    scratch = np.empty(max(STRETCH_NBYTES, nbytes), np.uint8)
    first = 0
    while first < len(starts):
        begin = int(starts[first])
        last = int(np.searchsorted(starts, begin + len(scratch) - nbytes, side="right"))
        yield begin, scratch[: int(starts[last - 1]) + nbytes - begin], first, last
        first = last


def spread(data: NDArray[np.uint8], out: list[NDArray[np.uint8]]) -> None:
    """Copy bytes into the buffers that come next, which become shorter by them."""
    while len(data):
        nbytes = min(len(data), len(out[0]))
        np.copyto(out[0][:nbytes], data[:nbytes])
        data = data[nbytes:]
        if nbytes == len(out[0]):
            del out[0]
        else:
            out[0] = out[0][nbytes:]
