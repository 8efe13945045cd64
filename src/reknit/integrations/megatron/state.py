"""Megatron's optimizers, read in place by the names of whole parameters, without a message."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from reknit.errors import StateError
from reknit.frameworks.torch import numbers
from reknit.integrations.megatron import flat_states, private
from reknit.integrations.megatron import flat_states as main_parameters
from reknit.integrations.megatron import flat_states as saved_groups
from reknit.integrations.megatron.model import (
    FlatLeavesAdapter,
    LocalAdapter,
    ModelAdapter,
    ObjectAdapter,
    RngAdapter,
    ShardedTensorAdapter,
    groups,
    tensors,
)
from reknit.plugins.framework import OptimizerAdapter, ParamSlot, Slots, inner_kind

if TYPE_CHECKING:
    from reknit.integrations.megatron.flat_states import Working
    from reknit.integrations.megatron.model import HeldPart
    from reknit.plugins.framework import Adapter, Assign, FlatPart, Loading, Place, Replicas, Walk


_GRAD_SCALER = "grad_scaler"
_STEP = "step"
_LOCAL = frozenset({"params", _STEP, "is_expert_parallel"})
"""Entries of a parameter group that are not options: the step is a state, and the experts are the layout."""


def read(value: Any, place: Place, walk: Walk) -> Slots:
    """Return the parameters of an optimizer of Megatron, or of a chain of them, by name.

    Raises `StateError` for a parameter whose name cannot be determined.
    """
    reading = _OptimizerReader(place, walk)
    for optimizer in private.chained(value, place):
        reading.add(optimizer)
    groups = [options for _, options in reading.groups.values()]
    whole_groups = [group for group, _ in reading.groups.values()]
    return Slots(
        reading.state,
        groups,
        tuple(reading.slots),
        reading.deliver,
        elsewhere=reading.elsewhere() if walk.fills else (),
        kind=reading.kind,
        find_groups=partial(saved_groups.find_group, whole_groups),
    )


@dataclass
class _OptimizerReader:
    """An optimizer, while it is read, and the way back into it.

    `groups` are its groups by their ids, each with a copy of its options, which may be changed, and `inners`
    the optimizers of torch that have them.  `rows` are
    the flat states by their ids, each with the state that has its memory.
    """

    place: Place
    walk: Walk
    state: dict[Any, Any] = field(default_factory=dict)
    slots: list[ParamSlot] = field(default_factory=list)
    works: list[tuple[Working, str]] = field(default_factory=list)
    groups: dict[int, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)
    inners: dict[int, Any] = field(default_factory=dict)
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    scalers: list[Any] = field(default_factory=list)
    several: bool = False
    kind: tuple[str, ...] = ()

    def add(self, optimizer: Any) -> None:
        """Read one optimizer of a chain."""
        self.several = private.is_instance_of_several(optimizer)
        if (scaler := private.scaler(optimizer)) is not None:
            self.scalers.append(scaler)
            self.state.setdefault(_GRAD_SCALER, scaler.state_dict())
        inner = None
        for work in main_parameters.working(optimizer, self.place):
            if work.inner is not inner:
                inner = work.inner
                self.kind = inner_kind(inner, self.place)
                for group in inner.param_groups:
                    self._options(group)
                    self.inners[id(group)] = inner
            self._add(work)

    def _add(self, work: Working) -> None:
        known = tensors(self.walk).get(id(work.parameter))
        if known is None:
            raise StateError(
                f"{self.place} has a parameter of shape {list(work.parameter.shape)} that belongs to no "
                "Megatron model in the state, so its name is unknown",
                remedy="put all chunks of the model into the state too",
            )
        mine = [(one, flat) for one in known.parts if (flat := _cut(one, work)) is not None]
        joint = len(known.parts) > 1
        # The saved copy of a counter is that beside the first element.
        counts = joint or self.walk.fills or work.start == 0
        if states := self._states(work, counts=counts):
            self.state[work.main] = states
        self.works.append((work, mine[0][0].name if mine else ""))
        self.slots += [self._slot(work, one, flat, known.home, joint=joint) for one, flat in mine]

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the options of a group, which may be changed: one for each group."""
        options = {key: value for key, value in group.items() if key not in _LOCAL}
        return self.groups.setdefault(id(group), (group, options))[1]

    def _states(self, work: Working, *, counts: bool) -> dict[Any, Any]:
        """Return the present states of a parameter, and the step that its group counts among them."""
        present = work.inner.state.get(work.main) or {}
        states = {name: self._flat(state, work.parameter) for name, state in present.items()}
        if states and _STEP not in states and _STEP in work.group:
            # A load makes the counter in the saved dtype, not in that of the group.
            step = work.group[_STEP]
            fills = self.walk.fills
            states[_STEP] = numbers.number_in(step) if fills else numbers.counter(step, self.place)
        if not counts:
            states.pop(_STEP, None)
        return states

    def _flat(self, state: Any, parameter: Any) -> Any:
        """Return a state as a row of elements, in the order of memory."""
        if not isinstance(state, torch.Tensor) or state.ndim < 1:
            return state
        row = _row(state, parameter, self.place)
        self.rows[id(row)] = (row, state)  # the row is kept, so that no other tensor gets its id
        return row

    def _slot(self, work: Working, one: HeldPart, flat: FlatPart, home: Place, *, joint: bool) -> ParamSlot:
        replicas, counter = self._replicas(work, one)
        main = _row(work.main, work.parameter, self.place)
        group = self._options(work.group)
        return ParamSlot(
            one.name,
            work.main,
            main,
            group,
            replicas,
            places=(home.child(one.name),),
            flat=flat,
            counter=None if joint else counter,
            joint=joint,
            kept=one.first or self.walk.fills,
            master=main if work.exact else None,
            resizable=one.resizable,
            kind=self.kind,
            whole_steps=_counts_in_integers(work),
        )

    def _replicas(self, work: Working, one: HeldPart) -> tuple[Replicas, Replicas]:
        """Return the ranks with the same part of the states, and those with the same counter."""
        ours, world = groups(self.walk), self.walk.world
        who, expert = ours.copies, one.expert
        if work.distributed:
            if self.several:
                return world.alone, world.alone
            who, expert = ours.peers, private.is_synced_with_experts(work.parameter)
        part, counter = (who(expert=expert, whole=whole) for whole in (one.whole, True))
        return world.numbers(part), world.numbers(counter)

    def elsewhere(self) -> list[tuple[str, tuple[Place, ...]]]:
        """Return names and places of parameters in full precision with states on other ranks."""
        taken = {slot.name for slot in self.slots}
        return [
            (one.name, (known.home.child(one.name),))
            for known in tensors(self.walk).values()
            for one in known.parts
            if known.local.dtype == torch.float32 and one.name not in taken
        ]

    def deliver(self) -> None:
        """Put the loaded states and options into the optimizers."""
        steps = self._steps()
        for work, _ in self.works:
            self._put(work, self.state.get(work.main, {}))
        for key, (group, options) in self.groups.items():
            step = options.pop(_STEP, None)  # that of Megatron's own checkpoint
            group.update(options)
            if key in steps:
                group[_STEP] = saved_groups.counted(group.get(_STEP), steps[key], self.place)
            mains = [work.main for work, _ in self.works if work.group is group]
            saved_groups.put_step(step, group, self.inners[key], mains, self.place)
        for scaler in self.scalers:
            scaler.load_state_dict(self.state[_GRAD_SCALER])

    def _steps(self) -> dict[int, Any]:
        """Return the number of steps of each group that counts them, by its id.

        Raises `StateError` if the parameters of one group have taken different numbers of steps.
        """
        steps: dict[int, tuple[Any, str]] = {}
        for work, name in self.works:
            step = self.state.get(work.main, {}).get(_STEP)
            if step is None or not private.counts_in_group(work.inner):
                continue
            number = numbers.number_in(step)
            known, first = steps.setdefault(id(work.group), (number, name))
            if known != number:
                raise StateError(
                    f"{self.place}: {first} has taken {known:.0f} steps in the checkpoint and {name} has "
                    f"taken {number:.0f}, and here the two are in one group, which counts them",
                    remedy="give the parameters groups of their own",
                )
        return {key: number for key, (number, _) in steps.items()}

    def _put(self, work: Working, states: dict[Any, Any]) -> None:
        """Make `states` those of a parameter, in the form that the optimizer gives them."""
        main, fresh = work.main, {}
        for name, state in states.items():
            if name == _STEP and private.counts_in_group(work.inner):
                continue
            if id(state) in self.rows:
                fresh[name] = self.rows[id(state)][1]
            elif isinstance(state, torch.Tensor) and state.numel() == main.numel() and state.ndim:
                fresh[name] = state.as_strided(main.shape, main.stride(), state.storage_offset())
            else:
                fresh[name] = state
        if fresh:
            work.inner.state[main] = fresh
        else:
            work.inner.state.pop(main, None)


