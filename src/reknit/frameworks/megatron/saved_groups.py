"""The options of an optimizer as Megatron saves them: by group, without the parameters of the group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reknit.errors import StateError
from reknit.frameworks.megatron import megatron_private
from reknit.frameworks.numbers import whole
from reknit.frameworks.optimizer.slots import NumberedGroups
from reknit.frameworks.same_value import same_value
from reknit.frameworks.torch import tensor_numbers
from reknit.types.foreign.megatron_names import GROUPS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.walk import Place

STEP = "step"
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""The options that identify a group for Megatron; NeMo calls some of them ``pre_wd_mult``."""


def find(groups: Sequence[Mapping[str, Any]], place: Place, loading: Loading) -> NumberedGroups | None:
    """Request the groups of a folder of Megatron, and pair them with these; None for another checkpoint.

    Groups that do not fit are a mismatch.
    """
    at = place.child(GROUPS)
    saved = loading.saved.look_up(at).value
    if not isinstance(saved, list):
        return None
    if loading.value(at).why is not None:
        return NumberedGroups(at)
    return NumberedGroups(at, paired(groups, saved, at, loading))


def paired(
    groups: Sequence[Mapping[str, Any]], saved: Any, at: Place, loading: Loading
) -> tuple[dict[str, Any], ...]:
    """Return the saved options of each group; none, and a mismatch, if some group has none of its own."""
    known: dict[Any, dict[str, Any]] = {}
    for one in saved if isinstance(saved, list) else [saved]:
        if not isinstance(one, Mapping) or (identity := _identity(one)) is None:
            loading.report_mismatched(at, "a saved group lacks the options by which Megatron identifies it")
            return ()
        options = {key: value for key, value in one.items() if key != "params"}
        if not same_value(known.setdefault(identity, options), options):
            loading.report_mismatched(
                at, f"two saved groups have {_shown(identity)}, and other options differ"
            )
            return ()
    found: list[dict[str, Any]] = []
    for group in groups:
        wanted = _identity(group)
        if wanted not in known:
            loading.report_mismatched(
                at, f"no saved group has {_shown(wanted)}: make the optimizer with the options of that job"
            )
            return ()
        found.append(dict(known[wanted]))
    return tuple(found)


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...] | None:
    found = tuple(group.get(key, group.get(f"pre_{key}")) for key in _IDENTITY)
    return None if None in found else found


def _shown(identity: tuple[Any, ...] | None) -> str:
    return (
        ", ".join(f"{key}={value}" for key, value in zip(_IDENTITY, identity or (), strict=False)) or "them"
    )


def put_step(
    step: Any, group: dict[str, Any], inner: Any, mains: Iterable[torch.Tensor], place: Place
) -> None:
    """Give a group the saved number of steps, or the states of its parameters if these count."""
    if step is None:
        return
    if megatron_private.counts_in_group(inner):
        group[STEP] = counted(group.get(STEP), step, place)
        return
    for main in mains:
        if states := inner.state.get(main):
            states[STEP] = tensor_numbers.counter(step, place)


def counted(present: Any, step: Any, place: Place) -> Any:
    """Return the counter of a group for a number of steps: the present one if it is a tensor."""
    count = whole(step)
    made, why = tensor_numbers.fitted(present, step if count is None else count, cast=False)
    if why is not None:
        raise StateError(f"{place} counts its steps in a tensor, and {why}", remedy="count in float64")
    return tensor_numbers.put(present, made)
