"""The partitions of ZeRO: which ranges of which flat tensors are a parameter, its master weights and states?

With ZeRO 1 and 2, the partitions of a group are one line, on which its parameters lie one behind another.
With ZeRO 3, each parameter is cut into equal parts, one on each rank.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.engine.foreign.entries import MODEL, Chunks, ForeignEntries, named
from reknit.engine.foreign.torch_files import TorchFile, add_extent
from reknit.errors import CorruptError, FormatError
from reknit.format.foreign.torch_values import TensorView
from reknit.types.box import Box, flat_range_boxes
from reknit.types.manifest import Extent
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

OPTIMIZER = "optimizer"
_NOT_OPTIONS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})

Shapes = dict[str, tuple[int, ...]]


class _Flat(NamedTuple):
    """A flat tensor of a rank: its view, and its extent."""

    view: TensorView
    extent: Extent


class RankPartition(NamedTuple):
    """The file of the partition of one rank."""

    file: TorchFile
    state: dict[str, Any]

    def flat(self, view: Any) -> _Flat:
        """Return a flat tensor of the file.  Raises `FormatError` for something else."""
        if not isinstance(view, TensorView) or len(view.spec.shape) != 1:
            raise FormatError(f"{self.file.path} has something else than a flat partition")
        return _Flat(view, self.file.extent(view))


class FlatRanges(NamedTuple):
    """The place of a parameter: the group, and ranges of elements: rank, first there, first here, number."""

    group: int
    ranges: tuple[tuple[int, int, int, int], ...]

    def of(self, views: list[Any]) -> list[Any]:
        """Return the flat tensors of a rank that hold it: that of its group, or all as one line."""
        return views[self.group : self.group + 1] if self.group >= 0 else views


def lines_of_2(partitions: list[RankPartition], shapes: list[Shapes]) -> dict[str, FlatRanges]:
    """Return the ranges of parameters that lie one behind another on the partitions of their group."""
    lines: dict[str, FlatRanges] = {}
    paddings = partitions[0].state.get("param_alignment_paddings")
    for group, members in enumerate(shapes):
        sizes = [_groups(each.state)[group].spec.numel for each in partitions]
        ends = [0, *accumulate(sizes)]
        at = 0
        for number, (name, shape) in enumerate(members.items()):
            numel, ranges, done = prod(shape), [], 0
            while done < numel:
                rank = bisect_right(ends, at + done) - 1
                if rank >= len(sizes):
                    raise CorruptError(f"{name[:200]!r} lies beyond the partitions of its group")
                num = min(numel - done, ends[rank + 1] - at - done)
                ranges.append((rank, at + done - ends[rank], done, num))
                done += num
            lines[name] = FlatRanges(group, tuple(ranges))
            at += numel + (paddings[group][number] if isinstance(paddings, list) else 0)
    return lines


def lines_of_3(partitions: list[RankPartition], shapes: list[Shapes]) -> dict[str, FlatRanges]:
    """Return the ranges of parameters of which each rank has one part; flat groups follow each other."""
    size, at = len(partitions), 0
    lines = {}
    for name, shape in ((name, shape) for members in shapes for name, shape in members.items()):
        numel = prod(shape)
        part = -(-numel // size)
        ranges = [(rank, at, rank * part, min(part, numel - rank * part)) for rank in range(size)]
        lines[name] = FlatRanges(-1, tuple(each for each in ranges if each[3] > 0))
        at += part
    return lines


def _groups(state: dict[str, Any]) -> list[TensorView]:
    """Return the flat master weights of a rank, by group."""
    found = state.get("single_partition_of_fp32_groups", state.get("fp32_flat_groups"))
    if not isinstance(found, list) or not all(isinstance(one, TensorView) for one in found):
        raise FormatError("a partition has no master weights")
    return found


def add_partitioned(
    entries: ForeignEntries,
    partitions: list[RankPartition],
    lines: Mapping[str, FlatRanges],
    shapes: list[Shapes],
    *,
    in_module: Mapping[str, str],
    with_model: bool,
) -> None:
    """Add master weights, states and options of all parameters; with ZeRO 3 the weights are the model.

    `in_module` has the dtypes of the parameters in training: those in fp32 have no other master weights.
    """
    base = [_base_states(each) for each in partitions]
    names = dict.fromkeys(key for states in base for state in states for key in state)
    groups = _options(partitions[0])
    for number, members in enumerate(shapes):
        for name, shape in members.items():
            place = partial(_add_line, entries, partitions=partitions, shape=shape, line=lines[name])
            weights = [_groups(each.state) for each in partitions]
            if in_module.get(name) != "float32":
                place(OPTIMIZER, ["state", name, "master"], weights)
            if with_model:
                place(MODEL, [name], weights)
            for key in names:
                keys = ["state", name, key]
                views = [[state.get(key) for state in states] for states in base]
                one = next(iter(lines[name].of(views[0])), None)
                if isinstance(one, TensorView) and len(one.spec.shape) == 1 and one.spec.numel > 1:
                    place(OPTIMIZER, keys, views)
                elif isinstance(one, TensorView):
                    add_extent(entries, OPTIMIZER, named(keys), one, partitions[0].file.extent(one))
                elif one is not None:
                    entries.value(OPTIMIZER, named(keys), one)
            if groups:
                options = groups[min(number, len(groups) - 1)]
                entries.value(OPTIMIZER, named(["param_groups", name]), options)


def _add_line(
    entries: ForeignEntries,
    item: str,
    keys: list[Any],
    views: list[list[Any]],
    *,
    partitions: list[RankPartition],
    shape: tuple[int, ...],
    line: FlatRanges,
) -> None:
    """Add a tensor whose ranges lie in flat tensors of the ranks, which `views` has by rank."""
    chunks: Chunks = []
    dtype = "float32"
    for rank, start, first, num in line.ranges:
        done = 0
        for view in line.of(views[rank]):
            flat = partitions[rank].flat(view)
            numel, dtype = flat.view.spec.numel, flat.view.spec.dtype
            if start >= numel:
                start -= numel
                continue
            here = min(num - done, numel - start)
            at = flat.extent.start + start * flat.view.spec.itemsize
            for box in flat_range_boxes(shape, first + done, here):
                nbytes = box.numel * flat.view.spec.itemsize
                entries.size(flat.extent.file)
                chunks.append((box, Extent(flat.extent.file, at, nbytes)))
                at += nbytes
            done, start = done + here, 0
            if done == num:
                break
    spec = TensorSpec(tuple(shape), dtype)
    if not spec.numel:
        chunks = [(Box.whole(spec.shape), Extent(partitions[0].file.path, 0, 0))]
    entries.tensor(item, named(keys), spec, chunks)


def _base_states(partition: RankPartition) -> list[dict[str, Any]]:
    """Return the states of the inner optimizer of a rank, by group."""
    base = partition.state.get("base_optimizer_state", partition.state.get("optimizer_state_dict"))
    if isinstance(base, dict) and isinstance(base.get("state"), dict):
        return [state for _, state in sorted(base["state"].items()) if isinstance(state, dict)]
    if isinstance(base, list):
        return [state for state in base if isinstance(state, dict)]
    return []


def _options(partition: RankPartition) -> list[dict[str, Any]]:
    """Return the options of the groups of the inner optimizer."""
    base = partition.state.get("base_optimizer_state", partition.state.get("optimizer_state_dict"))
    groups = base.get("param_groups") if isinstance(base, dict) else None
    groups = partition.state.get("param_groups") if groups is None else groups
    if not isinstance(groups, list):
        return []
    plain = (int, float, str, bool, tuple, type(None))
    return [
        {key: one for key, one in group.items() if key not in _NOT_OPTIONS and isinstance(one, plain)}
        for group in groups
        if isinstance(group, dict)
    ]
