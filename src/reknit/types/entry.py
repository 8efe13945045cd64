"""The call of a user that each thread is in, since a call cannot wait for another that it interrupts."""

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
    """Record that this thread is in a call.  Raises `UsageError` if it is in one already.

    That is the case in a signal handler that interrupts a call, but not in the `own_code` of a user.
    """
    refuse_inside(call)
    _here.call = call
    try:
        yield
    finally:
        _here.call = None


@contextmanager
def own_code() -> Iterator[None]:
    """Allow code of the user, which a call runs, to make calls of its own."""
    call, _here.call = _here.call, None
    try:
        yield
    finally:
        _here.call = call


def refuse_inside(call: str) -> None:
    """Raise `UsageError` if this thread is in a call, which would have to continue before `call` can end."""
    if _here.call is not None:
        raise UsageError(
            f"{call} was called while the same thread is inside {_here.call}, which it interrupts, as a "
            "signal handler does, and would wait for",
            remedy=REMEDY,
        )


class OneAtATime:
    """A lock for work that only one thread of a process does at a time."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._thread: int | None = None

    @property
    def mine(self) -> bool:
        """Whether this thread holds the lock."""
        return self._thread == threading.get_ident()

    @contextmanager
    def taken(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock within the block.

        Raises `DeadlineError` if another thread holds it for longer than `timeout_s`, and `UsageError` if
        this thread holds it already.
        """
        if self.mine:
            raise UsageError(
                f"{self._what} was begun inside another one, by code of an object that this one collects",
                remedy="save before or after that, or pass wait=True",
            )
        if not self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise DeadlineError(
                f"another thread of this process has been inside {self._what} for {timeout_s:g} s",
                remedy="see where it waits (py-spy dump), give each thread a group of its own, or raise "
                "SaveOptions(timeout_s=...)",
            )
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None
            self._lock.release()
