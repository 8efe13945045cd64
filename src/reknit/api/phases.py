"""Phases of the user's own code, which are recorded like those of saves and loads."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from reknit.api.ranks import own_rank
from reknit.errors import UsageError, shown
from reknit.events.phase import ACTION, Recorder, outer_recorder, own_phase
from reknit.events.to_file import outlets_for
from reknit.keywords import checked_call, is_text
from reknit.locations import check_events

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import _GeneratorContextManager

    from reknit.events.phase import Running
    from reknit.locations import Events


@checked_call
def phase(
    name: str, *, step: int | None = None, nbytes: int = 0, events: Events = None, rank: int | None = None
) -> _GeneratorContextManager[Running]:
    """Record a part of your own program: ``with reknit.phase("evaluate", ...):``, or as a decorator.

    `events` says where the record goes, as in `SaveOptions`.  A phase inside another phase of the same thread
    takes `events`, step and rank from the outer phase; without `events` in both, nothing is recorded.  The
    record has the host, and the rank of torch.distributed or jax.distributed unless `rank` gives another.
    Its outcome is ``"ok"`` or the type of the exception, which passes through unchanged.  The block of
    ``with ... as running`` may add the bytes that it moves to ``running.nbytes``.

    Raises `UsageError`.  If `events` cannot be written, a warning says so.
    """
    if not is_text(name):
        raise UsageError(f"a phase has a name, not {shown(name)}", remedy="give a text that is not empty")
    for called, number in (("step", step), ("rank", rank), ("nbytes", nbytes)):
        if number is not None and (type(number) is not int or number < 0):
            raise UsageError(f"{called} is a whole number from 0 on, not {shown(number)}")
    check_events(events)
    return _phase(name, step, nbytes, events, rank)


@contextmanager
def _phase(name: str, step: int | None, nbytes: int, events: Events, rank: int | None) -> Iterator[Running]:
    with own_phase(name, _recorder(step, events, rank), nbytes) as running:
        yield running


def _recorder(step: int | None, events: Events, rank: int | None) -> Recorder:
    """Return a recorder with the given values, and the values of the outer phase in place of None."""
    outer = outer_recorder.get()
    if outer is None:
        return Recorder(ACTION, own_rank() if rank is None else rank, step, sinks=outlets_for(events))
    return Recorder(
        ACTION,
        outer.rank if rank is None else rank,
        outer.step if step is None else step,
        sinks=outer.sinks if events is None else outlets_for(events),
    )
