"""The entries saved beside the states: options, of empty groups too, and the kind of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, field

from reknit.frameworks.neutral import to_neutral
from reknit.frameworks.optimizer import optimizer_protocol
from reknit.frameworks.optimizer.slots import NumberedGroups
from reknit.frameworks.same_value import same_value
from reknit.frameworks.torch import tensor_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reknit.frameworks.optimizer.slots import ParamSlot, Slots
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Place

KIND = "~optimizer"
"""Entry among the options: the kind of the optimizer.  An option cannot have this name."""

PLAIN = "~plain"
"""Entry among the options: the paths of states that are plain tensors, of parameters that are DTensors."""

EMPTY = "empty_groups"
"""Part of the places for the options of groups without a parameter on this rank, by their numbers."""

_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options for the way to compute, not for the result: they depend on the job's devices and layout."""

_NOT_OPTIONS = _HOW | {"params", "param_names", KIND, PLAIN}


def collect(slots: Slots, plain: Iterable[str], place: Place, saving: Saving) -> None:
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
    elif optimizer_protocol.differs(found.value.get(KIND), slots.kind):
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
    for slot in members:
        at = place.child("param_groups", slot.name)
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
        if optimizer_protocol.differs(kind, slot.kind):
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
