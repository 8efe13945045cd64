"""The groups of a saved optimizer that numbers its parameters, as the `state_dict` of torch does.

A number is a position in the groups of the optimizer that loads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.frameworks.optimizer.slots import ParamSlot, Slots
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.walk import Place


class NumberedGroups(NamedTuple):
    """The saved options of each group, and the saved number of each parameter here, by its name."""

    place: Place
    options: Sequence[dict[str, Any]] = ()
    numbers: dict[str, int] = {}  # noqa: RUF012  # of a named tuple, and never changed


def find(slots: Slots, place: Place, loading: Loading) -> NumberedGroups | None:
    """Request the saved groups, and pair their numbers with the parameters; None for parameters with names.

    Groups that do not fit those of the optimizer are a mismatch.
    """
    at = place.child("param_groups")
    saved = loading.saved.look_up(at).value
    if not _is_numbered(saved):
        return None
    found = loading.value(at)
    members = [[slot for slot in slots.each if slot.group is group] for group in slots.groups]
    if (why := _misfit(saved, slots.groups, members)) is not None:
        loading.report_mismatched(at, why)
        loading.pass_over(place.child("state"))
        return NumberedGroups(at)
    pairs = zip(saved, members, strict=True)
    numbers = {
        slot.name: number for group, each in pairs for number, slot in zip(group["params"], each, strict=True)
    }
    return NumberedGroups(at, () if found.why is not None else saved, numbers)


def _is_numbered(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(type(number) is int for number in group["params"])
        for group in groups
    )


def _misfit(
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
