"""A world of ranks in threads: run one function as every rank of a group, in one process."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from reknit.comm.tree.thread_group import thread_groups
from reknit.errors import DeadlineError
from reknit.plugins.events import spelled
from reknit.plugins.store import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.plugins.trainer import Group

_Result = TypeVar("_Result")


class _World(Generic[_Result]):
    """Results and errors of the threads of one run."""

    def __init__(self, fn: Callable[[Group], _Result], *, close: bool) -> None:
        self._fn = fn
        self._close = close
        self._lock = threading.Lock()
        self.results: dict[int, _Result] = {}
        self.errors: dict[int, BaseException] = {}

    def run(self, group: Group) -> None:
        """Run the function as one rank; a rank that ended must not be waited for."""
        try:
            result = self._fn(group)
            with self._lock:
                self.results[group.rank] = result
        except BaseException as error:  # any error: run_ranks raises it again
            with self._lock:
                self.errors[group.rank] = error
        finally:
            if self._close:
                group.close()


def run_ranks(
    size: int,
    fn: Callable[[Group], _Result],
    *,
    timeout_s: float = 60.0,
    groups: Sequence[Group] | None = None,
) -> list[_Result]:
    """Run ``fn(group)`` as each of `size` ranks, one thread per rank, and return the results by rank.

    The groups are joined by threads unless `groups` are given; given groups stay open.  When ranks fail, the
    error that came first is raised, with a note for each of the others.  When a rank does not end within
    `timeout_s` seconds, raises `DeadlineError` with the stacks of all threads, unless a rank failed before.
    """
    members = thread_groups(size) if groups is None else groups
    if len(members) != size:
        raise ValueError(f"{len(members)} groups were given for {size} ranks")
    world = _World(fn, close=groups is None)
    threads = [
        threading.Thread(target=world.run, args=(group,), name=f"rank {group.rank}", daemon=True)
        for group in members
    ]
    for thread in threads:
        thread.start()
    deadline = Deadline(timeout_s)
    for thread in threads:
        thread.join(deadline.remaining())
    late = [group.rank for group, thread in zip(members, threads, strict=True) if thread.is_alive()]
    overdue = _overdue(late, timeout_s) if late else None
    if groups is None:
        for group in members:
            group.close()
    errors = dict(world.errors)
    if errors:
        raise _noted(errors, overdue)
    if overdue is not None:
        raise overdue
    return [world.results[group.rank] for group in members]


def _overdue(ranks: list[int], timeout_s: float) -> DeadlineError:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace")
    return DeadlineError(f"{spelled(ranks)} did not end within {timeout_s:g} s; all threads:\n{stacks}")


def _noted(errors: dict[int, BaseException], overdue: DeadlineError | None) -> BaseException:
    """Return the first error, with notes that name its rank and the errors of the other ranks."""
    (rank, first), *others = errors.items()
    notes = [f"raised on rank {rank}"]
    notes += [f"rank {other} failed too: {type(error).__name__}: {error}" for other, error in others]
    if overdue is not None:
        notes.append(overdue.message)
    # As BaseException.add_note does, which Python 3.10 lacks.
    vars(first).setdefault("__notes__", []).extend(notes)
    return first
