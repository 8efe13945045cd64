"""Code that calls of users share: errors on all ranks, and the pending background saves."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reknit.arguments import place_of
from reknit.comm import group as comm
from reknit.errors import ReknitError, UsageError, typed, typed_shortage
from reknit.system import without_collections
from reknit.types.devices import is_captured
from reknit.types.entry import entered

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.comm.group import Group
    from reknit.engine.background.background import Background
    from reknit.options import SaveOptions

backgrounds: weakref.WeakKeyDictionary[Group, dict[bool, Background]] = weakref.WeakKeyDictionary()
"""The background saves of each group, by whether other processes can open their stores."""

making = threading.Lock()
"""Held while background saves are looked up: two threads that save at once must share one object, and an
iteration over all of them must not see new ones."""


@contextmanager
def entering(call: str) -> Iterator[None]:
    """Run a call of a user: the only one of its thread, without collections, with typed shortages."""
    with entered(call), typed_shortage(), without_collections():
        if is_captured():
            raise UsageError(
                f"{call} was called while a graph is captured, of which its copies would become a part",
                remedy="call it before or after the capture",
            )
        yield


@contextmanager
def raised_on_all_ranks(group: Group, first_round: str, timeout_s: float) -> Iterator[None]:
    """Raise an error before the first round on all ranks, so that the others do not wait for this rank."""
    try:
        yield
    except BaseException as error:  # Ctrl-C too, since this rank will not come to the round
        if group.size == 1:
            if isinstance(error, ReknitError) or not isinstance(error, Exception):
                raise
            raise typed(error) from error
        comm.fail(group, first_round, error, timeout_s)


def background_of(group: Group, *, elsewhere: bool) -> Background:
    """Return the background saves of a group, to stores that other processes can or cannot open."""
    with making:
        kinds = backgrounds.setdefault(group, {})
        if elsewhere not in kinds:
            from reknit.engine.background.background import Background  # calls that wait need none of it

            background = kinds[elsewhere] = Background(in_process=not elsewhere)
            gone = weakref.finalize(group, background.retire)  # no save is under way then
            gone.atexit = False
            background.when_closed = gone.detach
        return kinds[elsewhere]


@contextmanager
def agents_for(
    places: Sequence[str | os.PathLike[str]], first_round: str, *, options: SaveOptions, group: Group
) -> Iterator[None]:
    """Start agents beside the block, so that later saves to all of `places` find them; all ranks use it.

    No agent starts without places, or if no other process can open one of them.  After Ctrl-C during the
    start, the first round of the block fails on the other ranks.
    """
    if not places or not all(place_of(place).elsewhere for place in places):
        yield
        return
    with raised_on_all_ranks(group, first_round, options.timeout_s):
        background_of(group, elsewhere=True).start_agents(group, options)
    yield
    # Looked up again: the agents of background saves that were closed meanwhile would stay to the end.
    background_of(group, elsewhere=True).join_agents(group, options)


def backgrounds_of(group: Group) -> list[Background]:
    """Return the background saves of a group."""
    with making:
        return list(backgrounds.get(group, {}).values())


def all_backgrounds() -> list[Background]:
    """Return the background saves of all groups."""
    with making:
        return [background for kinds in backgrounds.values() for background in kinds.values()]


def removed_backgrounds() -> Iterator[Background]:
    """Remove the background saves of all groups one after another, and yield each, to be closed."""
    with making:
        found = list(backgrounds.values())
    for kinds in found:
        for elsewhere in (True, False):
            with making:
                background = kinds.pop(elsewhere, None)
            if background is not None:
                yield background


def _after_fork() -> None:
    global making
    making = threading.Lock()  # a thread that the child does not have may have held it


os.register_at_fork(after_in_child=_after_fork)
