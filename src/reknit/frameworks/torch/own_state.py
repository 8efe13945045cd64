"""The state of an optimizer with methods or hooks of its own: its `state_dict`, by parameters."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct

from reknit.errors import StateError
from reknit.frameworks import imported, tree
from reknit.frameworks.numbers import same_value
from reknit.frameworks.torch import dtensor, subclasses, torch_private
from reknit.frameworks.torch import numbers as tensor_numbers
from reknit.frameworks.torch.members import parameters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Place, Walk


_SAVES = "its own state_dict"
_METHODS = ("state_dict", "load_state_dict", "__setstate__")

_TORCH = ("torch.optim",)
_KNOWN = ("torch", "deepspeed", "apex", "transformer_engine", "megatron", "vescale")
"""Packages of optimizers that, inside those of a framework, are read in the framework's way."""

_WRAPPERS = {
    "AcceleratedOptimizer": "optimizer",
    "LightningOptimizer": "_optimizer",
    "_FabricOptimizer": "_optimizer",
}
"""Classes of Accelerate and Lightning around an optimizer with the state, and the attributes that hold it."""

_HOW = re.compile(r"^(DeepSpeed)?(CPU|Fused)?")
"""Prefix of a class of DeepSpeed, Apex or Transformer Engine; the rest is the name of torch's class."""


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer with the state, without wrappers that only forward calls."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _WRAPPERS and kind.__module__.partition(".")[0] != "torch":
            inside = vars(optimizer).get(_WRAPPERS[kind.__name__])
            return unwrapped(inside) if isinstance(inside, torch.optim.Optimizer) else optimizer
    return optimizer


def is_plain(optimizer: Any) -> bool:
    """Return whether this is an optimizer of torch, in and around no other, without a protocol of its own."""
    return (
        isinstance(optimizer, torch.optim.Optimizer)
        and not isinstance(optimizer, imported("torch.distributed.optim", "ZeroRedundancyOptimizer"))
        and unwrapped(optimizer) is optimizer
        and inner(optimizer) is None
        and next(_own(optimizer, _TORCH), None) is None
    )


def kind(optimizer: Any, *, inside: bool = False) -> tuple[str, ...]:
    """Return the names of an optimizer's class and its base classes, the nearest first.

    Adam with decoupled weight decay is AdamW in every class.  Optimizers `inside` that of a framework, with
    states that are saved in torch's form, have torch's names.
    """
    base = torch.optim.Optimizer
    if (stepped := inner(optimizer)) is not None:
        return kind(stepped, inside=inside)
    classes = [one for one in type(optimizer).__mro__ if issubclass(one, base) and one is not base]
    decoupled, groups = getattr(optimizer, "adam_w_mode", None), getattr(optimizer, "param_groups", ())
    if decoupled is None:
        decoupled = any(group.get("decoupled_weight_decay") for group in groups)
    return tuple(dict.fromkeys(_name(one, inside=inside, decoupled=bool(decoupled)) for one in classes))


def inner_kind(optimizer: Any, place: Place) -> tuple[str, ...]:
    """Return the kind of an optimizer inside a framework's, which must have no protocol of its own."""
    require_none(optimizer, place)
    return kind(optimizer, inside=True)


def _name(one: type, *, inside: bool, decoupled: bool) -> str:
    name = _HOW.sub("", one.__name__) if inside else one.__name__
    own = one.__module__.startswith("torch.optim.") or name != one.__name__
    name = "AdamW" if name == "Adam" and own and decoupled else name
    return f"torch.optim.{name}" if own else name


def differs(saved: Any, here: Sequence[str]) -> bool:
    """Return whether another optimizer was saved: neither of these classes derives from the other."""
    if not here or not isinstance(saved, (list, tuple)) or not saved:
        return False
    return saved[0] not in here and here[0] not in saved


def own(optimizer: Any, place: Place) -> list[str]:
    """Return the names of an optimizer's own methods and hooks of the state protocol.

    Raises `StateError` for a wrapper that leaves out the states of the optimizer inside.
    """
    found, stepped = list(_own(optimizer, _TORCH)), inner(optimizer)
    if stepped is not None and stepped.state is not optimizer.state and stepped.state and _SAVES not in found:
        raise StateError(
            f"{place} is a {type(optimizer).__name__} around a {type(stepped).__name__} with states of its "
            "own, which its state_dict() leaves out",
            remedy="let its state_dict() return them, or put the optimizer inside into the state",
        )
    return found


