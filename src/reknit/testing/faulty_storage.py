"""A store that fails at a chosen operation, around any other store."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from reknit.errors import (
    DeadlineError,
    ReknitError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
    UsageError,
)
from reknit.plugins.store import ForwardingStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reknit.plugins.store import Half, Storage

T = TypeVar("T")

FaultKind = Literal["error", "full", "timeout", "short", "lost", "away", "unheard", "stall", "kill"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at the `at`-th operation (from 1), or at the `at`-th of the operations called `operation`.

    ``error``, ``full`` and ``timeout`` raise `StorageError`, `StorageFullError` and `DeadlineError` in place
    of the operation; ``short`` writes or reads the first half of the bytes before it raises `StorageError`,
    and ``lost`` raises it after all was done; ``away`` raises `StorageUnavailableError` in place of the
    operation, and ``unheard`` after all was done; ``stall`` and ``kill`` call the function that the storage
    was given for them, and the operation follows when that returns.
    """

    kind: FaultKind
    at: int
    operation: str | None = None

    def __post_init__(self) -> None:
        if self.at < 1:
            raise UsageError(f"operations are counted from 1, so none is number {self.at}")


class Operation(NamedTuple):
    """One operation that a store was asked for; `path` is relative to the outermost faulty store."""

    name: str
    path: str


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _no_stall() -> None:
    raise UsageError("a fault of the kind 'stall' needs FaultyStorage(..., stall=event.wait)")


@dataclass
class _Script:
    """The plan, and the past part of it; shared by a store, its writers and the stores below it."""

    plan: tuple[Fault, ...]
    stall: Callable[[], object]
    kill: Callable[[], object]
    operations: list[Operation] = field(default_factory=list)
    counts: Counter[str | None] = field(default_factory=Counter)
    fired: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, operation: Operation) -> Fault | None:
        """Count an operation and return the fault that is planned for it."""
        with self.lock:
            self.operations.append(operation)
            self.counts.update((None, operation.name))
            for fault in self.plan:
                if fault.operation in (None, operation.name) and fault.at == self.counts[fault.operation]:
                    self.fired.append(fault)
                    return fault
        return None

    def run(
        self, operation: Operation, whole: Callable[[], T], half: Callable[[], object] | None = None
    ) -> T:
        """Do an operation, or the planned fault in its place."""
        fault = self.next(operation)
        if fault is None:
            return whole()
        if fault.kind in ("stall", "kill"):
            (self.stall if fault.kind == "stall" else self.kill)()
            return whole()
        if fault.kind in ("lost", "unheard"):
            whole()
        elif fault.kind == "short" and half is not None:
            half()
        raise _error(fault, operation)


def _error(fault: Fault, operation: Operation) -> ReknitError:
    place = f"in {operation.name} of {operation.path or 'the root'} (planned: {fault})"
    if fault.kind == "full":
        return StorageFullError(f"injected: no space left {place}", path=operation.path)
    if fault.kind in ("away", "unheard"):
        return StorageUnavailableError(f"injected: the store is away {place}", path=operation.path)
    if fault.kind == "timeout":
        return DeadlineError(f"injected: no answer in time {place}", path=operation.path)
    what = {"error": "input/output error", "short": "input/output error halfway", "lost": "answer lost"}
    return StorageError(f"injected: {what[fault.kind]} {place}", path=operation.path)


class FaultyStorage(ForwardingStorage):
    """Passes everything on to `inner`, counts the operations, and fails as planned.

    Counted are create, write, finish, copy_from, put, commit, get, size, read_into, read_runs, list, folders
    and delete.  To sweep an action, run it with one fault at k = 1, 2, ... until `fired` stays empty: k is
    then beyond the last one.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        plan: Iterable[Fault] = (),
        stall: Callable[[], object] = _no_stall,
        kill: Callable[[], object] = _die,
    ) -> None:
        super().__init__(inner)
        self._prefix = ""
        self._script = _Script(tuple(plan), stall, kill)

    @property
    def operations(self) -> list[Operation]:
        """Every operation so far, in the order in which they began."""
        return self._script.operations

    @property
    def fired(self) -> list[Fault]:
        """The faults that have happened."""
        return self._script.fired

    def around(self, inner: Storage, path: str) -> FaultyStorage:
        """Return a store below, with the same count and plan."""
        below = FaultyStorage(inner)
        below._prefix = f"{self._prefix}{path}/"
        below._script = self._script
        return below

    def intercept(self, name: str, path: str, nbytes: int, whole: Callable[[], T], half: Half = None) -> T:
        """Count an operation and carry it out, or do the planned fault in its place."""
        return self._script.run(Operation(name, self._prefix + path), whole, half)
