"""Which tensor does an optimizer of Megatron update for each parameter?  Paired by identity, and proved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reknit.errors import StateError
from reknit.frameworks.megatron import megatron_private

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reknit.frameworks.megatron.megatron_private import MainTensors, Pairs
    from reknit.frameworks.walk.walk import Place


class Working(NamedTuple):
    """A parameter as an optimizer updates it.

    `main` is the tensor that the inner optimizer updates: the whole parameter, or a flat range of `numel`
    elements from `start` on.  `distributed` is set if each rank of the data parallel group has another range.
    """

    parameter: Any
    main: torch.Tensor
    start: int
    numel: int
    group: dict[str, Any]
    inner: Any
    distributed: bool

    @property
    def exact(self) -> bool:
        """Whether `main` is a copy in higher precision."""
        return bool(self.main.dtype != self.parameter.dtype)


def working(optimizer: Any, place: Place) -> list[Working]:
    """Return the parameters whose states an optimizer (not a chain) has on this rank.

    Raises `StateError` if it is not certain which parameter a tensor of a group or a state belongs to.
    """
    found = megatron_private.main_tensors(optimizer, place)
    whole = f"{place}: the {type(optimizer).__name__}"
    works: list[Working] = []
    for number, group in enumerate(found.inner.param_groups):
        here = f"{place}: group {number} of the {type(optimizer).__name__}"
        works += _of_group(found, number, group, here)
    _require_all(found, works, whole)
    return works


def _of_group(found: MainTensors, number: int, group: dict[str, Any], here: str) -> Iterator[Working]:
    """Yield the parameters of one group."""
    copies, views = (list(_pairs(pairs, number, here)) for pairs in (found.copies, found.views))
    if found.ranges is None:
        # All else in the group is a parameter itself.
        copied = _ids(main for _, main in copies)
        views = [(main, main) for main in group["params"] if id(main) not in copied]
    mains = [main for _, main in copies + views]
    if len(mains) != len(group["params"]) or _ids(mains) != _ids(group["params"]):
        raise _unproved(f"{here} has other tensors than Megatron has for the parameters")
    for is_copy, pairs in ((True, copies), (False, views)):
        for parameter, main in pairs:
            start, end = 0, parameter.numel()
            if found.ranges is not None:
                start, end = found.ranges.get(id(parameter), (0, 0))
            if (why := _flaw(parameter, main, start, end, is_copy=is_copy)) is not None:
                raise _unproved(f"{here} {why} for a parameter of shape {list(parameter.shape)}")
            yield Working(
                parameter,
                main,
                start,
                end - start,
                group,
                inner=found.inner,
                distributed=found.ranges is not None,
            )


def _pairs(pairs: Pairs, number: int, here: str) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the parameters of one group and the tensors that are updated in their place."""
    if any(number >= len(groups) for groups in pairs):
        raise _unproved(f"{here} was added after Megatron made the optimizer")
    parameters, mains = (groups[number] for groups in pairs)
    if len(parameters) != len(mains):
        raise _unproved(f"{here} has {len(mains)} tensors for {len(parameters)} parameters")
    yield from zip(parameters, mains, strict=True)


def _flaw(parameter: Any, main: torch.Tensor, start: int, end: int, *, is_copy: bool) -> str | None:
    """Return why a tensor cannot be that of these elements of a parameter, None if it can."""
    if not 0 <= start <= end <= parameter.numel() or main.numel() != end - start:
        return f"has {main.numel()} elements in place of those from {start} to {end}"
    if is_copy:
        if main.dtype != torch.float32 or parameter.dtype == torch.float32:
            return f"has a copy in {main.dtype}, of {parameter.dtype},"
        return None
    if main.dtype != parameter.dtype:
        return f"has {main.dtype} in place of {parameter.dtype}"
    first = parameter.data_ptr() + start * parameter.element_size()
    return "has other memory" if main.numel() and main.data_ptr() != first else None


def _require_all(found: MainTensors, works: list[Working], whole: str) -> None:
    """Raise `StateError` unless each parameter is there once, and all parts and states are theirs."""
    parameters, mains = _ids(work.parameter for work in works), _ids(work.main for work in works)
    if min(len(parameters), len(mains)) < len(works):
        raise _unproved(f"{whole} has one parameter twice in its groups")
    for work in works:
        # Megatron notes the copy at the parameter; another optimizer of the same model has its own copy.
        noted = getattr(work.parameter, "main_param", None)
        if work.exact and noted is not work.main and id(noted) in mains:
            raise _unproved(f"{whole} has two copies of a parameter of shape {list(work.parameter.shape)}")
    if left := (found.ranges or {}).keys() - parameters:
        raise _unproved(f"{whole} has parts of parameters here that are in none of its groups ({len(left)})")
    if lost := sum(bool(states) and id(key) not in mains for key, states in found.inner.state.items()):
        raise _unproved(f"{whole} has states under keys that are in none of its groups ({lost})")


def _ids(tensors: Iterable[Any]) -> set[int]:
    return set(map(id, tensors))


def _unproved(what: str) -> StateError:
    return StateError(
        f"{what}, so that the parameters of its states are unknown",
        remedy="convert and move the model before DistributedDataParallel wraps it, make the optimizer from "
        "the wrapped model, and change neither its groups nor the keys of its states",
    )
