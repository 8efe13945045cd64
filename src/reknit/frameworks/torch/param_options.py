"""The entries saved beside the states: options, of empty groups too, and the kind of the optimizer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, field, structs

from reknit.errors import StateError
from reknit.frameworks.neutral import to_neutral
from reknit.frameworks.numbers import same_value
from reknit.frameworks.torch import dtensor, flat_part, own_state, subclasses, torch_private
from reknit.frameworks.torch import dtensor as inner_cuts
from reknit.frameworks.torch import numbers as tensor_numbers
from reknit.frameworks.torch.slots import NumberedGroups, element
from reknit.frameworks.torch.tensor import dtype_name, local_memory, plain_dtype, torch_dtype
from reknit.frameworks.walk.composites import misfit
from reknit.frameworks.walk.walk import View
from reknit.types.box import Box
from reknit.types.shard import Shard, Strided, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reknit.frameworks.torch.slots import ParamSlot, Slots
    from reknit.frameworks.walk.composites import Record
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Composite, Place, Replicas, Walk


_MODULES = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
"""Classes of states that are made for an optimizer without states; no other class is called for that."""


def opened(state: Any, slot: ParamSlot | None, place: Place, walk: Walk) -> Composite | None:
    """Return the view of a composite state; None for a state that has memory of its own."""
    made = walk.opened(state, place)
    if made is None or slot is None:
        return made
    cut = dtensor.is_dtensor(slot.parameter) or flat_part.is_declared(slot.parameter)
    if slot.flat is not None or (cut and not dtensor.is_dtensor(state)):
        raise StateError(
            f"{place} is a {made.record['class']}, and its parameter is cut between ranks: its part of "
            "the whole cannot be determined",
            remedy="shard the model with torch.distributed.fsdp.fully_shard (FSDP2), and let the state be a "
            "DTensor, as DTensor.from_local makes one",
        )
    if dtensor.is_dtensor(state):
        return made
    views = ((name, one, structs.replace(view, replicas=slot.replicas)) for name, one, view in made.inner)
    return structs.replace(made, inner=tuple(views))


def memory_for(
    record: Record, current: Any, slot: ParamSlot | None, at: Place, loading: Loading
) -> tuple[Any, str | None]:
    """Return the tensor for a saved state: the present one if it fits, or a new one; or why neither does.

    Nothing that exists changes.
    """
    if isinstance(current, torch.Tensor):
        made = opened(current, slot, at, loading)
        if made is not None and misfit(made, record, at, loading.saved) is None:
            return current, None
    name, parameter = record["class"].rpartition(".")[2], slot.parameter if slot else None
    module = sys.modules.get(_MODULES.get(name, ""))
    if slot is None or parameter is None or slot.flat is not None or flat_part.is_declared(parameter):
        return None, f"a {record['class']} was saved, and the state here is not one"
    if module is None or record["class"] != f"{module.__name__}.{name}":
        return None, (
            f"a {record['class']} was saved, and the optimizer has no such state with these options here: "
            "let it take a step before the load, so that it makes its states"
        )
    if record["shape"] != list(parameter.shape):
        return None, f"its shape is {record['shape']} in the checkpoint and {list(parameter.shape)} here"
    try:
        return _made(getattr(module, name), record, parameter, at, loading), None
    except StateError as error:
        return None, f"{error.message}; {error.remedy}"


def _made(kind: Any, record: Record, parameter: Any, at: Place, loading: Loading) -> Any:
    """Return a new state of a class of torchao.  Raises `StateError` if this rank cuts through a block."""
    cut, local = None, parameter
    if dtensor.is_dtensor(parameter):
        local = torch_private.local_of(parameter)
        cut = inner_cuts.inner_cut(parameter, local, at, loading.world)
    with torch.no_grad():
        if cut is not None and not cut.box.numel:
            return torch.empty_like(parameter, requires_grad=False)
        inner = {}
        for name in record["inner"]:
            spec = loading.saved.spec(at.child(name))
            if spec is None:
                raise StateError(f"the checkpoint has no {name} of it", remedy="the checkpoint is not whole")
            shape = spec.shape
            if cut is not None and cut.dims and name != "qmap":
                shape = _part(shape, kind, cut, at)
            dtype = torch_dtype(spec.dtype)
            inner[name] = torch.empty(shape, dtype=dtype, device=local.device)
        made = kind.__tensor_unflatten__(inner, _context(record, local, at), local.shape, local.stride())
        return made if cut is None else subclasses.wrapped_as(parameter, made)


def _part(shape: tuple[int, ...], kind: Any, cut: inner_cuts.Cut, at: Place) -> tuple[int, ...]:
    """Return the shape of an inner tensor on this rank, as part of the saved one."""
    if shape == cut.shape:
        return cut.box.lengths
    total, numel = prod(cut.shape), prod(cut.box.lengths)
    row, inner = prod(cut.shape[1:]), prod(shape)
    block = total // inner if inner and total % inner == 0 else 0
    if not block or len(shape) != 1 or cut.dims != [0]:
        raise inner_cuts.misaligned(at, kind.__name__, total, inner, cut)
    if (cut.box.offsets[0] * row) % block or numel % block:
        raise inner_cuts.misaligned(at, kind.__name__, total, inner, cut)
    return (numel // block,)


def _context(record: Record, local: Any, at: Place) -> list[Any]:
    """Return the saved context of a class of torchao, which consists of plain values."""
    context = record.get("context")
    if not isinstance(context, list):
        raise StateError(f"the record of {at} is not one of torchao", remedy="the checkpoint is not whole")
    return [_live(value, local) for value in context]


def _live(value: Any, local: Any) -> Any:
    if value == "~shape":
        return tuple(local.shape)
    return torch_dtype(value.removeprefix("torch.")) if isinstance(value, str) else value


_NUMBER = Box((), ())


class JointValue(Struct):
    """A saved value of parameters that share one flat tensor.

    Its `tensors` are as long as the flat one, but each parameter has `counters` of its own, to be compared.
    """

    saved: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    counters: dict[Any, list[tuple[Place, torch.Tensor]]] = field(default_factory=dict)


def require_equal(counters: Mapping[Any, list[tuple[Place, torch.Tensor]]]) -> None:
    """Raise `StateError` for different counters of parameters that share one counter here."""
    for (first, counter), *others in counters.values():
        for at, other in others:
            if not torch.equal(other, counter):
                raise StateError(
                    f"{at} is {other.item()} in the checkpoint and {first} is {counter.item()}, and here "
                    "the two parameters have one counter together",
                    remedy="wrap the model with use_orig_params=True",
                )


def view_states(state: torch.Tensor, slot: ParamSlot, place: Place, walk: Walk) -> View:
    """Return the view of a counter, or of a state of which this rank holds consecutive elements.

    A state that is neither as long as the held part nor a single number is a tensor of this rank alone.
    """
    flat = slot.flat
    assert flat is not None
    memory, settle = local_memory(state, place, fill=walk.fills)
    dtype, identity = dtype_name(memory, place), _identity(state, slot)
    if not memory.ndim:
        parts = ((_NUMBER, memory),)
        return View(TensorSpec((), dtype), parts, _counts(slot, place, walk), identity, settle)
    if not flat.fits(memory):  # a state of another form, for this part of the parameter alone
        shape = tuple(memory.shape)
        parts = ((Box.whole(shape), memory),)
        return View(TensorSpec(shape, dtype), parts, walk.world.alone, identity, settle)
    return View(TensorSpec(flat.shape, dtype), flat.unseen(memory), slot.replicas, identity, settle)


def collect_states(
    slot: ParamSlot, states: Mapping[Any, Any], below: Place, saving: Saving
) -> dict[Any, Any]:
    """Collect the states of a parameter that are plain tensors, and return the others.

    The result is that of `view`, without a view: a rank has many states, and nearly all are of this kind.
    """
    flat = slot.flat
    assert flat is not None
    others: dict[Any, Any] = {}
    item, add = below.item, saving.shards.append
    shape, form, pieces, replicas = flat.shape, (flat.total,), flat.pieces, slot.replicas
    for name, state in states.items():
        dtype = plain_dtype(state)
        is_flat = dtype is not None and state.shape == form and state.is_contiguous()
        if dtype is None or not (is_flat or state.ndim == 0):
            others[name] = state
            continue
        place = below.below(element(name, below))
        if not saving.claim(_identity(state, slot), place, state):
            continue
        fqn = place.fqn
        if is_flat:
            spec = TensorSpec(shape, dtype)
            for box, strides, first in pieces:
                add(Shard(item, fqn, spec, box, replicas, memory=Strided(state, box.lengths, strides, first)))
        else:
            add(Shard(item, fqn, TensorSpec((), dtype), _NUMBER, _counts(slot, place, saving), memory=state))
    return others


def _identity(state: torch.Tensor, slot: ParamSlot) -> tuple[str, int, str]:
    """Return a key for the memory of a state: parameters that share one state each have a part of it."""
    return "flat", id(state), slot.name


def _counts(slot: ParamSlot, place: Place, walk: Walk) -> Replicas:
    """Return the ranks that have a state that is a single number."""
    return slot.counter if place.fqn.endswith("/step") else walk.world.alone


KIND = "~optimizer"
"""Entry among the options: the kind of the optimizer.  An option cannot have this name."""

PLAIN = "~plain"
"""Entry among the options: the paths of states that are plain tensors, of parameters that are DTensors."""

EMPTY = "empty_groups"
"""Part of the places for the options of groups without a parameter on this rank, by their numbers."""

_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options for the way to compute, not for the result: they depend on the job's devices and layout."""