def require_none(optimizer: Any, place: Place) -> None:
    """Raise `StateError` for an optimizer with a protocol of its own.

    The `state_dict` of such an optimizer would gather, or not contain all states.
    """
    if found := list(_own(optimizer, _KNOWN)):
        raise StateError(
            f"{place} steps by a {type(optimizer).__name__} with {', '.join(found)}, which cannot be "
            "run where each rank has a part of the states",
            remedy="remove that, and save its additions under an item of their own",
        )


def _own(optimizer: Any, known: tuple[str, ...]) -> Iterator[str]:
    """Yield the methods and hooks of the state protocol that are not of `known` packages."""
    for method in _METHODS:
        home = next(one for one in type(optimizer).__mro__ if method in vars(one))
        if method in vars(optimizer) or not f"{home.__module__}.".startswith(
            tuple(f"{one}." for one in known)
        ):
            yield f"its own {method}"
    for hook in torch_private.state_hooks(optimizer):
        yield f"the hook {getattr(hook, '__qualname__', repr(hook))}"


def inner(optimizer: Any) -> Any:
    """Return the optimizer inside of a wrapper, which has the same groups, or None."""
    groups = getattr(optimizer, "param_groups", None)
    for inside in vars(optimizer).values():
        if isinstance(inside, torch.optim.Optimizer) and getattr(inside, "param_groups", inside) is groups:
            return inside
    return None


_PAIRS = "~pairs"
"""Key of the list of keys and values of a dict."""

_CLASS, _ATTRIBUTES = "~class", "attributes"
"""Keys of the module and name of a class, and of the attributes of an object."""

_FORMS = ({_PAIRS}, {_CLASS, _ATTRIBUTES})
"""Keys of the dicts that stand for other values; a user's dict with these keys is saved as pairs."""

_SPECIAL = frozenset(
    {"__new__", "__init_subclass__", "__del__", "__slots__", "__getstate__", "__setstate__"}
    | {"__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__", "__setattr__"}
)
"""Members of a class whose objects may be more than their attributes."""

_HEAP_TYPE = 1 << 9
"""Flag of a class that was made by Python code."""


def packages(optimizer: Any) -> frozenset[str]:
    """Return the packages that an optimizer is made of, besides torch: their objects may be in its states."""
    found = {one.__module__.partition(".")[0] for one in type(optimizer).__mro__}
    return frozenset(found - {"torch", "builtins", "typing", "abc"})


def packed(value: Any, own: AbstractSet[str]) -> Any:
    """Return a value with lists in the place of dicts with keys other than texts and integers.

    A plain object of the packages `own` becomes a dict of its attributes.
    """

    def pack(_: tree.Path, leaf: Any) -> Any:
        if type(leaf) is dict and (leaf.keys() in _FORMS or not all(_is_usual(key) for key in leaf)):
            return {_PAIRS: [[key, packed(one, own)] for key, one in leaf.items()]}
        if own and _is_plain(kind := type(leaf), own):
            named = [kind.__module__, kind.__qualname__]
            return {_CLASS: named, _ATTRIBUTES: packed(dict(vars(leaf)), own)}
        return tree.DESCEND

    return tree.map_leaves(value, pack)


def unpacked(value: Any, own: AbstractSet[str]) -> Any:
    """Return the value that `packed` changed.  Runs no code of a class.

    Raises `StateError` for an object of a class that is not in the packages `own`, or not plain.
    """

    def unpack(_: tree.Path, leaf: Any) -> Any:
        if type(leaf) is not dict:
            return tree.DESCEND
        if leaf.keys() == {_PAIRS}:
            try:
                return {key: unpacked(one, own) for key, one in leaf[_PAIRS]}
            except (TypeError, ValueError) as error:
                raise StateError(f"its value has pairs that are not those of a dict: {error}") from error
        if leaf.keys() == {_CLASS, _ATTRIBUTES}:
            made: Any = object.__new__(_class(leaf[_CLASS], own))
            attributes = unpacked(leaf[_ATTRIBUTES], own)
            if not isinstance(attributes, dict) or not all(isinstance(key, str) for key in attributes):
                raise StateError("its value has an object whose attributes have no names")
            vars(made).update(attributes)
            return made
        return tree.DESCEND

    return tree.map_leaves(value, unpack)


def _is_usual(key: Any) -> bool:
    return isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool))


