"""The parameters of an optimizer: their names, their options, and the share of this rank."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from msgspec import Struct

from reknit.errors import FormatError, StateError
from reknit.frameworks import imported, tree
from reknit.frameworks.torch import flat_part, own_state, torch_private
from reknit.frameworks.torch import own_state as optimizer_protocol
from reknit.frameworks.torch import own_state as packed_values
from reknit.frameworks.torch import own_state as whole_state
from reknit.frameworks.torch.members import parameters, without_wrappers
from reknit.types.shard import escaped

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence

    from reknit.frameworks.torch.flat_part import FlatPart
    from reknit.frameworks.torch.members import NamedParameter
    from reknit.frameworks.torch.own_state import Layout
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.walk import Place, Replicas, Walk

MASTER = "master"
"""Name of the master weights of a parameter, among its states."""

_OWN_MASTER = f"~2{MASTER}"
"""Path element of a state with that name in the optimizer itself."""


_OTHER = "~4"
"""Beginning of the path element of a name that is neither a text nor an integer; the rest is its `repr`."""


def element(name: Any, where: Place) -> str:
    """Return the path element of a state of an optimizer, which `name_of` turns into its name."""
    if type(name) in (float, bool, tuple, type(None)):
        if not _is_literal(written := repr(name), name):
            raise StateError(
                f"{where} has the key {written}, whose text no load turns back into the key",
                remedy="use texts, finite numbers, or tuples of these as keys of states of an optimizer",
            )
        return _OTHER + escaped(written)
    return _OWN_MASTER if isinstance(name, str) and name == MASTER else tree.escape(name, where)


def name_of(one: str) -> Any:
    """Return the name of a state of an optimizer from its path element."""
    if not one.startswith(_OTHER):
        return tree.unescape(one)
    try:
        name = ast.literal_eval(str(tree.unescape(one.removeprefix(_OTHER))))
        hash(name)
    except _NO_LITERAL as error:
        raise FormatError(f"the checkpoint has a state of the name {one}, which is not a value") from error
    return name


_NO_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)


def _is_literal(written: str, name: Any) -> bool:
    """Return whether `name_of` returns this name for its text, as it does not for infinity and dtypes."""
    try:
        return bool(ast.literal_eval(written) == name)
    except _NO_LITERAL:
        return False


class ParamSlot(msgspec.Struct, frozen=True, eq=False):
    """A parameter of an optimizer.

    `key` is its key in the `state` of the optimizer.  `places` are its places in modules, several if it is
    tied.  `flat` describes the elements that this rank holds of a flattened parameter, and `counter` are the
    ranks with its counters.  Several slots are `joint` if they share one key.  `kept` is false if this rank
    does not keep the states.  `master` are the weights of higher precision that the optimizer updates, in the
    form of the states; None if it updates the parameter itself.  `resizable` allows another shape in the
    checkpoint.  `kind` is that of the optimizer (`optimizer_protocol.kind`).  With `whole_steps`, its steps
    are counted in integers.
    """

    name: str
    key: Hashable
    parameter: torch.Tensor | None
    group: dict[str, Any]
    replicas: Replicas
    places: tuple[Place, ...]
    flat: FlatPart | None = None
    counter: Replicas = None
    joint: bool = False
    kept: bool = True
    master: torch.Tensor | None = None
    resizable: bool = False
    kind: tuple[str, ...] = ()
    whole_steps: bool = False

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the whole parameter, None if it is unknown."""
        if self.flat is not None:
            return self.flat.shape
        return None if self.parameter is None else flat_part.whole_shape(self.parameter)

    @property
    def is_elsewhere(self) -> bool:
        """Whether other ranks have the states; states of zero elements count as not kept."""
        return not self.kept or (self.flat is not None and not self.flat.numel and not self.joint)


class NumberedGroups(NamedTuple):
    """The groups of a saved optimizer that numbers its parameters, as the `state_dict` of torch does.

    They are the saved options of each group, and the saved number of each parameter here, by its name.  A
    number is a position in the groups of the optimizer that loads it.
    """

    place: Place
    options: Sequence[dict[str, Any]] = ()
    numbers: dict[str, int] = {}  # noqa: RUF012  # of a named tuple, and never changed


