"""States of a distributed optimizer that Megatron saved in the order of its buffers, filled in place.

These are the forms `dp_reshardable`, with a tensor for each bucket, and `dp_zero_gather_scatter`, with one
for each buffer.  Their order is that of a job with the same tensor, pipeline and expert parallel sizes.  The
number of data parallel ranks may differ.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reknit.frameworks.megatron import main_parameters, megatron_private, saved_groups
from reknit.frameworks.optimizer import param_options
from reknit.frameworks.optimizer.slots import MASTER
from reknit.frameworks.torch.tensor import dtype_name, torch_dtype
from reknit.frameworks.walk.walk import Place, View
from reknit.types.box import Box
from reknit.types.foreign import megatron_names
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.frameworks.megatron.main_parameters import Working
    from reknit.frameworks.megatron.megatron_private import BufferBucket
    from reknit.frameworks.walk.load_walk import Loading

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
    for number, optimizer in megatron_private.numbered_chain(value, place):
        flat = megatron_names.flat_place(number, megatron_private.data_parallel_group_index(optimizer))
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
        self._buckets = megatron_private.buckets(optimizer)
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
        works = main_parameters.working(self._optimizer, self._place)
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
            options = saved_groups.paired(groups, listed, at, loading)
            for group, one in zip(groups, options, strict=bool(options)):
                step = one.pop(saved_groups.STEP, None)
                param_options.take(group, one, groups, at, loading)
                members = [work for work in works if work.group is group]
                loading.later(partial(self._put_step, group, members, step))
        scaler = megatron_private.scaler(self._optimizer)
        if scaler is not None and (found := loading.value(self._at.child(_SCALER))).why is None:
            loading.later(partial(scaler.load_state_dict, found.value))

    def _put_step(self, group: dict[str, Any], members: list[Working], step: Any) -> None:
        inner = self._optimizer.optimizer
        saved_groups.put_step(step, group, inner, [work.main for work in members], self._place)


def _deliver(works: list[Working], states: dict[int, dict[str, Any]]) -> None:
    """Put the loaded states into the optimizer."""
    for work in works:
        if loaded := states[id(work)]:
            work.inner.state[work.main] = {**(work.inner.state.get(work.main) or {}), **loaded}
