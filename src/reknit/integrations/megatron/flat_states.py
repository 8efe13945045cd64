"""States of a distributed optimizer that Megatron saved in the order of its buffers, filled in place.

These are the forms `dp_reshardable`, with a tensor for each bucket, and `dp_zero_gather_scatter`, with one
for each buffer.  Their order is that of a job with the same tensor, pipeline and expert parallel sizes.  The
number of data parallel ranks may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reknit.errors import StateError
from reknit.frameworks.torch import numbers, param_options
from reknit.frameworks.torch.slots import NumberedGroups
from reknit.integrations.megatron import names as megatron_names
from reknit.integrations.megatron import private
from reknit.integrations.megatron.names import GROUPS
from reknit.plugins.framework import (
    MASTER,
    Box,
    Place,
    TensorSpec,
    View,
    dtype_name,
    same_value,
    torch_dtype,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reknit.integrations.megatron.private import BufferBucket, MainTensors, Pairs
    from reknit.plugins.framework import Loading


class Working(NamedTuple):
    """A parameter as an optimizer updates it.

    `main` is the tensor that the inner optimizer updates: the whole parameter, or a flat range of `numel`
    elements from `start` on.  `distributed` is set if each rank of the data parallel group has another range.
    """

    parameter: Any
    main: torch.Tensor
    start: int
    numel: int
    group: dict[str, Any]
    inner: Any
    distributed: bool

    @property
    def exact(self) -> bool:
        """Whether `main` is a copy in higher precision."""
        return bool(self.main.dtype != self.parameter.dtype)


def working(optimizer: Any, place: Place) -> list[Working]:
    """Return the parameters whose states an optimizer (not a chain) has on this rank.

    Raises `StateError` if it is not certain which parameter a tensor of a group or a state belongs to.
    """
    found = private.main_tensors(optimizer, place)
    whole = f"{place}: the {type(optimizer).__name__}"
    works: list[Working] = []
    for number, group in enumerate(found.inner.param_groups):
        here = f"{place}: group {number} of the {type(optimizer).__name__}"
        works += _of_group(found, number, group, here)
    _require_all(found, works, whole)
    return works


def _of_group(found: MainTensors, number: int, group: dict[str, Any], here: str) -> Iterator[Working]:
    """Yield the parameters of one group."""
    copies, views = (list(_pairs(pairs, number, here)) for pairs in (found.copies, found.views))
    if found.ranges is None:
        # All else in the group is a parameter itself.
        copied = _ids(main for _, main in copies)
        views = [(main, main) for main in group["params"] if id(main) not in copied]
    mains = [main for _, main in copies + views]
    if len(mains) != len(group["params"]) or _ids(mains) != _ids(group["params"]):
        raise _unproved(f"{here} has other tensors than Megatron has for the parameters")
    for is_copy, pairs in ((True, copies), (False, views)):
        for parameter, main in pairs:
            start, end = 0, parameter.numel()
            if found.ranges is not None:
                start, end = found.ranges.get(id(parameter), (0, 0))
            if (why := _flaw(parameter, main, start, end, is_copy=is_copy)) is not None:
                raise _unproved(f"{here} {why} for a parameter of shape {list(parameter.shape)}")
            yield Working(
                parameter,
                main,
                start,
                end - start,
                group,
                inner=found.inner,
                distributed=found.ranges is not None,
            )


def _pairs(pairs: Pairs, number: int, here: str) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the parameters of one group and the tensors that are updated in their place."""
    if any(number >= len(groups) for groups in pairs):
        raise _unproved(f"{here} was added after Megatron made the optimizer")
    parameters, mains = (groups[number] for groups in pairs)
    if len(parameters) != len(mains):
        raise _unproved(f"{here} has {len(mains)} tensors for {len(parameters)} parameters")
    yield from zip(parameters, mains, strict=True)


def _flaw(parameter: Any, main: torch.Tensor, start: int, end: int, *, is_copy: bool) -> str | None:
    """Return why a tensor cannot be that of these elements of a parameter, None if it can."""
    if not 0 <= start <= end <= parameter.numel() or main.numel() != end - start:
        return f"has {main.numel()} elements in place of those from {start} to {end}"
    if is_copy:
        if main.dtype != torch.float32 or parameter.dtype == torch.float32:
            return f"has a copy in {main.dtype}, of {parameter.dtype},"
        return None
    if main.dtype != parameter.dtype:
        return f"has {main.dtype} in place of {parameter.dtype}"
    first = parameter.data_ptr() + start * parameter.element_size()
    return "has other memory" if main.numel() and main.data_ptr() != first else None


