"""Read HDFS files in ranges of a few megabytes, several at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from reknit.errors import StorageError, StorageNotFoundError
from reknit.plugins.store import Deadline, shorter, spread, take_runs, too_large
from reknit.stores.hdfs.client import PIECE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hdfs_native._internal import RawFileReader
    from numpy.typing import NDArray

    from reknit.stores.hdfs.client import HdfsClient

Packets = list[bytes]
"""The bytes of a range, in order."""

GAP_NBYTES = 1 << 20
"""Holes up to this size are read over: a request costs as much."""
_MOST_OPEN = 64
_KEPT_S = 5.0
"""How long the locations of a file's blocks are cached."""


class BlockReaders:
    """Reads files of a cluster; the locations of their blocks are cached for a short while."""

    def __init__(self, client: HdfsClient) -> None:
        self._client = client
        self._kept: OrderedDict[str, tuple[RawFileReader, Deadline]] = OrderedDict()
        self._drops = 0
        self._lock = threading.Lock()

    def drop(self, path: str | None = None) -> None:
        """Forget a file, or all."""
        with self._lock:
            self._drops += 1
            if path is None:
                self._kept.clear()
            else:
                self._kept.pop(path, None)

    def whole(self, path: str, limit: int) -> bytes:
        """Return a whole small file, without the cache."""
        self.drop(path)
        for attempt in range(2):
            reader = self._client.open(path)
            nbytes = reader.file_length()
            if nbytes > limit:
                raise too_large(self._client.url(path), nbytes, limit)
            try:
                ranges = [(a, min(PIECE_NBYTES, nbytes - a)) for a in range(0, nbytes, PIECE_NBYTES)]
                return b"".join(chain.from_iterable(self._read_from(reader, path, ranges, 0, nbytes)))
            except StorageError:
                if attempt:
                    raise  # the first time it may have been replaced between the two requests
        raise AssertionError("the second attempt returns or raises")

    def fill(self, path: str, start: int, out: list[NDArray[np.uint8]]) -> None:
        """Fill the buffers, one after another, from byte `start` on."""
        end = start + sum(map(len, out))
        most = PIECE_NBYTES * self._client.options.concurrency
        for first in range(start, end, most):
            last = min(first + most, end)
            ranges = [(begin, min(PIECE_NBYTES, last - begin)) for begin in range(first, last, PIECE_NBYTES)]
            for packet in chain.from_iterable(self._ranges(path, ranges, start, end)):
                spread(np.frombuffer(packet, np.uint8), out)

    def take(self, path: str, starts: NDArray[np.int64], nbytes: int, out: NDArray[np.uint8]) -> None:
        """Fill the rows of `out` with the runs of `nbytes` bytes that begin at `starts`."""
        groups = list(_groups(starts.tolist(), nbytes))
        at_once = self._client.options.concurrency
        for number in range(0, len(groups), at_once):
            some = groups[number : number + at_once]
            ranges = [(int(starts[a]), int(starts[b - 1]) + nbytes - int(starts[a])) for a, b in some]
            found = self._ranges(path, ranges, int(starts[-1]), int(starts[-1]) + nbytes)
            for (first, last), packets in zip(some, found, strict=True):
                data = b"".join(packets)
                take_runs(np.frombuffer(data, np.uint8), starts[first:last] - starts[first], out[first:last])

    def _ranges(self, path: str, ranges: list[tuple[int, int]], start: int, end: int) -> list[Packets]:
        """Return ranges of a file, of which bytes up to `end` are wanted in the end."""
        kept = self._kept_reader(path)
        if kept is not None:
            try:
                return self._read_from(kept, path, ranges, start, end)
            except StorageError:  # another file has the name now, or blocks have moved: look again
                self.drop(path)
        for attempt in range(2):
            drops = self._drops
            reader = self._client.open(path)
            try:
                data = self._read_from(reader, path, ranges, start, end)
            except StorageNotFoundError:
                raise
            except StorageError:
                if attempt or reader.file_length() < end:
                    raise
                continue  # it was replaced between one request and the next
            self._keep(path, reader, drops)
            return data
        raise AssertionError("the second attempt returns or raises")

    def _read_from(
        self, reader: RawFileReader, path: str, ranges: list[tuple[int, int]], start: int, end: int
    ) -> list[Packets]:
        """Return ranges of a file, each as the packets in which it arrives.

        The client would copy them into one large value, for which each request gets new memory from the
        kernel.
        """
        if reader.file_length() < end:  # asked for more, the client panics
            raise shorter(self._client.url(path), start, end, reader.file_length())
        found = self._client.ask_together("read", path, [partial(_packets, reader, *each) for each in ranges])
        for (begin, nbytes), packets in zip(ranges, found, strict=True):
            if (length := sum(map(len, packets))) != nbytes:
                raise shorter(self._client.url(path), begin, begin + nbytes, begin + length)
        return found

    def _kept_reader(self, path: str) -> RawFileReader | None:
        with self._lock:
            reader, until = self._kept.get(path, (None, None))
            return None if until is None or until.passed() else reader

    def _keep(self, path: str, reader: RawFileReader, drops: int) -> None:
        with self._lock:
            if drops != self._drops:  # it may have been dropped since
                return
            self._kept[path] = (reader, Deadline(_KEPT_S))
            self._kept.move_to_end(path)
            if len(self._kept) > _MOST_OPEN:
                self._kept.popitem(last=False)


def _packets(reader: RawFileReader, start: int, nbytes: int) -> Packets:
    """Return a range as packets.  They are copied by the caller: a call that is late must not write."""
    return [*reader.read_range_stream(start, nbytes)] if nbytes else []


def _groups(starts: list[int], nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last (exclusive) of runs that are read in one request."""
    first = 0
    for number in range(1, len(starts) + 1):
        if (
            number == len(starts)
            or starts[number] - starts[number - 1] - nbytes > GAP_NBYTES
            or starts[number] + nbytes - starts[first] > PIECE_NBYTES
        ):
            yield first, number
            first = number
