"""A store whose every operation is recorded: how long it took, how many bytes, and how it ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from reknit.errors import StorageNotFoundError
from reknit.monitor.phase import CLOCK, retries
from reknit.storage.wrappers.forwarding import KINDS, ForwardingStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.monitor.phase import Recorder
    from reknit.storage.base import Storage
    from reknit.storage.wrappers.forwarding import Half

T = TypeVar("T")


class RecordingStorage(ForwardingStorage):
    """A store that records every operation of any thread, with the retries inside it.

    `under_way` has an entry for each operation under way in a store and the stores below it.
    """

    def __init__(self, inner: Storage, recorder: Recorder, under_way: list[None] | None = None) -> None:
        super().__init__(inner)
        if hasattr(inner, "folder"):
            self.folder = inner.folder
        self._recorder = recorder
        self._under_way = [] if under_way is None else under_way
        self._store = _service(inner.url)

    def around(self, inner: Storage, path: str) -> Storage:
        """Return the store below, recorded in the same way."""
        return RecordingStorage(inner, self._recorder, self._under_way)

    def intercept(self, name: str, path: str, nbytes: int, whole: Callable[[], T], half: Half = None) -> T:
        """Carry out an operation, and record it."""
        under_way, clock = self._under_way, CLOCK.get()
        under_way.append(None)
        at_once, outcome, before = len(under_way), "ok", retries.get()
        started, begin = time.time(), clock.monotonic()
        try:
            result = whole()
            if isinstance(result, bytes):
                nbytes = len(result)
        except StorageNotFoundError:  # an answer, as many ask whether there is something
            nbytes = 0
            raise
        except BaseException as error:
            outcome, nbytes = type(error).__name__, 0
            raise
        else:
            return result
        finally:
            seconds = clock.monotonic() - begin
            under_way.pop()
            self._recorder.add_operation(
                KINDS.get(name, name),
                self._store,
                started=started,
                seconds=seconds,
                nbytes=nbytes,
                outcome=outcome,
                retries=retries.get() - before,
                at_once=at_once,
            )


def _service(url: str) -> str:
    """Return the part of a URL that names a service; ``file`` for a path."""
    scheme, colon, rest = url.partition("://")
    if not colon:
        return "file"
    return scheme if scheme in ("file", "mem") else f"{scheme}://{rest.partition('/')[0].partition('?')[0]}"