def _counts_in_integers(work: Working) -> bool:
    """Return whether the group of a parameter counts its steps, and in integers."""
    step = work.group.get(_STEP)
    floats = isinstance(step, torch.Tensor) and step.is_floating_point()
    return private.counts_in_group(work.inner) and step is not None and not floats


def _row(tensor: torch.Tensor, parameter: Any, place: Place) -> torch.Tensor:
    """Return a state of a parameter as a row of elements on the same memory.

    These are in the order of the parameter's memory.  Raises `StateError` for memory in another order.
    """
    found = tensor.detach()
    if found.is_contiguous() and (found.ndim == 1 or parameter.is_contiguous()):
        return found.view(-1)
    if found.shape == parameter.shape and found.stride() == parameter.stride():
        return found.as_strided((found.numel(),), (1,), found.storage_offset())
    raise StateError(
        f"{place} has a state of shape {list(found.shape)} whose memory is in another order "
        f"(strides {found.stride()}) than that of its parameter ({parameter.stride()})",
        remedy="make both contiguous",
    )


def _cut(one: HeldPart, work: Working) -> FlatPart | None:
    """Return the part of a whole tensor in an optimizer's range of a local one, or None if it is empty."""
    whole = one.part
    low = max(work.start, whole.offset)
    high = min(work.start + work.numel, whole.offset + whole.numel)
    if low >= high and whole.numel:
        return None
    return structs.replace(
        whole, start=low - whole.offset, numel=max(0, high - low), offset=low - work.start, total=work.numel
    )


class MegatronOptimizerAdapter(OptimizerAdapter):
    """Optimizers of Megatron, which load the states of Megatron's own checkpoints, too."""

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Fill the states and options, from those of parameters or those of Megatron's buffers."""
        if flat_states.are_saved(place, loading):
            flat_states.want(value, place, loading)
        else:
            super().wanted(value, place, loading, assign)


def adapters() -> tuple[Adapter, ...]:
    """Return the adapters of Megatron's objects."""
    return (
        ModelAdapter(),
        MegatronOptimizerAdapter(private.is_optimizer, read),
        ShardedTensorAdapter(),
        FlatLeavesAdapter(),
        ObjectAdapter(),
        LocalAdapter(),
        RngAdapter(),
    )