def _require_all(found: MainTensors, works: list[Working], whole: str) -> None:
    """Raise `StateError` unless each parameter is there once, and all parts and states are theirs."""
    parameters, mains = _ids(work.parameter for work in works), _ids(work.main for work in works)
    if min(len(parameters), len(mains)) < len(works):
        raise _unproved(f"{whole} has one parameter twice in its groups")
    for work in works:
        # Megatron notes the copy at the parameter; another optimizer of the same model has its own copy.
        noted = getattr(work.parameter, "main_param", None)
        if work.exact and noted is not work.main and id(noted) in mains:
            raise _unproved(f"{whole} has two copies of a parameter of shape {list(work.parameter.shape)}")
    if left := (found.ranges or {}).keys() - parameters:
        raise _unproved(f"{whole} has parts of parameters here that are in none of its groups ({len(left)})")
    if lost := sum(bool(states) and id(key) not in mains for key, states in found.inner.state.items()):
        raise _unproved(f"{whole} has states under keys that are in none of its groups ({lost})")


def _ids(tensors: Iterable[Any]) -> set[int]:
    return set(map(id, tensors))


def _unproved(what: str) -> StateError:
    return StateError(
        f"{what}, so that the parameters of its states are unknown",
        remedy="convert and move the model before DistributedDataParallel wraps it, make the optimizer from "
        "the wrapped model, and change neither its groups nor the keys of its states",
    )


