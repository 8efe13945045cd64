"""The state of an optimizer with methods or hooks of its own: its `state_dict`, by parameters."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct

from reknit.errors import StateError
from reknit.frameworks.optimizer import optimizer_protocol
from reknit.frameworks.torch import dtensor, tensor_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.frameworks.walk.walk import Place

_STATES, _GROUPS = "state", "param_groups"


class OwnState(Struct, frozen=True):
    """The result of an optimizer's own `state_dict`.

    `states` has the states by parameters, and any others by their keys.  `groups` are the groups in it, and
    `members` the parameters of each.  `more` are its other entries.  If it is `whole`, its states are not
    those of single parameters, and all entries are in `more`.
    """

    optimizer: Any
    states: dict[Any, Any]
    groups: list[dict[str, Any]]
    members: list[list[Any]]
    more: dict[Any, Any]
    whole: bool = False

    def load(self, more: Mapping[Any, Any]) -> None:
        """Let the optimizer load its states, its options, and `more`, in its own way.

        torch's part of that converts states to the dtypes of parameters.  A state that this changes, and that
        the optimizer leaves so, becomes the saved one again.
        """
        optimizer = self.optimizer
        if self.whole:
            optimizer.load_state_dict(dict(more))
            return
        numbers = {
            id(parameter): number
            for group, members in zip(self.groups, self.members, strict=True)
            for number, parameter in zip(group["params"], members, strict=True)
        }
        states = {numbers.get(id(key), key): value for key, value in self.states.items()}
        exact = {key: _copied(value) for key, value in states.items()}
        stepped = optimizer_protocol.inner(optimizer)
        optimizer.load_state_dict({_STATES: states, _GROUPS: self.groups, **more})
        # torch makes new groups, and wrappers keep the old ones: a scheduler would change those in vain.
        if stepped is not None and stepped.param_groups is not optimizer.param_groups:
            optimizer.param_groups = stepped.param_groups
        parameters = {numbers[id(one)]: one for members in self.members for one in members}
        now = optimizer.state_dict()
        for key, present in now[_STATES].items() if _has_form(now, optimizer.param_groups) else ():
            if key in parameters and key in exact:
                _restore(present, exact[key], parameters[key].dtype)


def read(optimizer: Any, place: Place) -> OwnState | None:
    """Return the result of an optimizer's own `state_dict`; None without methods or hooks of its own.

    Hooks run.  Raises `StateError` for a result that is not a mapping, and for a wrapper that leaves out the
    states of the optimizer inside.
    """
    found = optimizer_protocol.own(optimizer, place)
    if not found:
        return None
    given = optimizer.state_dict()
    if not isinstance(given, Mapping):
        raise StateError(
            f"the state_dict() of {place} ({type(optimizer).__name__}, with {', '.join(found)}) is a "
            f"{type(given).__name__}, and not the dict that load_state_dict() takes",
            remedy="let it return a dict",
        )
    if not _has_form(given, getattr(optimizer, "param_groups", None)):
        return OwnState(optimizer, {}, [], [], dict(given), whole=True)
    groups: list[Any] = [dict(group) for group in given[_GROUPS]]
    members = [list(group["params"]) for group in optimizer.param_groups]
    by_number = {
        number: parameter
        for group, inside in zip(groups, members, strict=True)
        for number, parameter in zip(group["params"], inside, strict=True)
    }
    states = {by_number.get(key, key): value for key, value in given[_STATES].items()}
    more = {key: value for key, value in given.items() if key not in (_STATES, _GROUPS)}
    return OwnState(optimizer, states, groups, members, more)


def _has_form(given: Any, live: Any) -> bool:
    """Return whether a state dict has the states by the numbers of parameters, as that of torch has."""
    if not isinstance(given, Mapping) or not isinstance(given.get(_STATES), Mapping):
        return False
    if not isinstance(given.get(_GROUPS), list):
        return False
    groups = given[_GROUPS]
    if not isinstance(live, list) or len(live) != len(groups):
        return False
    return all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), list)
        and len(group["params"]) == len(present["params"])
        for group, present in zip(groups, live, strict=True)
    )


def _copied(value: Any) -> Any:
    """Return the same values in new dicts and lists, which a load cannot change."""
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    return list(map(_copied, value)) if isinstance(value, list) else value


def _restore(present: Any, exact: Any, dtype: torch.dtype) -> None:
    """Put tensors back that torch's load has converted to this dtype."""
    for key, one in _entries(exact):
        if isinstance(present, MutableMapping) and key not in present:
            continue
        if not isinstance(present, MutableMapping | list) or (
            isinstance(present, list) and len(present) != len(exact)
        ):
            return
        here = present[key]
        if isinstance(one, torch.Tensor) and isinstance(here, torch.Tensor):
            if _is_converted(here, one, dtype):
                present[key] = one.to(here.device)
        else:
            _restore(here, one, dtype)


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def _is_converted(here: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor is the exact one, but was once converted to another dtype."""
    if (
        exact.dtype == dtype
        or here.shape != exact.shape
        or dtensor.is_dtensor(here) != dtensor.is_dtensor(exact)
    ):
        return False
    exact = exact.to(here.device)
    if tensor_numbers.same(here, exact):
        return False
    return tensor_numbers.same(here, exact.to(dtype).to(here.dtype))
