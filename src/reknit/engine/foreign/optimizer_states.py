"""The states of an optimizer of another program, under the names that reknit gives to those of any optimizer.

`state/<parameter>/<name>` is a state, and `param_groups/<parameter>` are the options of its group.
`empty_groups/<number>` are those of a group without parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.engine.foreign.entries import MODEL
from reknit.errors import FormatError
from reknit.format.foreign.torch_values import Whole

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOT_OPTIONS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Entries of a group that name parameters, or that depend on the devices of a job."""
_STATE, _GROUPS = "state.", "param_groups."

EMPTY = "empty_groups"
"""Part of the names of the options of groups without parameters, by the numbers of the groups."""


def state_keys(item: Any, keys: list[Any]) -> list[Any]:
    """Return the keys of an entry, of which a flattened state dict of an optimizer has one for all."""
    if item != MODEL and len(keys) == 1 and str(keys[0]).startswith("state.") and str(keys[0]).count(".") > 1:
        name, _, last = keys[0][len("state.") :].rpartition(".")
        return ["state", name, last]
    return keys


def named_states(value: Any) -> Any:
    """Return an optimizer's state dict by the names of parameters; any other value as it is.

    Numbers of parameters get the names that its groups record.  Without these, they stay, with the groups as
    one value: only the optimizer that loads them can pair them with its parameters.
    """
    if isinstance(value, dict) and value and all(_is_flat(key) for key in value):
        return _flattened(value)
    if not (isinstance(value, dict) and value.keys() == {"state", "param_groups"}):
        return value
    state, groups = value["state"], listed_groups(value["param_groups"])
    if not isinstance(state, dict) or groups is None:
        return value
    names = parameter_names(groups)
    if names is None:
        return {"state": state, "param_groups": Whole(groups)}
    states = {names.get(key, key): one for key, one in state.items()}
    options = options_of(groups, names)
    named = {"state": states, "param_groups": {name: Whole(one) for name, one in options.items()}}
    if empty := empty_groups(groups):
        named[EMPTY] = {number: Whole(one) for number, one in empty.items()}
    return named


def nested_options(parts: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Return the options of each parameter, which are those of its group.  `parts` has them by their keys.

    Raises `FormatError` for two values at one place.
    """
    nested: dict[Any, Any] = {}
    for path, value in parts.items():
        at = nested
        for key in path[:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise FormatError("the options of an optimizer have two values at one place")
        at[path[-1]] = value
    flat = all(isinstance(key, str) and key.startswith(_GROUPS) for key in nested)
    made: dict[str, Any] = named_states(nested if flat else {"state": {}, **nested})
    made.pop("state", None)
    return made


def empty_groups(groups: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the options of the groups without parameters, by their numbers."""
    return {number: options_of_group(group) for number, group in enumerate(groups) if not group["params"]}


def options_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group of parameters, without options that depend on the devices of a job."""
    return {key: one for key, one in group.items() if key not in _NOT_OPTIONS}


def options_of(groups: list[dict[str, Any]], names: Mapping[Any, str]) -> dict[str, dict[str, Any]]:
    """Return the options of each parameter, which are those of its group."""
    options: dict[str, dict[str, Any]] = {}
    for group in groups:
        kept = options_of_group(group)
        options.update({names[one]: kept for one in group["params"]})
    return options


def _is_flat(key: Any) -> bool:
    return isinstance(key, str) and key.startswith((_STATE, _GROUPS))


def listed_groups(groups: Any) -> list[dict[str, Any]] | None:
    """Return the groups of an optimizer, None for something else."""
    if isinstance(groups, dict) and list(groups) == list(range(len(groups))):
        groups = list(groups.values())
    if not isinstance(groups, list):
        return None
    good = all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
    return groups if good else None


def parameter_names(groups: list[dict[str, Any]]) -> dict[Any, str] | None:
    """Return the name of each parameter in the groups, as these record it; None if they do not."""
    keys = [key for group in groups for key in group["params"]]
    if all(isinstance(key, str) for key in keys):
        return {key: key for key in keys}
    given = [name for group in groups for name in group.get("param_names") or ()]
    if len(given) == len(keys) and all(isinstance(name, str) for name in given):
        return dict(zip(keys, given, strict=True))
    return None


def _flattened(value: dict[str, Any]) -> dict[str, Any]:
    """Return the nested form of a flattened state dict: ``state.<parameter>.<name>``."""
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, one in value.items():
        into, rest = (state, key[len(_STATE) :]) if key.startswith(_STATE) else (options, key[len(_GROUPS) :])
        name, _, last = rest.rpartition(".")
        if into is state or last not in _NOT_OPTIONS:
            into.setdefault(name, {})[last] = one
    return {"state": state, "param_groups": {name: Whole(one) for name, one in options.items()}}