_NOT_OPTIONS = _HOW | {"params", "param_names", KIND, PLAIN}


def collect_options(slots: Slots, plain: Iterable[str], place: Place, saving: Saving) -> None:
    """Collect the options of all parameters: those of a group are one object."""
    groups = place.child("param_groups")
    options: dict[int, Any] = {}
    listed = sorted(plain)
    for slot in slots.each:
        at = groups.child(slot.name)
        if id(slot.group) not in options:
            options[id(slot.group)] = of_group(slot.group, slot.kind, listed, at)
        saving.blob(options[id(slot.group)], at)
    for number, group in enumerate(slots.groups):
        if id(group) not in options:
            at = place.child(EMPTY, number)
            saving.blob(of_group(group, slots.kind, (), at), at)


def of_group(group: Mapping[str, Any], kind: Sequence[str], plain: Sequence[str], at: Place) -> Any:
    """Return the saved value of a group for each of its parameters; `at` is a place for errors."""
    beside = {KIND: list(kind)} if kind else {}
    if plain:
        beside[PLAIN] = list(plain)
    return to_neutral({**_options(group), **beside}, str(at))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that have a meaning in other layouts."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def find_numbered(slots: Slots, place: Place, loading: Loading) -> NumberedGroups | None:
    """Request the saved groups, and pair their numbers with the parameters; None for parameters with names.

    Groups that do not fit those of the optimizer are a mismatch.
    """
    if slots.find_groups is not None and (found := slots.find_groups(place, loading)) is not None:
        return found
    at = place.child("param_groups")
    saved = loading.saved.look_up(at).value
    if not _is_numbered(saved):
        return None
    value = loading.value(at)
    members = [[slot for slot in slots.each if slot.group is group] for group in slots.groups]
    if (why := _unpaired(saved, slots.groups, members)) is not None:
        loading.report_mismatched(at, why)
        loading.pass_over(place.child("state"))
        return NumberedGroups(at)
    pairs = zip(saved, members, strict=True)
    numbers = {
        slot.name: number for group, each in pairs for number, slot in zip(group["params"], each, strict=True)
    }
    return NumberedGroups(at, () if value.why is not None else saved, numbers)


