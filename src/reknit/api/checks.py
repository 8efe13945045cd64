"""The checks of arguments that all calls of users share, and the pending background saves."""

from __future__ import annotations

import logging
import operator
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import closing, contextmanager
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from reknit.comm import group as comm
from reknit.errors import ReknitError, UsageError, did_you_mean, readable, shown, typed, typed_known
from reknit.keywords import is_text, unpacked
from reknit.locations import is_location
from reknit.options.fields import check_scope
from reknit.storage.registry import StoreRecipe, following, open_storage, recipe
from reknit.system import without_collections
from reknit.types.devices import is_captured
from reknit.types.entry import entered

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import ExitStack
    from os import PathLike

    from reknit.comm.group import Group
    from reknit.engine.background.background import Background
    from reknit.options import LoadOptions, SaveOptions
    from reknit.options.fields import Scope
    from reknit.storage.base import Storage


logger = logging.getLogger("reknit")

_Options = TypeVar("_Options", "SaveOptions", "LoadOptions")


def options_of(options: object, kind: type[_Options], call: Scope | None = None) -> _Options:
    """Return options of a kind, the usual ones for None.

    Raises `UsageError` for anything else, and for an option that was set and that the call does not read.
    """
    if options is None:
        return kind()
    if not isinstance(options, kind):
        raise _wrong_options(options, kind)
    if call is not None:
        check_scope(options, call)
    return options


def tried_options(
    options: object, kind: type[_Options], call: Scope | None = None
) -> tuple[_Options, UsageError | None]:
    """Return the result of `options_of`, or usable options and the error that all ranks will raise."""
    try:
        return options_of(options, kind, call), None
    except UsageError as error:
        return options if isinstance(options, kind) else kind(), error


def _wrong_options(options: Any, kind: type[_Options]) -> UsageError:
    """Return the error for options that are not an object of a kind."""
    by_name = isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
    return UsageError(
        f"options is a reknit.{kind.__name__} here, not a {type(options).__name__}",
        remedy=unpacked(options, kind) if by_name else f"pass options=reknit.{kind.__name__}(...)",
    )


def check_flag(name: str, value: Any) -> None:
    """Raise `UsageError` for a value other than True or False: the text "no" would count as true."""
    if not isinstance(value, (bool, np.bool_)):  # such as `step % 100 == 0` may be
        raise UsageError(f"{name} is True or False, not {shown(value)}")


def checked_seconds(name: str, value: Any) -> float:
    """Return a number of seconds from 0 on.  Raises `UsageError`."""
    if not isinstance(value, (int, float, np.number)) or isinstance(value, bool) or not value >= 0:
        raise UsageError(f"{name} is a number of seconds from 0 on, not {shown(value)}")
    return float(value)


def check_state(state: object) -> None:
    """Raise `UsageError` for a state that is not a mapping of items."""
    if is_location(state):
        raise UsageError(
            f"state is a mapping of items, not the path {shown(state)}",
            remedy=f'the path comes first: path={shown(state)}, state={{"model": model}}',
        )
    if not isinstance(state, Mapping):
        name = "optimizer" if hasattr(state, "param_groups") else "model"
        several = isinstance(state, (list, tuple))
        raise UsageError(
            f"state is a mapping of items, not a {type(state).__name__}",
            remedy='give each a name: {"model": model, "optimizer": optimizer}'
            if several
            else f'wrap it: {{"{name}": {name}}}',
        )
    if state.keys() == {"state", "param_groups"}:
        raise UsageError(
            "state is the state_dict of an optimizer, in which numbers stand for the parameters",
            remedy='pass the optimizer itself: {"optimizer": optimizer}',
        )
    if wrong := [name for name in state if not is_text(name)]:
        raise UsageError(f"item names are non-empty strings, not {wrong[0]!r}")
    if odd := [name for name in state if type(name) is not str and not isinstance(name, Enum)]:
        # The format writes texts of Python only, and members of an enumeration by their values.
        raise UsageError(
            f"the item name {odd[0]!r} is a {type(odd[0]).__name__}, which derives from str",
            remedy="pass str() of it",
        )


def warn_of_loose_tensors(state: Mapping[str, Any]) -> None:
    """Log a warning for a state that looks like a state_dict: each of its tensors is an item."""
    if len(state) > 1 and any("." in name for name in state) and all(map(_is_tensor, state.values())):
        logger.warning(
            "the state has %d tensors as items of their own, such as %r; a state_dict that is one item needs "
            'fewer files, and loads into {"model": model}: pass {"model": state_dict}, or the model itself',
            *(len(state), next(iter(state))),
        )


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def checked_metrics(metrics: Any) -> dict[str, float | None]:
    """Return metrics as numbers of JSON, with None for infinite ones and NaN.  Raises `UsageError`."""
    numbers: dict[Any, float | None] = {}
    try:
        for name, value in dict(metrics or {}).items():
            number = float(value)
            numbers[name] = number if isfinite(number) else None
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # torch raises the last one
        raise UsageError(f"metrics are numbers by name, not {shown(metrics)}") from error
    if wrong := [name for name in numbers if not isinstance(name, str)]:
        raise UsageError(f"metrics have names, and {shown(wrong[0])} is not a text")
    return numbers


def checked_step(step: Any) -> int | None:
    """Return the step as a plain integer.  Raises `UsageError`."""
    if step is None:
        return None
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number < 1 << 63:
        raise UsageError(
            f"step is a whole number from 0 on, or None, not {shown(step)}",
            remedy="pass everything but path and state by its name: step=100, options=...",
        )
    return number


