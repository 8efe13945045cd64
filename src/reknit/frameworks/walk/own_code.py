"""Errors for exceptions of an object's own code: they name the object and the cause."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from reknit import plugins
from reknit.errors import ReknitError, StateError, known
from reknit.frameworks import imported
from reknit.frameworks.tree import POSITION

if TYPE_CHECKING:
    from reknit.frameworks.walk.walk import Place


_DEPTH_OF_LOADERS = 2
_DEPTH_OF_TENSORS = 3

_OF_ONE_READER = (
    ("torchdata.stateful_dataloader", "StatefulDataLoader"),
    ("torchdata.stateful_dataloader.sampler", "StatefulDistributedSampler"),
    ("torchdata.nodes.base_node", "BaseNode"),
    ("torchdata.nodes.loader", "Loader"),
    ("datasets.iterable_dataset", "IterableDataset"),
)
"""Classes of loaders and their sources.  A loader of Mosaic Streaming, for example, has a global position."""

SETTLED: Final = object()
"""The answer for a data loader that takes no state."""


def has_effects(value: Any) -> bool:
    """Return whether `state_dict` may change the object, so that a load must not call it.

    The object's attribute `state_dict_has_effects` decides.  Without it, the result is true for objects that
    can be iterated and are not containers, and for objects that hold such an object with a state.  Data
    loaders make an iterator, start workers and draw random numbers.  The result is false if the object holds
    tensors that are distributed, or not on the CPU: these are to come back as they are now.
    """
    declared = _declared(value)
    if declared is not None:
        return declared
    return (_is_loader(value) or _holds_loader(value)) and not _holds_placed(value)


def may_disturb(value: Any) -> bool:
    """Return whether a load calls `state_dict` of an object with a data loader and without a declaration."""
    return _declared(value) is None and _holds_loader(value) and _holds_placed(value)


def comes_last(value: Any) -> bool:
    """Return whether an object declares that its `load_state_dict` reads tensors that the load fills."""
    return bool(getattr(value, "load_after_tensors", False))


def is_loader(value: Any) -> bool:
    """Return whether an object is a data loader, or a source of one, or holds one."""
    return is_of_one_reader(value) or _is_loader(value) or _holds_loader(value)


def is_of_one_reader(value: Any) -> bool:
    """Return whether an object is of a library whose states count the samples of one reader only."""
    return any(isinstance(value, imported(*name)) for name in _OF_ONE_READER)


def is_loader_state(value: Any) -> bool:
    """Return whether a value is the state of a StatefulDataLoader."""
    return (
        isinstance(value, Mapping)
        and "_iterator_finished" in value
        and ("_snapshot" in value or "_sampler_iter_yielded" in value)
    )


def collect_position(value: Any, state: Any, place: Any, saving: Any) -> None:
    """Collect the position of all readers beside the state of a data loader, if that is one of torchdata."""
    if isinstance(value, imported(*_OF_ONE_READER[0])):
        plugins.find("reknit.frameworks", "torchdata").collect_position(value, state, place, saving)


def taker_of(value: Any, place: Any, loading: Any, state: Any) -> Any:
    """Return the object that takes a saved state: the object itself, unless it is a data loader.

    `SETTLED` is returned for a loader that continues without the state, or is refused.  `state` is the state
    saved for this rank, or None.
    """
    at = place.below(POSITION)
    if at.fqn in loading.catalog.blobs.get(at.item, {}):
        loading.pass_over(at)
    if not is_of_one_reader(value) and loading.catalog.num_ranks in (None, loading.world.size):
        return value
    return plugins.find("reknit.frameworks", "torchdata").taker_of(value, place, loading, state)


def leave(value: Any, place: Any, why: str, loading: Any) -> None:
    """Note that a value stays as it is.  Raises `MismatchError` for a data loader, which would begin anew."""
    if is_loader(value):
        plugins.find("reknit.frameworks", "torchdata").refuse(place, why, loading)
    else:
        loading.note(place, why)


def _declared(value: Any) -> bool | None:
    declared = getattr(value, "state_dict_has_effects", None)
    return None if declared is None else bool(declared)


def _is_loader(value: Any) -> bool:
    """Return whether an object's class is a data loader's: a property of the object might run any code."""
    kind = type(value)
    torch = sys.modules.get("torch")
    return (
        callable(getattr(kind, "state_dict", None))
        and callable(getattr(kind, "load_state_dict", None))
        and issubclass(kind, Iterable)
        and not issubclass(kind, Container)
        and (torch is None or not issubclass(kind, (torch.nn.Module, torch.optim.Optimizer)))
    )


def _holds_loader(value: Any) -> bool:
    return any(map(_is_loader, _held(value, _DEPTH_OF_LOADERS)))


def _holds_placed(value: Any) -> bool:
    """Return whether an object holds tensors with a significant device, itself or in its modules."""
    torch = sys.modules.get("torch")
    seen: set[int] = set()
    rest = deque(_held(value, _DEPTH_OF_TENSORS))
    while rest:
        held = rest.popleft()
        if _is_placed(held):
            return True
        if torch is not None and issubclass(type(held), torch.nn.Module) and id(held) not in seen:
            seen.add(id(held))
            parts = (vars(held).get(name, {}) for name in ("_parameters", "_buffers", "_modules"))
            rest.extend(chain.from_iterable(map(dict.values, parts)))
    return False


def _is_placed(value: Any) -> bool:
    kind = type(value)
    if (torch := sys.modules.get("torch")) and issubclass(kind, torch.Tensor):
        distributed = sys.modules.get("torch.distributed.tensor")
        if distributed is not None and issubclass(kind, distributed.DTensor):
            return True
        return value.device.type not in ("cpu", "meta")
    # By its name, as JAX need not be imported: the class of arrays over many devices.
    return kind.__name__ == "ArrayImpl" and len(value.sharding.device_set) > 1


def _held(value: Any, depth: int) -> Iterator[Any]:
    """Yield the objects in the attributes of an object, also in containers, without running its code."""
    try:
        attributes = vars(value)
    except TypeError:  # for an object with slots
        return
    yield from _inside(attributes, depth)


def _inside(container: Any, depth: int) -> Iterator[Any]:
    kind = type(container)
    items: Iterable[Any] = ()
    if issubclass(kind, dict):
        items = dict.values(container)
    else:
        for plain in (list, tuple, deque):
            if issubclass(kind, plain):
                items = plain.__iter__(container)
    for item in items:
        yield item
        if depth:
            yield from _inside(item, depth - 1)


_MEND = "correct the code that raised it (the exception is the cause of this error), or leave the object out"
_WRAP = (
    "wrap an object that has a state (for a data loader, torchdata's StatefulDataLoader), or leave it out "
    "and save its position as a number; reknit.integrations.accelerate does that for prepared loaders"
)
_STATE = ("state_dict", "load_state_dict")
_DEPTH = 3


def failed_save(error: Exception, value: Any, place: Place) -> ReknitError:
    """Return the error for a value whose own code raised an exception while the value was collected."""
    return known(error) or StateError(
        f"{place} ({type(value).__name__}) could not be saved: {cause(error, value)}",
        remedy=_MEND if _stateless(error, value) is None else _WRAP,
    )


def failed_search(error: Exception, value: Any, place: Place) -> ReknitError:
    """Return the error for a target whose own code raised an exception before anything was read."""
    return known(error) or StateError(
        f"{place} ({type(value).__name__}) could not be looked at, and nothing was changed: "
        f"{cause(error, value)}",
        remedy=_MEND if _stateless(error, value) is None else _WRAP,
    )


def cause(error: Exception, value: Any = None) -> str:
    """Return type and text of an exception, and the object within `value` that lacks a state, if one does."""
    text = f"{type(error).__name__}: {error}"
    if (inner := _stateless(error, value)) is None:
        return text
    return f"it passes on the state of a {type(inner).__name__}, which has none ({text})"


def _stateless(error: Exception, value: Any) -> Any:
    """Return the object whose state a wrapper passes on, although it has none; None for other errors.

    A wrapper asks it for `state_dict`, or passes on the request for an attribute of its own, which is set
    only if there is a state.
    """
    inner = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
    if inner is None or any(hasattr(type(inner), name) for name in _STATE):
        return None
    if error.name in _STATE:  # type: ignore[attr-defined]
        return inner
    holders = [value]
    for _ in range(_DEPTH):
        for holder in holders:
            held = _attributes(holder)
            if hasattr(type(holder), "__getattr__") and any(each is inner for each in held):
                return inner
        holders = [each for holder in holders for each in _attributes(holder)]
    return None


def _attributes(value: Any) -> list[Any]:
    return list(getattr(value, "__dict__", {}).values())