def _is_numbered(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(type(number) is int for number in group["params"])
        for group in groups
    )


def _unpaired(
    saved: list[dict[str, Any]], groups: list[dict[str, Any]], members: list[list[ParamSlot]]
) -> str | None:
    """Return why numbers cannot be paired with the parameters of the groups, or None."""
    sizes = [[len(group["params"]) for group in each] for each in (saved, groups)]
    if sizes[0] != sizes[1]:
        return (
            f"the saved optimizer numbers its parameters, in groups of {sizes[0]}, and here the groups have "
            f"{sizes[1]}: make the same groups before the load, or leave the optimizer out"
        )
    for group, slots in zip(groups, members, strict=True):
        if [id(parameter) for parameter in group["params"]] != [id(slot.parameter) for slot in slots]:
            return (
                "the saved optimizer numbers its parameters, and here they are flat or divided: load it into "
                "a plain optimizer, and save that with reknit"
            )
    return None


class OptionNotes(Struct, frozen=True):
    """Facts about states in saved options: `foreign` are reasons by the names of parameters.

    The states of such a parameter are for another optimizer.  `plain` are the paths of states that were plain
    tensors, of parameters that were DTensors.
    """

    foreign: dict[str, str] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)


def want(slots: Slots, place: Place, loading: Loading, numbered: NumberedGroups | None = None) -> OptionNotes:
    """Request the options of all parameters, and return the other facts in them.

    Those of `numbered` groups are given, and belong to the groups here in the same order.
    """
    if numbered is not None:
        for group, options in zip(slots.groups, numbered.options, strict=bool(numbered.options)):
            take(group, _options(options), slots.groups, numbered.place, loading)
        return OptionNotes()
    members: dict[int, list[ParamSlot]] = {}
    for slot in slots.each:
        members.setdefault(id(slot.group), []).append(slot)
    noted = OptionNotes()
    for number, group in enumerate(slots.groups):
        if known := members.get(id(group)):
            _want_group(group, known, slots, place, loading, noted=noted)
        else:
            _want_empty(group, place.child(EMPTY, number), slots, loading)
    return noted


