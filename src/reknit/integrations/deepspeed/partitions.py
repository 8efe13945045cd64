"""The partitions of ZeRO: the ranges of flat tensors that are a parameter, its master weights and states.

With ZeRO 1 and 2, the partitions of a group are one line, on which its parameters lie one behind another.  A
group of experts has one line for each expert-parallel rank.  With ZeRO 3, each parameter is cut into equal
parts, one on each rank.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import CorruptError, FormatError, shown
from reknit.integrations.formats.entries import MODEL, Chunks, ForeignEntries, named, options_of_group
from reknit.integrations.formats.pickles import PickledObject
from reknit.integrations.formats.small_reads import part_of
from reknit.integrations.formats.torch_values import TensorView, Whole
from reknit.integrations.torch_save.files import TorchFile, add_extent, views_in
from reknit.plugins.format import Box, Extent, TensorSpec, flat_range_boxes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.plugins.format import Storage

OPTIMIZER = "optimizer"

Shapes = dict[str, tuple[int, ...]]
"""The shapes of the parameters of a group, by name, in the order in which they lie in its flat tensor."""


class RankPartition(NamedTuple):
    """The file of the partition of one rank."""

    file: TorchFile
    state: dict[str, Any]

    @property
    def stage(self) -> int:
        """The stage of ZeRO.  DeepSpeed's optimizer for bf16 cuts as stage 1 does, and records none."""
        stage = self.state.get("zero_stage", 1 if "single_partition_of_fp32_groups" in self.state else None)
        stage = stage.args[0] if isinstance(stage, PickledObject) and stage.args else stage
        if stage not in (1, 2, 3):
            raise FormatError(f"{self.file.path} is of the stage {shown(stage)} of ZeRO")
        return int(stage)

    @property
    def counts(self) -> list[int]:
        """The number of the ranks that share a group, for each group; one number if it is that of all."""
        found = self.state.get("partition_count")
        counts: list[Any] = found if isinstance(found, list) else [found]
        if not counts or not all(type(one) is int and one > 0 for one in counts):
            raise FormatError(f"{self.file.path} does not record the number of its partitions")
        return counts

    @property
    def masters(self) -> list[TensorView]:
        """The flat master weights, by group."""
        found = self.state.get("single_partition_of_fp32_groups", self.state.get("fp32_flat_groups"))
        if not isinstance(found, list) or not all(isinstance(one, TensorView) for one in found):
            raise FormatError(f"{self.file.path} has no master weights")
        return found

    @property
    def states(self) -> dict[int, dict[str, Any]]:
        """The states of the inner optimizer, by group."""
        base = self._base
        state = base.get("state") if isinstance(base, dict) else base
        items = enumerate(state) if isinstance(state, list) else (state or {}).items()
        return {number: one for number, one in items if isinstance(one, dict)}

    @property
    def options(self) -> dict[int, dict[str, Any]]:
        """The options of the inner optimizer, by group; none if the file does not record them."""
        groups = self._base.get("param_groups") if isinstance(self._base, dict) else None
        return options_by_flat(groups)

    @property
    def _base(self) -> Any:
        return self.state.get("base_optimizer_state", self.state.get("optimizer_state_dict"))


class ParameterPlace(NamedTuple):
    """A parameter in the flat tensors of a group.

    A range has the number of a partition, the first element there, the first in the parameter, and the number
    of elements.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    ranges: list[tuple[int, int, int, int]]


def options_by_flat(groups: Any) -> dict[int, dict[str, Any]]:
    """Return the options of each flat tensor of an optimizer's groups."""
    return {
        number: options_of_group(group)
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, dict) and isinstance(group.get("params"), list)
        for number in group["params"]
        if type(number) is int
    }


def check_same_save(entries: ForeignEntries, partitions: Sequence[RankPartition]) -> None:
    """Raise `CorruptError` if the partitions were not saved together, as far as they show it."""
    first = partitions[0]
    for other in partitions[1:]:
        for what, one, another in (
            ("stages of ZeRO", first.stage, other.stage),
            ("numbers of partitions", first.counts, other.counts),
            ("numbers of groups", len(first.masters), len(other.masters)),
            ("options", first.options, other.options),
            ("steps", _steps(entries, first), _steps(entries, other)),
        ):
            if one != another:
                raise CorruptError(
                    f"{first.file.path} and {other.file.path} are of different saves: their {what} differ"
                )