class Slots(Struct, frozen=True):
    """An optimizer, or its raw state dict, as its parameters.

    `deliver` runs when `state` and `groups` are filled, if the optimizer keeps them in another form.  `more`
    are the other entries of its own `state_dict`, None without a protocol of its own; `load` then lets it
    load all this in its own way.  `elsewhere` are names and places of the parameters that have their states
    on other ranks, and no master weights.  `kind` is that of the optimizer, which groups without parameters
    record too.  `find_groups` requests groups that another program saved without the names of parameters.
    `packages` are those of its class.  `layout` is set if its own `state_dict` has no states of
    single parameters: then `more` is all of it, for parameters in this order and layout alone.
    """

    state: MutableMapping[Any, Any]
    groups: list[dict[str, Any]]
    each: tuple[ParamSlot, ...]
    deliver: Callable[[], None] | None = None
    more: Mapping[Any, Any] | None = None
    load: Callable[[Mapping[Any, Any]], None] | None = None
    elsewhere: Sequence[tuple[str, tuple[Place, ...]]] = ()
    kind: tuple[str, ...] = ()
    packages: frozenset[str] = frozenset()
    layout: Layout | None = None
    find_groups: Callable[[Place, Loading], NumberedGroups | None] | None = None

    def state_of(self, slot: ParamSlot) -> Mapping[Any, Any]:
        """Return the states of a parameter by name; empty if it has none.  Adds no entry."""
        states: Mapping[Any, Any] = self.state.get(slot.key, {})
        return states

    def put(self, slot: ParamSlot, states: dict[Any, Any]) -> None:
        """Make `states` all the states of a parameter."""
        if states:
            self.state[slot.key] = states
        else:
            self.state.pop(slot.key, None)

    def shared(self) -> dict[Any, Any]:
        """Return the states of the optimizer that belong to no parameter, by their keys.

        States of a parameter that the optimizer has dropped are not among them.
        """
        taken = {slot.key for slot in self.each if not isinstance(slot.key, torch.Tensor)}
        others = ((key, value) for key, value in self.state.items() if not isinstance(key, torch.Tensor))
        return {key: value for key, value in others if key not in taken}


def is_optimizer(value: Any) -> bool:
    """Return whether this is an optimizer of torch, or its own raw state dict."""
    return isinstance(value, torch.optim.Optimizer) or _is_state_dict(value)


def _is_state_dict(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"state", "param_groups"}:
        return False
    groups = value["param_groups"]
    return (
        isinstance(value["state"], dict)
        and isinstance(groups, list)
        and bool(groups)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
    )


def read(value: Any, place: Place, walk: Walk) -> Slots:
    """Return the parameters of an optimizer of torch, or those in its raw state dict.

    Raises `StateError` for a parameter without a name.
    """
    if isinstance(value, dict):
        groups = value["param_groups"]
        return Slots(value["state"], groups, tuple(_raw_slots(groups, place, walk)))
    if isinstance(value, imported("torch.distributed.optim", "ZeroRedundancyOptimizer")):
        return _read_share(value, place, walk)
    optimizer = optimizer_protocol.unwrapped(value)
    kind, packages = optimizer_protocol.kind(optimizer), packed_values.packages(optimizer)
    own = own_state.read(optimizer, place)
    if own is None:
        each = tuple(_slots(optimizer, optimizer.param_groups, kind, place, walk))
        return Slots(optimizer.state, optimizer.param_groups, each, kind=kind, packages=packages)
    if own.whole:
        layout = whole_state.layout(optimizer, kind, walk)
        return Slots({}, [], (), more=own.more, load=own.load, kind=kind, packages=packages, layout=layout)
    each = tuple(_slots(optimizer, own.groups, kind, place, walk))
    return Slots(own.states, own.groups, each, more=own.more, load=own.load, kind=kind, packages=packages)


def _read_share(optimizer: Any, place: Place, walk: Walk) -> Slots:
    """Return the parameters of a ZeroRedundancyOptimizer; each rank keeps the states of some.  Sends nothing.

    Raises `StateError` if DistributedDataParallel steps the optimizer in the backward pass: it has no states
    of its own before the first steps.  Raises it for hooks, too: its `state_dict` gathers.
    """
    if torch_private.steps_in_backward(optimizer):
        raise StateError(
            f"{place} is a ZeroRedundancyOptimizer with overlap_with_ddp=True, whose states are not its own",
            remedy="leave overlap_with_ddp out",
        )
    for one in (optimizer, optimizer.optim):
        optimizer_protocol.require_none(one, place)
    import torch.distributed as dist

    rank = dist.get_rank(optimizer.process_group)
    owners = torch_private.zero_owners(optimizer)
    mine = {id(parameter) for parameter, owner in owners.items() if owner == rank}
    replicas = walk.world.only_here(dist.get_process_group_ranks(optimizer.process_group))
    kind = optimizer_protocol.kind(optimizer.optim)
    slots = _slots(optimizer, optimizer.param_groups, kind, place, walk)
    share = [msgspec.structs.replace(one, replicas=replicas, kept=id(one.parameter) in mine) for one in slots]
    return Slots(optimizer.optim.state, optimizer.param_groups, tuple(share), kind=kind)


