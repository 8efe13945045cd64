"""Upload to an object store: pieces in any order, parts straight from the caller's memory."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import obstore
from obstore import exceptions

from reknit.errors import ReknitError, StorageError, StorageNotFoundError, StorageUnavailableError
from reknit.monitor.phase import Deadline
from reknit.storage.object.errors import as_ours, translated
from reknit.storage.object.own_writes import is_own, new_mark
from reknit.system import dice, start_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from reknit.storage.object.client import Client

    Bytes = NDArray[np.uint8]

MAX_PARTS = 10_000
"""The most parts of one file that S3 takes."""
_MIB = 1 << 20
_STARTS, _STARTING_S = 4, 60.0
"""How often, and how long, the start of an upload is repeated."""
_LONGEST_PAUSE_S = 1.0
_PATIENCE_S = 2.0
"""How long a piece waits for a missing earlier piece before it is copied to memory of its own."""
_LETTING_GO_S = 30.0


def part_size(nbytes: int, wanted: int) -> int:
    """Return the bytes of one part of a file: the wanted size, or more if there would be too many parts."""
    least = -(-nbytes // MAX_PARTS)
    return wanted if least <= wanted else -(-least // _MIB) * _MIB


class _GivenUpError(Exception):
    """Passes through the client, so that it removes the parts that are up already."""


class _Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory that the client reads until it drops its last reference."""


@dataclass
class _Gathered:
    """A part that has received some of its pieces."""

    whole: Bytes
    missing: int


