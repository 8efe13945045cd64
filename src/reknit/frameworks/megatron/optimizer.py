"""Megatron's optimizers, read in place by the names of whole parameters, without a message."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from reknit.errors import StateError
from reknit.frameworks.megatron import private
from reknit.frameworks.megatron.model import groups, tensors
from reknit.frameworks.optimizer import protocol as optimizer_protocol
from reknit.frameworks.optimizer.slots import MASTER, ParamSlot, Slots
from reknit.frameworks.walk.loading import Loading

if TYPE_CHECKING:
    from reknit.frameworks.megatron.model import HeldPart
    from reknit.frameworks.megatron.private import Working
    from reknit.frameworks.torch.flat import FlatPart
    from reknit.frameworks.walk.walk import Place, Replicas, Walk

_GRAD_SCALER = "grad_scaler"
_STEP = "step"
_LOCAL = frozenset({"params", _STEP, "is_expert_parallel"})
"""What of a parameter group is no option: the step is a state, and who has which experts is the layout."""


class MegatronOptimizers:
    """DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer, and chains of them."""

    def matches(self, value: Any) -> bool:
        """Tell whether this is one of them."""
        return private.is_optimizer(value)

    def read(self, value: Any, place: Place, walk: Walk) -> Slots:
        """Return the parameters by name.  Raises `StateError` where a name cannot be known."""
        reading = _Reading(place, walk, _Writer())
        for optimizer in private.chained(value, place):
            reading.add(optimizer)
        reading.prefer_masters()
        return Slots(
            reading.state, list(reading.writer.groups.values()), tuple(reading.slots), reading.deliver
        )


@dataclass
class _Writer:
    """The way back into the optimizers: copies of their groups, and what each flat state is a view of."""

    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    real: dict[int, dict[str, Any]] = field(default_factory=dict)
    whole: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    steps: dict[int, tuple[float, str]] = field(default_factory=dict)

    def group(self, real: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a group, to be read and changed."""
        self.real[id(real)] = real
        options = {key: value for key, value in real.items() if key not in _LOCAL}
        return self.groups.setdefault(id(real), options)

    def flat(self, state: Any, parameter: Any, place: Place) -> Any:
        """Return a state as a row of elements, in the order of memory."""
        if not isinstance(state, torch.Tensor) or state.ndim < 1:
            return state
        row = _row(state, parameter, place)
        self.whole[id(row)] = (row, state)  # the row too, so that no other tensor gets its id
        return row

    def count(self, work: Working, states: dict[Any, Any], name: str, place: Place) -> None:
        """Note how many steps a group has taken by the states of one parameter.

        Raises `StateError` where another one of the same group has taken others.
        """
        if _STEP not in states or not private.counts_in_group(work.inner):
            return
        steps = float(states[_STEP])
        known, first = self.steps.setdefault(id(work.group), (steps, name))
        if known != steps:
            raise StateError(
                f"{place}: {first} has taken {known:.0f} steps in the checkpoint and {name} has taken "
                f"{steps:.0f}, and here the two are in one group, which counts them",
                remedy="give the parameters groups of their own",
            )

    def put(self, work: Working, states: dict[Any, Any]) -> None:
        """Make `states` those of a parameter, in the form that the optimizer gives them."""
        fresh = {}
        for name, state in states.items():
            if name == _STEP and private.counts_in_group(work.inner):
                continue
            if id(state) in self.whole:
                fresh[name] = self.whole[id(state)][1]
            elif isinstance(state, torch.Tensor) and state.numel() == work.main.numel() and state.ndim:
                fresh[name] = state.as_strided(work.main.shape, work.main.stride(), state.storage_offset())
            else:
                fresh[name] = state
        if fresh:
            work.inner.state[work.main] = fresh
        else:
            work.inner.state.pop(work.main, None)

    def finish(self) -> None:
        """Put options and steps back into the groups."""
        for key, real in self.real.items():
            real.update(self.groups[key])
            if key in self.steps:
                steps, present = self.steps[key][0], real.get(_STEP)
                if isinstance(present, torch.Tensor):
                    present.fill_(steps)
                else:
                    real[_STEP] = int(steps)