def named(parameter: Any, own: Mapping[int, str], walk: Walk) -> tuple[str, tuple[Place, ...]]:
    """Return a parameter's name and places in the modules of the state.

    A parameter of no module there has the name of its id in `own`, and no place.
    """
    if known := parameters(walk).get(id(parameter)):
        return known[0].name, known[0].places
    return without_wrappers(own[id(parameter)]), ()


def require_distinct(slots: Slots, place: Place) -> Slots:
    """Return the parameters of an optimizer.  Raises `StateError` if two of them have one name."""
    names: set[str] = set()
    for slot in slots.each:
        if slot.name in names:
            raise StateError(
                f"two parameters of the optimizer {place} are called {slot.name}",
                remedy="put the modules that they belong to under one module, for example an nn.ModuleDict, "
                "and an engine or a model beside its optimizer into the state",
            )
        names.add(slot.name)
    return slots


def _slots(
    optimizer: Any, groups: list[dict[str, Any]], kind: tuple[str, ...], place: Place, walk: Walk
) -> Iterator[ParamSlot]:
    """Yield the parameters of an optimizer; `groups` are its groups, or those in its own `state_dict`."""
    named = parameters(walk)
    if optimizer.state and not any(group["params"] for group in groups):
        raise StateError(
            f"the optimizer {place} has no parameters: its owner has taken them out of its groups",
            remedy="put the owner into the state instead, for example engine.optimizer of DeepSpeed",
        )
    for group, members in zip(groups, (group["params"] for group in optimizer.param_groups), strict=True):
        own_names = group.get("param_names")
        if own_names is not None and len(own_names) != len(members):
            raise StateError(
                f"a group of the optimizer {place} has {len(own_names)} names for {len(members)} "
                "parameters: its owner has put others into it",
                remedy="put the owner into the state instead, for example engine.optimizer of DeepSpeed",
            )
        for index, parameter in enumerate(members):
            known = named.get(id(parameter))
            if known is not None:
                for one in known:
                    yield _slot(one, group, kind)
            elif own_names is not None and not torch_private.is_flattened(parameter):
                name = without_wrappers(own_names[index])
                yield ParamSlot(name, parameter, parameter, group, walk.world.alone, places=(), kind=kind)
            else:
                raise StateError(
                    f"parameter {index} of shape {list(parameter.shape)} of the optimizer {place} belongs "
                    "to no module in the state, so its name is unknown",
                    remedy="put the model into the state too, or make the optimizer from named_parameters()"
                    + _alone(place, walk),
                )


def _alone(place: Place, walk: Walk) -> str:
    """Return words about a load of an optimizer from a checkpoint without its model."""
    only = [f"{place.item}/*"]
    if not walk.fills:
        return ""
    return f"; reknit.load(..., options=reknit.LoadOptions(only={only})) then loads the optimizer alone"


def _slot(named: NamedParameter, group: dict[str, Any], kind: tuple[str, ...]) -> ParamSlot:
    parameter = named.parameter
    replicas, at = named.replicas, named.places
    if named.flat is None:
        return ParamSlot(named.name, parameter, parameter, group, replicas, places=at, kind=kind)
    joint = named.flat.original is None
    part = named.flat.part if joint else named.flat.part.alone
    return ParamSlot(
        named.name,
        parameter,
        parameter,
        group,
        replicas,
        places=at,
        flat=part,
        counter=named.flat.counter,
        joint=joint,
        kind=kind,
    )


def _raw_slots(groups: list[dict[str, Any]], place: Place, walk: Walk) -> Iterator[ParamSlot]:
    for group in groups:
        keys = group["params"]
        names = group.get("param_names")
        if names is None and all(isinstance(key, str) for key in keys):
            names = keys
        if names is None or len(names) != len(keys):
            raise StateError(
                f"{place} is an optimizer's state dict, which numbers its parameters and does not name them",
                remedy="put the optimizer itself into the state",
            )
        for name, key in zip(names, keys, strict=True):
            yield ParamSlot(without_wrappers(name), key, None, group, walk.world.alone, places=())
