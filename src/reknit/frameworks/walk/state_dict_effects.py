"""Objects with a `state_dict` that a load must not call, and objects that are loaded after the tensors."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Container, Iterable, Iterator
from itertools import chain
from typing import Any

_DEPTH_OF_LOADERS = 2
_DEPTH_OF_TENSORS = 3


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