@dataclass
class _Reading:
    """An optimizer, while it is read."""

    place: Place
    walk: Walk
    writer: _Writer
    state: dict[Any, Any] = field(default_factory=dict)
    slots: list[ParamSlot] = field(default_factory=list)
    works: list[tuple[Working, str]] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)
    several: bool = False
    kind: tuple[str, ...] = ()
    _taken: set[str] = field(default_factory=set)

    def add(self, optimizer: Any) -> None:
        """Read one optimizer of a chain."""
        self.several = private.is_instance_of_several(optimizer)
        if (scaler := private.scaler(optimizer)) is not None:
            self.scalers.append(scaler)
            self.state.setdefault(_GRAD_SCALER, scaler.state_dict())
        inner = None
        for work in private.working(optimizer, self.place):
            if work.inner is not inner:
                inner = work.inner
                self.kind = optimizer_protocol.inner_kind(inner, self.place)
            self._add(work)

    def _add(self, work: Working) -> None:
        known = tensors(self.walk).get(id(work.parameter))
        if known is None:
            raise StateError(
                f"{self.place} has a parameter of shape {list(work.parameter.shape)} that belongs to no "
                "Megatron model in the state, so its name is unknown",
                remedy="put all chunks of the model into the state too",
            )
        home, parts = known
        mine = [(one, flat) for one in parts if (flat := _cut(one, work)) is not None]
        joint = len(parts) > 1
        states = self._states(work, omit_step=not joint and not self._counts(work))
        if states:
            self.state[work.main] = states
        self.works.append((work, mine[0][0].name if mine else ""))
        for one, flat in mine:
            self._taken.add(one.name)
            self.slots.append(self._slot(work, one, flat, home, joint))

    def _states(self, work: Working, *, omit_step: bool) -> dict[Any, Any]:
        """Return the present states of a parameter, and the step that its group counts among them."""
        present = work.inner.state.get(work.main) or {}
        states = {
            name: self.writer.flat(state, work.parameter, self.place) for name, state in present.items()
        }
        if states and _STEP not in states and _STEP in work.group:
            states[_STEP] = torch.tensor(float(work.group[_STEP]))
        if omit_step:
            states.pop(_STEP, None)
        return states

    def _counts(self, work: Working) -> bool:
        """Tell whether this rank's copy of the counter is one of those that are saved."""
        return self.walk.fills or work.start == 0

    def _slot(self, work: Working, one: HeldPart, flat: FlatPart, home: Place, joint: bool) -> ParamSlot:
        replicas, counter = self._replicas(work, one)
        main = _row(work.main, work.parameter, self.place)
        return ParamSlot(
            one.name,
            work.main,
            main,
            self.writer.group(work.group),
            replicas,
            (home.child(one.name),),
            flat,
            None if joint else counter,
            joint,
            one.first or self.walk.fills,
            main if work.exact else None,
            one.resizable,
            self.kind,
        )

    def _replicas(self, work: Working, one: HeldPart) -> tuple[Replicas, Replicas]:
        """Return who has the same part of the states, and who the same counter."""
        ours, numbers = groups(self.walk), self.walk.world.numbers
        if not work.distributed:
            same = ours.copies(expert=one.expert, whole=one.whole)
            return numbers(same), numbers(ours.copies(expert=one.expert, whole=True))
        if self.several:
            return self.walk.world.alone, self.walk.world.alone
        expert = private.is_synced_with_experts(work.parameter)
        return (
            numbers(ours.peers(expert=expert, whole=one.whole)),
            numbers(ours.peers(expert=expert, whole=True)),
        )

    def prefer_masters(self) -> None:
        """Let parameters of which other ranks have the states come from saved masters here too."""
        if not isinstance(self.walk, Loading):
            return
        for home, parts in tensors(self.walk).values():
            for one in parts:
                better = self.place.child("state", one.name, MASTER)
                if one.name not in self._taken and self.walk.saved.spec(better) is not None:
                    self.walk.prefer(better, (home.child(one.name),))

    def deliver(self) -> None:
        """Put what has arrived into the optimizers."""
        for work, name in self.works:
            self.writer.count(work, self.state.get(work.main, {}), name, self.place)
        for work, _ in self.works:
            self.writer.put(work, self.state.get(work.main, {}))
        self.writer.finish()
        for scaler in self.scalers:
            scaler.load_state_dict(self.state[_GRAD_SCALER])


def _row(tensor: torch.Tensor, parameter: Any, place: Place) -> torch.Tensor:
    """Return what an optimizer keeps of a parameter as a row of elements on the same memory.

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
    """Return what an optimizer's range of a local tensor holds of a whole one, or None for nothing."""
    whole = one.part
    low = max(work.start, whole.offset)
    high = min(work.start + work.numel, whole.offset + whole.numel)
    if low >= high and whole.numel:
        return None
    return replace(
        whole,
        start=low - whole.offset,
        numel=max(0, high - low),
        offset=low - work.start,
        total=work.numel,
        _known=None,
    )