def _is_plain(kind: type, own: AbstractSet[str]) -> bool:
    """Return whether objects of a class are their attributes, and can be made again from its name."""
    if kind.__module__.partition(".")[0] not in own or _found(kind.__module__, kind.__qualname__) is not kind:
        return False
    return all(one.__flags__ & _HEAP_TYPE and not _SPECIAL & vars(one).keys() for one in kind.__mro__[:-1])


def _found(module: str, name: str) -> Any:
    """Return the object of this name in a module that is imported, or None."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found


def _class(named: Any, own: AbstractSet[str]) -> type:
    module, name = map(str, named) if isinstance(named, list) and len(named) == 2 else ("?", "?")
    found = _found(module, name)
    if not isinstance(found, type) or not _is_plain(found, own):
        raise StateError(
            f"its value has an object of the class {module}.{name}, which is not a plain class of "
            f"{', '.join(sorted(own)) or 'the optimizer'} here",
            remedy="install the version of the optimizer's package that saved it",
        )
    return found


WHOLE = "whole"
"""Name of the entry about the layout."""

_KIND, _PARAMETERS, _SHARDED = "optimizer", "parameters", "sharded"


class Layout(Struct, frozen=True):
    """An optimizer, with its kind and name, shape and local shape of each of its parameters, in order."""

    optimizer: Any
    record: dict[str, Any]

    def collect(self, more: Mapping[Any, Any], place: Place, saving: Saving) -> None:
        """Collect the record; for each DTensor below `place`, also a parameter that is distributed alike."""
        members = _members(self.optimizer)
        sharded: dict[str, int] = {}

        def find(path: tree.Path, leaf: Any) -> Any:
            if not dtensor.is_dtensor(leaf):
                return tree.DESCEND
            alike = (n for n, one in enumerate(members) if dtensor.is_dtensor(one) and _are_alike(one, leaf))
            if (number := next(alike, None)) is None:
                raise StateError(
                    f"the state_dict() of {place} has a DTensor that is distributed like no parameter of the "
                    f"optimizer: {tree.dotted(path)}",
                    remedy="put the optimizer inside it into the state",
                )
            sharded[tree.join(*(tree.escape(key, place) for key in path))] = number
            return None

        tree.map_leaves(more, find, place)
        saving.blob({**self.record, _SHARDED: sharded}, place.child(WHOLE))

    def want(self, place: Place, loading: Loading) -> tuple[Mapping[str, int], str | None]:
        """Request the saved record; return parameters by DTensors, and why the saved layout is another."""
        found = loading.value(place.child(WHOLE))
        saved, here = found.value, self.record
        if found.why is not None or not isinstance(saved, dict):
            return {}, found.why or "its layout is not recorded"
        if differs(saved.get(_KIND), here[_KIND]):
            return {}, f"{saved[_KIND][0]} saved it, and here {here[_KIND][0]} steps"
        if not same_value(saved.get(_PARAMETERS), here[_PARAMETERS]):
            return {}, (
                f"the state_dict() of {here[_KIND][0]} is not by parameters: it loads for parameters of the "
                "same names, order and shapes on each rank alone, and here they are others"
            )
        return saved.get(_SHARDED) or {}, None

    def empty_like(self, number: int, dtype: torch.dtype) -> Any:
        """Return memory that is distributed like a parameter of the optimizer."""
        return subclasses.empty_like(_members(self.optimizer)[number], dtype)


def layout(optimizer: Any, kind: tuple[str, ...], walk: Walk) -> Layout:
    """Return the layout of an optimizer's parameters on this rank."""
    named = parameters(walk)
    found = []
    for parameter in _members(optimizer):
        known = named.get(id(parameter))
        local = torch_private.local_of(parameter) if dtensor.is_dtensor(parameter) else parameter
        name = known[0].name if known else None
        found.append([name, list(parameter.shape), list(local.shape)])
    return Layout(optimizer, {_KIND: list(kind), _PARAMETERS: found})


def _members(optimizer: Any) -> list[Any]:
    return [one for group in getattr(optimizer, "param_groups", ()) for one in group["params"]]


def _are_alike(one: Any, other: Any) -> bool:
    return bool(
        one.shape == other.shape
        and one.device_mesh == other.device_mesh
        and tuple(one.placements) == tuple(other.placements)
    )


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
        stepped = inner(optimizer)
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
    found = own(optimizer, place)
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