class MultipartUpload:
    """The parts of one multipart upload, whose thread waits for them in their order.

    The client takes parts one after another, and sends up to `concurrency` of them at once, each from the
    caller's memory.  So the caller waits until the client has released its part.  Pieces that do not fill a
    part are collected in a part with memory of its own.  At most `concurrency` such parts wait to be sent, as
    long as pieces arrive about in order.
    """

    def __init__(
        self,
        client: Client,
        key: str,
        url: str,
        nbytes: int,
        *,
        part_nbytes: int,
        concurrency: int,
    ) -> None:
        self._client, self._key, self._url = client, key, url
        self._nbytes, self._part_nbytes, self._concurrency = nbytes, part_nbytes, concurrency
        self._changed = threading.Condition()
        self._ready: dict[int, Bytes] = {}
        self._gathered: dict[int, _Gathered] = {}
        self._next = 0
        """The part that the client takes next."""
        self._lent: set[int] = set()
        self._own: set[int] = set()
        self._given_up = self._finishing = self._sent = False
        self._mark = new_mark()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def write(self, start: int, data: Bytes) -> None:
        """Write bytes, and return when the caller may reuse their memory."""
        mine, gave, size = set[int](), False, self._part_nbytes
        while len(data):
            part = start // size
            nbytes = min(size, self._nbytes - part * size)
            taken = data[: part * size + nbytes - start]
            if len(taken) == size:
                self._give(part, taken)
                mine.add(part)
            else:  # also the last part, which the client keeps until the upload is to end
                gave |= self._gather(part, start - part * size, taken, nbytes)
            start += len(taken)
            data = data[len(taken) :]
        # Not before all bytes are given: another thread may wait for the part that begins with the last ones.
        self._wait_for(mine, self._concurrency if gave else None)

    def finish(self) -> None:
        """Wait until the object exists.  The caller has written all bytes.

        If the answer to the last request is lost, the client repeats that request, and the store may have
        forgotten the upload.  So after an error of that request, the object itself shows whether it was made.
        """
        self._start()
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
        assert self._thread is not None
        self._thread.join()
        if self._error is not None and self._sent and self._is_made():
            return
        self._check()

    def give_up(self) -> None:
        """Abort: wait until the client has removed the uploaded parts and released all memory."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._let_go()

    def _give(self, part: int, data: Bytes, *, own: bool = False) -> None:
        with self._changed:
            self._ready[part] = data
            self._lent.add(part)
            if own:
                self._own.add(part)
            self._changed.notify_all()
        self._start()

    def _gather(self, part: int, start: int, data: Bytes, nbytes: int) -> bool:
        """Copy a piece into its part, upload a complete part, and return whether it is complete."""
        with self._changed:
            gathered = self._gathered.setdefault(part, _Gathered(np.empty(nbytes, np.uint8), nbytes))
        np.copyto(gathered.whole[start : start + len(data)], data)
        with self._changed:
            gathered.missing -= len(data)
            if gathered.missing:
                return False
            del self._gathered[part]
        self._give(part, gathered.whole, own=True)
        return True

    def _wait_for(self, mine: set[int], most_own: int | None) -> None:
        """Wait until the client has released these parts, and enough of the collected parts."""
        with self._changed:
            while self._error is None and not self._given_up:
                if not mine & self._lent and (most_own is None or len(self._own) <= most_own):
                    return
                before = self._next
                if not self._changed.wait(_PATIENCE_S) and self._next == before:
                    # Nothing goes on, and perhaps nothing will: a single thread may write, from the end.
                    stuck = {part for part in mine if part in self._ready}
                    for part in stuck:
                        self._ready[part] = self._ready[part].copy()
                    self._own |= stuck
                    mine = mine - stuck
                    most_own = None
        self.give_up()
        self._check()

    def _start(self) -> None:
        with self._changed:
            if self._thread is None and not self._given_up:
                self._thread = start_thread("reknit-upload", self._run)

    def _run(self) -> None:
        deadline, tries = Deadline(_STARTING_S), 1
        try:
            while not self._send(again=tries < _STARTS and not deadline.passed()):
                time.sleep(dice.uniform(0, _LONGEST_PAUSE_S))
                tries += 1
        except BaseException as error:  # the threads that wait for their parts raise it again
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _send(self, *, again: bool) -> bool:
        """Upload the parts, and return whether the object exists.

        The client does not repeat the request that starts an upload to every store.  So this returns False if
        that request failed, no part was sent, and the caller tries `again`.
        """
        try:
            obstore.put(
                self._client,
                self._key,
                self._parts(),  # type: ignore[arg-type]  # arrays are buffers, from Python 3.12 on by type
                use_multipart=True,
                chunk_size=self._part_nbytes,
                max_concurrency=self._concurrency,
                attributes=self._mark,
            )
        except exceptions.GenericError as error:
            unreached = isinstance(as_ours("write", self._url, error), StorageUnavailableError)
            if self._next or not unreached or not again:
                raise
            return False
        return True

    def _parts(self) -> Iterator[_Lent]:
        """Yield the parts in order, each as soon as it is complete."""
        for part in range(-(-self._nbytes // self._part_nbytes)):
            with self._changed:
                self._changed.wait_for(lambda part=part: part in self._ready or self._given_up)  # type: ignore[misc]
                if self._given_up:
                    raise _GivenUpError
                lent = self._ready.pop(part).view(_Lent)
                self._next = part + 1
                weakref.finalize(lent, self._returned, part).atexit = False
            yield lent
            del lent
        with self._changed:
            self._changed.wait_for(lambda: self._finishing or self._given_up)
            if self._given_up:
                raise _GivenUpError
            self._sent = True

    def _is_made(self) -> bool:
        """Return whether the object exists although its upload ended with an error."""
        return is_own(self._client, self._key, self._url, mark=self._mark, nbytes=self._nbytes)

    def _returned(self, part: int) -> None:
        """Note that a part is released.  A thread of the client calls this."""
        with self._changed:
            self._lent.discard(part)
            self._own.discard(part)
            self._changed.notify_all()

    def _let_go(self) -> None:
        """After the client's call, wait until it has released the memory of all callers."""
        deadline = Deadline(_LETTING_GO_S)
        with self._changed:
            self._lent -= self._ready.keys()
            self._ready.clear()
            while self._lent - self._own and not deadline.passed():
                self._changed.wait(deadline.remaining())

    def _check(self) -> None:
        """Raise the error of the upload, if there is one."""
        error = self._error
        if isinstance(error, ReknitError):
            raise error
        if error is not None and not isinstance(error, _GivenUpError):
            try:
                with translated("write", self._url):
                    raise error
            except StorageNotFoundError:
                raise _ended(self._url) from None
        if self._given_up:
            raise StorageError(f"cannot write {self._url}: it is aborted", path=self._url)


def _ended(url: str) -> StorageError:
    """Return the error of an upload that the store has ended."""
    return StorageError(
        f"cannot write {url}: the store has ended its upload in parts, and the object does not exist",
        remedy="save again; let no lifecycle rule, and no `reknit gc` with a short age, abort the uploads "
        "of a save that is under way",
        path=url,
    )
