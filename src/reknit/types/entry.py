"""Which call of a user is this thread in, and whose turn is it?  No call can wait for one it interrupts."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reknit.errors import DeadlineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

REMEDY = (
    "let the signal handler only set a flag, and save after the call that it interrupts has returned; "
    "reknit.policies.on_preemption does that for a Checkpointer"
)


class _Thread(threading.local):
    call: str | None = None


_here = _Thread()


@contextmanager
def entered(call: str) -> Iterator[None]:
    """Hold that this thread is in a call.  Raises `UsageError` where it is in one already.

    It is there in a signal handler which interrupts that call, but not in the `own_code` of a user.
    """
    refuse_inside(call)
    _here.call = call
    try:
        yield
    finally:
        _here.call = None


@contextmanager
def own_code() -> Iterator[None]:
    """Let code of the user, which a call runs, make calls of its own."""
    call, _here.call = _here.call, None
    try:
        yield
    finally:
        _here.call = call


def refuse_inside(call: str) -> None:
    """Raise `UsageError` where this thread is in a call, which would have to go on for `call` to end."""
    if _here.call is not None:
        raise UsageError(
            f"{call} was called while the same thread is inside {_here.call}, which it interrupts, as a "
            "signal handler does, and would wait for",
            remedy=REMEDY,
        )


class OneAtATime:
    """Lets one thread after another do something of which there is one in a process."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._thread: int | None = None

    @property
    def mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._thread == threading.get_ident()

    @contextmanager
    def taken(self, timeout_s: float) -> Iterator[None]:
        """Have the turn meanwhile.

        Raises `DeadlineError` where another thread keeps it for so long, and `UsageError` where this one has
        it already.
        """
        if self.mine:
            raise UsageError(
                f"{self._what} was begun inside another one, by code of an object that this one collects",
                remedy="save before or after that, or pass wait=True",
            )
        if not self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise DeadlineError(
                f"another thread of this process has been inside {self._what} for {timeout_s:g} s",
                remedy="see what it waits for (py-spy dump), give each thread a group of its own, or raise "
                "SaveOptions(timeout_s=...)",
            )
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None
            self._lock.release()