STEP = "step"
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""The options that identify a group for Megatron; NeMo calls some of them ``pre_wd_mult``."""


def find_group(groups: Sequence[Mapping[str, Any]], place: Place, loading: Loading) -> NumberedGroups | None:
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
    if private.counts_in_group(inner):
        group[STEP] = counted(group.get(STEP), step, place)
        return
    for main in mains:
        if states := inner.state.get(main):
            states[STEP] = numbers.counter(step, place)


def counted(present: Any, step: Any, place: Place) -> Any:
    """Return the counter of a group for a number of steps: the present one if it is a tensor."""
    count = whole(step)
    made, why = numbers.fitted(present, step if count is None else count, cast=False)
    if why is not None:
        raise StateError(f"{place} counts its steps in a tensor, and {why}", remedy="count in float64")
    return numbers.put(present, made)


_OPTIONS, _SCALER = "optimizer", "grad_scaler"
_OTHER_JOB = (
    "Megatron saved it in the order of the buffers of its job, and here {}.  Load it with the tensor, "
    "pipeline and expert parallel sizes of that job, and save it with reknit, which loads into any.  Or load "
    "items=['model']"
)


def are_saved(place: Place, loading: Loading) -> bool:
    """Return whether the checkpoint has the states of an optimizer in this form."""
    return next(_names_below(place.child(megatron_names.FLAT), loading), None) is not None


def want(value: Any, place: Place, loading: Loading) -> None:
    """Request the states and options of all optimizers in a chain."""
    loads = []
    for number, optimizer in private.numbered_chain(value, place):
        flat = megatron_names.flat_place(number, private.data_parallel_group_index(optimizer))
        loads.append(_FlatLoad(optimizer, place.below(flat), place, loading))
    misfit = next((why for each in loads if (why := each.misfit()) is not None), None)
    if misfit is not None:
        at = place.child(megatron_names.FLAT)
        loading.report_mismatched(at, _OTHER_JOB.format(misfit))
        loading.pass_over(at)
        return
    for each in loads:
        each.want()


def _names_below(place: Place, loading: Loading) -> Iterator[str]:
    below, catalog = f"{place.fqn}/", loading.catalog
    for names in (catalog.tensors.get(place.item, {}), catalog.blobs.get(place.item, {})):
        yield from (fqn for fqn in names if fqn.startswith(below))


class _Saved(NamedTuple):
    """A saved state of all parameters in a bucket: its place, and where the bucket begins in that tensor."""

    state: str
    at: Place
    start: int
    numel: int


class _FlatLoad:
    """The requests of one optimizer to a checkpoint with states in this form."""

    def __init__(self, optimizer: Any, at: Place, place: Place, loading: Loading) -> None:
        self._optimizer, self._at, self._place, self._loading = optimizer, at, place, loading
        self._buckets = private.buckets(optimizer)
        self._names = list(_names_below(at, loading))
        self._tensors: dict[str, list[str]] = {}
        for name in self._names:
            if self._spec(name) is not None:
                self._tensors.setdefault(name.rpartition("/")[0], []).append(name)

    def misfit(self) -> str | None:
        """Return why the saved buffers are not those of this optimizer, or None."""
        if not self._buckets:
            return f"is a {type(self._optimizer).__name__}"
        tensors = {name for names in self._tensors.values() for name in names}
        for bucket in self._buckets:
            found = self._saved(bucket)
            if not found:
                return f"is {self._at}/{bucket.name}, which it does not have"
            for one in found:
                tensors.discard(one.at.fqn)
                spec = self._spec(one.at.fqn)
                if spec is None or spec.shape != (one.numel,):
                    return f"{one.at} has {one.numel} elements, and not {spec}"
        return f"is no {min(tensors)}" if tensors else None

    def _spec(self, fqn: str) -> TensorSpec | None:
        return self._loading.saved.spec(Place(self._at.item, fqn))

    def _saved(self, bucket: BufferBucket) -> list[_Saved]:
        """Return the saved states of a bucket."""
        forms = ((bucket.name, 0, bucket.numel), (bucket.buffer_name, bucket.first, bucket.buffer_numel))
        return [
            _Saved(name.rpartition("/")[2], Place(self._at.item, name), start, numel)
            for part, start, numel in forms
            for name in self._tensors.get(f"{self._at.fqn}/{part}", ())
        ]

    def want(self) -> None:
        """Request the states of the parameters on this rank, and the options of the groups."""
        works = working(self._optimizer, self._place)
        by_parameter = {id(work.parameter): work for work in works}
        states: dict[int, dict[str, Any]] = {id(work): {} for work in works}
        parts: dict[_Saved, list[tuple[Box, Any]]] = {}
        for bucket in self._buckets:
            for one in self._saved(bucket):
                held = parts.setdefault(one._replace(start=0), [])
                for parameter, (start, end) in bucket.ranges.items():
                    work = by_parameter[parameter]
                    row = self._row(work, one, states[id(work)])
                    if row is not None:
                        held.append((Box((one.start + start,), (end - start,)), row))
        for one, rows in parts.items():
            self._request(one, rows)
        self._want_options(works)
        self._loading.later(partial(_deliver, works, states))
        for name in self._names:
            if self._spec(name) is None:
                self._loading.leave(Place(self._at.item, name))

    def _row(self, work: Working, one: _Saved, states: dict[str, Any]) -> torch.Tensor | None:
        """Return the memory for a state of a parameter; None if the parameter itself is the state."""
        if one.state == MASTER:
            return work.main.detach().view(-1) if work.exact else None
        spec = self._spec(one.at.fqn)
        assert spec is not None
        if not self._loading.takes(one.at):
            return None
        dtype, state = torch_dtype(spec.dtype), (work.inner.state.get(work.main) or {}).get(one.state)
        fits = isinstance(state, torch.Tensor) and state.dtype == dtype and state.is_contiguous()
        if not isinstance(state, torch.Tensor) or not fits or state.numel() != work.main.numel():
            state = torch.empty_like(work.main, dtype=dtype, memory_format=torch.contiguous_format)
        states[one.state] = state
        return state.detach().view(-1)

    def _request(self, one: _Saved, rows: list[tuple[Box, Any]]) -> None:
        """Request a saved tensor into rows, or leave it out if its elements are those of the parameters."""
        if not rows:
            if one.state == MASTER:
                self._loading.leave(one.at)
            return
        if self._loading.takes(one.at):
            spec = TensorSpec((one.numel,), dtype_name(rows[0][1], one.at))
            view = View(spec, tuple(rows), None, ("megatron flat", one.at.fqn))
            self._loading.view(view, one.at, rows[0][1])

    def _want_options(self, works: list[Working]) -> None:
        """Request the options and the counters of the groups, and the state of the loss scaler."""
        loading, at = self._loading, self._at.child(_OPTIONS)
        groups = self._optimizer.optimizer.param_groups
        found = loading.value(at)
        if found.why is None:
            listed = found.value.get("param_groups") if isinstance(found.value, dict) else None
            options = paired(groups, listed, at, loading)
            for group, one in zip(groups, options, strict=bool(options)):
                step = one.pop(STEP, None)
                param_options.take(group, one, groups, at, loading)
                members = [work for work in works if work.group is group]
                loading.later(partial(self._put_step, group, members, step))
        scaler = private.scaler(self._optimizer)
        if scaler is not None and (found := loading.value(self._at.child(_SCALER))).why is None:
            loading.later(partial(scaler.load_state_dict, found.value))

    def _put_step(self, group: dict[str, Any], members: list[Working], step: Any) -> None:
        inner = self._optimizer.optimizer
        put_step(step, group, inner, [work.main for work in members], self._place)


def _deliver(works: list[Working], states: dict[int, dict[str, Any]]) -> None:
    """Put the loaded states into the optimizer."""
    for work in works:
        if loaded := states[id(work)]:
            work.inner.state[work.main] = {**(work.inner.state.get(work.main) or {}), **loaded}