def check_metadata(metadata: Any) -> None:
    """Raise `UsageError` for metadata that is not a mapping; the root checks its content."""
    if not isinstance(metadata, Mapping):
        raise UsageError(f"metadata is a mapping of names, not a {type(metadata).__name__}")


def lenient_patterns(strict: object) -> tuple[str, ...]:
    """Return the patterns of names that need not fit, for `types.wanted.selects`.  Raises `UsageError`."""
    if isinstance(strict, (bool, np.bool_)):
        return () if strict else ("*",)
    if (
        not isinstance(strict, (tuple, list))
        or not strict
        or not all(isinstance(pattern, str) and pattern.strip("!") for pattern in strict)
    ):
        raise UsageError(f"strict is True or False, or a list of patterns, not {shown(strict)}")
    inverted = tuple(p[1:] if p.startswith("!") else f"!{p}" for p in strict)
    return inverted if strict[0].startswith("!") else ("*", *inverted)


def part_of(state: Mapping[str, Any], items: Sequence[str] | None) -> dict[str, Any]:
    """Return the items of the state that are to be loaded."""
    if isinstance(items, str):
        raise UsageError(f"items is a list of names: pass [{items!r}]")
    if items is not None and not isinstance(items, Iterable):
        raise UsageError(f"items is a list of names, not {shown(items)}")
    names = tuple(state) if items is None else tuple(items)
    if absent := [name for name in names if name not in state]:
        raise UsageError(
            f"items names {absent[0]!r}, but state has only {', '.join(map(repr, state))}",
            remedy=did_you_mean(str(absent[0]), state),
        )
    return {name: state[name] for name in names}


def place_of(path: str | PathLike[str]) -> StoreRecipe:
    """Return the recipe of a store for an agent; errors of the path are raised later, by the save."""
    try:
        return recipe(path)
    except ReknitError:
        return StoreRecipe(readable(str(path)), agents_can_open=True)


def open_places(path: str | PathLike[str], options: LoadOptions, last: ExitStack) -> list[Storage]:
    """Open the place to load from, and then its replicas; `last` closes them."""
    return [last.enter_context(closing(open_checkpoint(place))) for place in (path, *options.replicas)]


def open_checkpoint(path: str | PathLike[str]) -> Storage:
    """Open the place of a checkpoint, whose files may have moved."""
    return following(open_storage(path))


def check_promotion(url: str, options: SaveOptions, rank: int, *, overwrite: bool) -> None:
    """Raise the errors of the places to promote to, before any write; rank 0 looks for checkpoints there."""
    from reknit.engine.stored.at_path import check_absent  # most saves are not promoted

    with closing(open_storage(url, durability=options.durability)) as source:
        for place in options.promotions:
            with closing(open_storage(place.path, durability=options.durability)) as target:
                check_places(source, target)
                if rank == 0:
                    check_absent(target, overwrite=overwrite)


def check_places(source: Storage, target: Storage) -> None:
    """Raise `UsageError` if source and target are one place, or one is inside the other."""
    if source.url == target.url:
        raise UsageError(
            f"a checkpoint cannot be promoted to where it is: {source.url}",
            remedy="name the folder of the copy, such as archive/step_100",
        )
    if f"{source.url}/".startswith(f"{target.url}/") or f"{target.url}/".startswith(f"{source.url}/"):
        raise UsageError(
            f"a checkpoint cannot be promoted to a folder above or below its own: {source.url}, {target.url}",
            remedy="name the folder of the copy itself, such as archive/step_100",
        )


backgrounds: weakref.WeakKeyDictionary[Group, dict[bool, Background]] = weakref.WeakKeyDictionary()
"""The background saves of each group, by whether only this process can open their stores."""

making = threading.Lock()
"""Held while background saves are looked up: two threads that save at once must share one object, and an
iteration over all of them must not see new ones."""


@contextmanager
def entering(call: str) -> Iterator[None]:
    """Run a call of a user: the only one of its thread, without collections, with typed errors."""
    with entered(call), typed_known(), without_collections():
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


def background_of(group: Group, *, in_process: bool) -> Background:
    """Return the background saves of a group, to stores that other processes cannot or can open."""
    with making:
        kinds = backgrounds.setdefault(group, {})
        if in_process not in kinds:
            from reknit.engine.background.background import Background  # calls that wait need none of it

            background = kinds[in_process] = Background(in_process=in_process)
            gone = weakref.finalize(group, background.retire)  # no save is under way then
            gone.atexit = False
            background.when_closed = gone.detach
        return kinds[in_process]


@contextmanager
def agents_for(
    places: Sequence[str | os.PathLike[str]], first_round: str, *, options: SaveOptions, group: Group
) -> Iterator[None]:
    """Start agents beside the block, so that later saves to all of `places` find them; all ranks use it.

    No agent starts without places, or if no other process can open one of them.  After Ctrl-C during the
    start, the first round of the block fails on the other ranks.
    """
    if not places or not all(place_of(place).agents_can_open for place in places):
        yield
        return
    with raised_on_all_ranks(group, first_round, options.timeout_s):
        background_of(group, in_process=False).start_agents(group, options)
    yield
    # Looked up again: the agents of background saves that were closed meanwhile would stay to the end.
    background_of(group, in_process=False).join_agents(group, options)


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
        for in_process in (False, True):
            with making:
                background = kinds.pop(in_process, None)
            if background is not None:
                yield background


def _after_fork() -> None:
    global making
    making = threading.Lock()  # a thread that the child does not have may have held it


os.register_at_fork(after_in_child=_after_fork)