def leave_out_empty(numbers: Iterable[Any], slots: Slots, place: Place, loading: Loading) -> None:
    """Leave out the options of saved groups without parameters that are not such groups here."""
    filled = {id(slot.group) for slot in slots.each}
    for number in numbers:
        at, here = place.child(EMPTY, number), range(len(slots.groups))
        if number in here and id(slots.groups[int(number)]) in filled:
            loading.pass_over(at)  # its parameters have options of their own
        elif number not in here:
            loading.leave_out(at, "options of a group without parameters, and there is no such group here")


def _want_empty(group: dict[str, Any], at: Place, slots: Slots, loading: Loading) -> None:
    """Request the options of a group without parameters on this rank, from the group with its number."""
    if not loading.takes(at):
        return
    if loading.saved.look_up(at).why is not None:
        loading.note(at, "a group without parameters, of which no options were saved: its own stay")
        return
    found = loading.value(at)
    if not isinstance(found.value, Mapping):
        loading.report_mismatched(at, "the options of a group are not a mapping")
    elif own_state.differs(found.value.get(KIND), slots.kind):
        loading.report_mismatched(at, _foreign(found.value[KIND], slots.kind, at))
    else:
        take(group, _options(found.value), slots.groups, at, loading)


def _want_group(
    group: dict[str, Any],
    members: list[ParamSlot],
    slots: Slots,
    place: Place,
    loading: Loading,
    *,
    noted: OptionNotes,
) -> None:
    """Request the options of all parameters of a group, which must agree, and set them in the group."""
    known: list[tuple[Place, dict[str, Any]]] = []
    groups = place.child("param_groups")
    for slot in members:
        at = groups.child(slot.name)
        if known and slot.kind is members[0].kind and loading.again(at, known[-1][0]):
            continue
        found = loading.value(at)
        if slot is members[0] and not loading.takes(at):
            _note_plain(loading.saved.look_up(at).value, noted)
        if found.why is not None:
            continue
        if not isinstance(found.value, Mapping):
            loading.report_mismatched(at, "the options of a parameter are not a mapping")
            continue
        _note_plain(found.value, noted)
        kind: Any = found.value.get(KIND)
        if own_state.differs(kind, slot.kind):
            why = _foreign(kind, slot.kind, place)
            loading.report_mismatched(at, why)
            noted.foreign[slot.name] = why
        else:
            known.append((at, _options(found.value)))
    if not known:
        return
    first, options = known[0]
    for at, others in known[1:]:
        for key in options.keys() | others.keys():
            if not same_value(options.get(key), others.get(key)):
                loading.report_mismatched(
                    at,
                    f"its {key} is {others.get(key)!r} and that of {first} {options.get(key)!r}, "
                    "but the target has both in one group",
                )
                return
    take(group, options, slots.groups, first, loading)


def _foreign(saved: Sequence[str], here: Sequence[str], place: Place) -> str:
    return (
        f"{saved[0]} saved it, and here {here[0]} steps it: leave the optimizer out of the "
        f"state, or let it begin anew: reknit.load(..., strict=[{f'!{place.item}/*'!r}])"
    )


def take(
    group: dict[str, Any],
    options: Mapping[str, Any],
    groups: list[dict[str, Any]],
    at: Place,
    loading: Loading,
) -> None:
    """Set saved options in one of the `groups` after the load, or report the first that does not fit."""
    made, cast = {}, loading.catalog.terms.cast
    for key, value in options.items():
        made[key], misfit = tensor_numbers.fitted(group.get(key), value, cast=cast)
        if misfit is not None:
            loading.report_mismatched(at, f"its {key}: {misfit}")
            return
    loading.later(lambda: _set(group, made, groups))


def _note_plain(options: Any, noted: OptionNotes) -> None:
    paths = options.get(PLAIN) if isinstance(options, Mapping) else None
    if isinstance(paths, list):
        noted.plain.update(path for path in paths if isinstance(path, str))


def _set(group: dict[str, Any], options: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    for key, value in options.items():
        present = group.get(key)
        # torch gives the same default, a learning rate that is a tensor, to all groups without their own.
        shared = any(other is not group and other.get(key) is present for other in groups)
        if shared and isinstance(present, torch.Tensor):
            present = present.detach().clone()
        group[key] = tensor_numbers.put(present, value)