def _steps(entries: ForeignEntries, partition: RankPartition) -> list[Any]:
    """Return the counters of steps, by group, those in tensors as bytes."""
    steps = [state.get("step") for _, state in sorted(partition.states.items())]
    read = partial(bytes_of, entries.storage, partition.file)
    return [read(one) if isinstance(one, TensorView) else one for one in steps]


def bytes_of(storage: Storage, file: TorchFile, view: TensorView) -> bytes:
    """Return the bytes of a small tensor of a file."""
    found = file.extent(view)
    return part_of(storage, found.file, found.start, found.nbytes)


class PartitionLine(NamedTuple):
    """Ranks whose partitions of a group are one line, and the whole model's name of a parameter there."""

    ranks: Sequence[int]
    rename: Callable[[str], str] = str


def places_on_lines(
    partitions: Sequence[RankPartition], shapes: list[Shapes], lines_of: Callable[[int], list[PartitionLine]]
) -> list[ParameterPlace]:
    """Return the places of parameters that lie one behind another on the partitions of their group.

    `lines_of` gives the lines of a group.  Raises `CorruptError` if a line has other elements.
    """
    places = []
    paddings = partitions[0].state.get("param_alignment_paddings")
    for group, members in enumerate(shapes):
        for line in lines_of(group):
            sizes = [_master(partitions[rank], group).spec.numel for rank in line.ranks]
            ends, at = [0, *accumulate(sizes)], 0
            for number, (name, shape) in enumerate(members.items()):
                numel = prod(shape)
                ranges = [
                    (line.ranks[each], there, here, num) for each, there, here, num in _cut(ends, at, numel)
                ]
                if sum(each[3] for each in ranges) < numel:
                    raise CorruptError(f"{name[:200]!r} lies beyond the partitions of its group")
                places.append(ParameterPlace(line.rename(name), shape, group, ranges))
                at += numel + (paddings[group][number] if isinstance(paddings, list) else 0)
            step = 2 * len(line.ranks)
            if -(-at // step) != -(-ends[-1] // step):  # the padding at the end
                raise CorruptError(
                    f"the partitions of group {group} have {ends[-1]} elements, and its parameters {at}"
                )
    return places


def _cut(ends: list[int], start: int, numel: int) -> list[tuple[int, int, int, int]]:
    """Return the ranges of a part of a line, whose partitions end at `ends`."""
    ranges, done = [], 0
    while done < numel and start + done < ends[-1]:
        number = bisect_right(ends, start + done) - 1
        num = min(numel - done, ends[number + 1] - start - done)
        ranges.append((number, start + done - ends[number], done, num))
        done += num
    return ranges


def places_in_parts(partitions: Sequence[RankPartition], shapes: list[Shapes]) -> list[ParameterPlace]:
    """Return the places of parameters of which each rank has one part.

    Raises `CorruptError` if a group has other elements.
    """
    places, size = [], len(partitions)
    for group, members in enumerate(shapes):
        at = 0
        for name, shape in members.items():
            places.append(ParameterPlace(name, shape, group, parts_of(prod(shape), size, at)))
            at += -(-prod(shape) // size)
        for partition in partitions:
            if (num := _master(partition, group).spec.numel) != at:
                raise CorruptError(
                    f"{partition.file.path} has {num} elements of group {group}, and its parameters {at}"
                )
    return places


def parts_of(numel: int, size: int, at: int) -> list[tuple[int, int, int, int]]:
    """Return the ranges of a parameter that is cut into equal parts, which begin at `at` on each rank."""
    part = -(-numel // size)
    ranges = [(rank, at, rank * part, min(part, numel - rank * part)) for rank in range(size)]
    return [each for each in ranges if each[3] > 0]


def _master(partition: RankPartition, group: int) -> TensorView:
    masters = partition.masters
    if group >= len(masters):
        raise CorruptError(f"{partition.file.path} has no master weights of group {group}")
    return masters[group]


def add_partitioned(
    entries: ForeignEntries,
    partitions: Sequence[RankPartition],
    places: list[ParameterPlace],
    *,
    in_module: Mapping[str, str],
    with_model: bool,
) -> None:
    """Add master weights, states and options of all parameters; with ZeRO 3 the weights are the model.

    `in_module` has the dtypes of the parameters in training: those in fp32 have no other master weights.
    """
    options = partitions[0].options
    entries.inline = partial(bytes_of, entries.storage, partitions[0].file)
    weights = [each.masters for each in partitions]
    states = [each.states for each in partitions]
    for place in places:
        add = partial(add_ranges, entries, files=[each.file for each in partitions], place=place)
        masters = [one[place.group] for one in weights]
        if in_module.get(place.name) != "float32":
            add(OPTIMIZER, ["state", place.name, "master"], views=masters)
        if with_model:
            add(MODEL, [place.name], views=masters)
        here = [one.get(place.group, {}) for one in states]
        rank = max((each[0] for each in place.ranges), key=lambda rank: masters[rank].spec.numel, default=0)
        for key, one in here[rank].items():
            keys = ["state", place.name, key]
            if not isinstance(one, TensorView):
                add_state_value(entries, keys, one)
            elif len(one.spec.shape) == 1 and one.spec.numel >= masters[rank].spec.numel:
                add(OPTIMIZER, keys, views=[state.get(key) for state in here])
            elif one.spec.numel == 1:
                add_extent(entries, OPTIMIZER, named(keys), one, partitions[rank].file.extent(one))
            else:
                raise FormatError(
                    f"the state {shown(key)} of {place.name[:200]!r} has not one number for each element"
                )
        if place.group in options:
            add_whole(entries, ["param_groups", place.name], options[place.group])


def add_whole(entries: ForeignEntries, keys: list[str], value: Any) -> None:
    """Add a value of the optimizer that is kept as one."""
    entries.nested(OPTIMIZER, keys, Whole(value), lambda *_: None)


def add_state_value(entries: ForeignEntries, keys: list[str], value: Any) -> None:
    """Add a state of a parameter that is not a tensor.  A container of tensors is not read."""
    if views_in(value, [], set()):  # of which each rank has other ones
        why = "its tensors are in a container, and DeepSpeed does not record their places in the parameter"
        entries.unread(OPTIMIZER, keys, why)
    else:
        add_whole(entries, keys, value)


def add_ranges(
    entries: ForeignEntries,
    item: str,
    keys: list[Any],
    *,
    files: Sequence[TorchFile],
    views: Sequence[Any],
    place: ParameterPlace,
) -> None:
    """Add a tensor whose ranges lie in flat tensors, one in each file.  Raises `FormatError` without them."""
    chunks: Chunks = []
    dtypes = set()
    for number, start, first, num in place.ranges:
        view = views[number]
        if not isinstance(view, TensorView) or len(view.spec.shape) != 1 or view.spec.numel < start + num:
            raise FormatError(f"{files[number].path} has no flat {shown('/'.join(map(str, keys)))}")
        flat = files[number].extent(view)
        at = flat.start + start * view.spec.itemsize
        entries.size(flat.file)
        dtypes.add(view.spec.dtype)
        for box in flat_range_boxes(place.shape, first, num):
            chunks.append((box, Extent(flat.file, at, box.numel * view.spec.itemsize)))
            at += box.numel * view.spec.itemsize
    if len(dtypes) > 1:
        raise CorruptError(f"{place.name[:200]!r} has several dtypes: {', '.join(sorted(dtypes))}")
    spec = TensorSpec(tuple(place.shape), next(iter(dtypes), "float32"))
    if not spec.numel:
        chunks = [(Box.whole(spec.shape), Extent(files[0].path, 0, 0))]
    entries.tensor(item, named(keys), spec, chunks)
