"""Megatron models as parts of whole tensors; each layer and expert has a name of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from reknit.errors import StateError
from reknit.frameworks.megatron import dist_checkpointing, megatron_private
from reknit.frameworks.megatron.sharded_objects import collect_object, want_object
from reknit.frameworks.torch.dtensor import is_dtensor
from reknit.frameworks.torch.flat_part import FlatPart, storage_order
from reknit.frameworks.torch.modules import members, own_load
from reknit.frameworks.torch.tensor import local_memory, spec_of
from reknit.frameworks.walk.adapter import Adapter
from reknit.frameworks.walk.walk import Place, View
from reknit.types.box import Box
from reknit.types.devices import memory_of
from reknit.types.foreign import megatron_names
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.frameworks.megatron.dist_checkpointing import GlobalBox
    from reknit.frameworks.megatron.megatron_private import RankGroups
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Assign, Replicas, Walk


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The part of one whole tensor that a local tensor holds.

    `first` is set if no other pipeline stage has the saved copy, and `main` if Megatron would save this copy.
    """

    name: str
    part: FlatPart
    resizable: bool
    first: bool
    main: bool

    @property
    def whole(self) -> bool:
        """Whether the local tensor holds the whole tensor."""
        return self.part.numel == prod(self.part.shape)

    @property
    def expert(self) -> bool:
        """Whether this belongs to an expert, which has groups of its own."""
        return megatron_names.is_of_expert(self.name)


def held(sharded: Any, place: Place, prefix: str = "") -> list[HeldPart]:
    """Return the parts of whole tensors in a local tensor, without `prefix` in Megatron's keys."""
    if is_dtensor(sharded.data):
        raise StateError(
            f"{place} is a DTensor in a Megatron model", remedy="use Megatron's DistributedDataParallel"
        )
    by_name: dict[str, list[GlobalBox]] = {}
    for entry in dist_checkpointing.entries(sharded, place):
        for one in _unstacked(entry._replace(key=entry.key.removeprefix(prefix))):
            by_name.setdefault(one.key, []).append(one)
    total = sharded.data.numel()
    return [_held(name, members, total, place) for name, members in by_name.items()]


def _unstacked(entry: GlobalBox) -> list[GlobalBox]:
    """Return an entry without the dimensions that number layers and experts; its names have the numbers."""
    found = [entry]
    if entry.stacked and megatron_names.stacks_layers(entry.key):
        found = _split(entry, megatron_names.with_layer)
    if megatron_names.stacks_experts(entry.key):
        found = [expert for layer in found for expert in _split(layer, megatron_names.with_expert)]
    return [_renamed(one) for one in found]


def _split(entry: GlobalBox, name: Callable[[str, int], str]) -> list[GlobalBox]:
    """Return the entries along the first dimension, without that dimension."""
    return [
        entry._replace(
            key=name(entry.key, entry.offsets[0] + n),
            shape=entry.shape[1:],
            offsets=entry.offsets[1:],
            lengths=entry.lengths[1:],
            stacked=max(0, entry.stacked - 1),
            start=entry.start + n * entry.strides[0],
            strides=entry.strides[1:],
        )
        for n in range(entry.lengths[0])
    ]


def _renamed(entry: GlobalBox) -> GlobalBox:
    """Return an entry of one expert, or of one half of a gated layer, under the name in the whole model."""
    entry = entry._replace(key=megatron_names.plain(entry.key))
    if (half := megatron_names.half(entry.key)) is None:
        return entry
    d, rows = entry.stacked, entry.shape[entry.stacked]
    return entry._replace(
        key=half[0],
        shape=(*entry.shape[:d], 2 * rows, *entry.shape[d + 1 :]),
        offsets=(*entry.offsets[:d], entry.offsets[d] + half[1] * rows, *entry.offsets[d + 1 :]),
    )


def _held(name: str, members: Sequence[GlobalBox], total: int, place: Place) -> HeldPart:
    """Return the part that the boxes of one whole tensor in one local tensor form together."""
    first = members[0]
    dims = range(len(first.shape))
    start = min(member.start for member in members)
    # The stride of a box is meaningless along a dimension with one element.
    longest = [max(members, key=lambda member: member.lengths[d]) for d in dims]
    strides = [longest[d].strides[d] for d in dims]
    placed = []
    for member in members:
        rest, at = member.start - start, [0] * len(first.shape)
        for d in sorted(dims, key=lambda d: (-strides[d], d)):
            if strides[d] and rest >= strides[d]:
                at[d], rest = divmod(rest, strides[d])
        placed.append((Box(member.offsets, member.lengths), Box(tuple(at), member.lengths)))
    local = tuple(max((inside.ends[d] for _, inside in placed), default=0) for d in dims)
    numel = sum(box.numel for box, _ in placed)
    try:
        order = storage_order(local, strides)
    except ValueError as error:
        raise StateError(f"{place}: {error}", remedy="make the parameter contiguous") from error
    if prod(local) != numel:
        raise StateError(f"{place} holds parts of {name} that do not lie side by side")
    part = FlatPart(first.shape, local, tuple(placed), order, 0, numel=numel, offset=start, total=total)
    stage = any(member.stage for member in members)
    return HeldPart(name, part, first.resizable, not stage, all(member.main for member in members))


class LocalTensor(NamedTuple):
    """A tensor of a model: `home` is the model's place, and `parts` are its parts of whole tensors."""

    local: Any
    home: Place
    parts: list[HeldPart]


def tensors(walk: Walk) -> dict[int, LocalTensor]:
    """Return the parts in the parameters of all Megatron models in the state, by the parameters' ids.

    The state may contain a model as the result of `sharded_state_dict`, too.
    """
    return walk.world.once("megatron tensors", lambda: _tensors(walk))


def _tensors(walk: Walk) -> dict[int, LocalTensor]:
    found: dict[int, LocalTensor] = {}
    for module, place in walk.find(megatron_private.module_type()):
        for _, sharded, parts in model(module, place, walk):
            found[id(sharded.data)] = LocalTensor(sharded.data, place, parts)
    for sharded, place in walk.find(dist_checkpointing.tensor_types()):
        if isinstance(sharded.data, nn.Parameter) and id(sharded.data) not in found:
            found[id(sharded.data)] = LocalTensor(sharded.data, Place(place.item), held(sharded, place))
    return found


def model(module: Any, place: Place, walk: Walk) -> list[tuple[str, Any, list[HeldPart]]]:
    """Return all entries that a model saves: name in this process, Megatron's description, parts."""

    def describe() -> list[tuple[str, Any, list[HeldPart]]]:
        return [
            (key, one, held(one, place.child(key)) if dist_checkpointing.is_tensor(one) else [])
            for key, one in megatron_private.described(module, place)
        ]

    return walk.world.once(("megatron model", id(module)), describe)


def groups(walk: Walk) -> RankGroups:
    """Return this rank's groups."""
    return walk.world.once("megatron groups", lambda: megatron_private.groups(walk.world))


def view(tensor: Any, one: HeldPart, place: Place, replicas: Replicas, *, fill: bool) -> View:
    """Return the view of a part of a whole tensor in a local one."""
    memory, settle = local_memory(tensor, place, fill=fill)
    dtype = spec_of(memory, place).dtype
    # In the order of memory, as a transposed tensor has no flat view.
    flat = memory.as_strided((memory.numel(),), (1,), memory.storage_offset())
    key = ("megatron", *memory_of(memory), tuple(memory.shape), memory.stride(), one.name)
    return View(TensorSpec(one.part.shape, dtype), one.part.parts(flat), replicas, key, settle)


def collect_part(tensor: Any, one: HeldPart, at: Place, saving: Saving, *, alone: bool = False) -> None:
    """Collect a part of a whole tensor, or record that Megatron saves it from another copy.

    If the tensor is `alone`, its copies on other ranks are unknown, and Megatron's main copy is saved.
    """
    if not (one.main if alone else one.first):
        empty = tensor.detach().new_empty((0,) * len(one.part.shape))
        saving.witness(TensorSpec(one.part.shape, spec_of(empty, at).dtype), at, empty)
        return
    me = [saving.world.global_rank]
    ranks = me if alone else groups(saving).copies(expert=one.expert, whole=one.whole)
    saving.view(view(tensor, one, at, saving.world.numbers(ranks), fill=False), at, tensor)


def want_part(tensor: Any, one: HeldPart, at: Place, loading: Loading) -> None:
    """Request a part of a whole tensor, to fill the local tensor."""
    if loading.takes(at):
        loading.view(view(tensor, one, at, None, fill=True), at, tensor, resize=one.resizable)


def _set_extra(model: Any, key: str, state: Any) -> None:
    model.get_submodule(key.rpartition(".")[0]).set_extra_state(state)


class ModelAdapter(Adapter):
    """Chunks of a Megatron model: bare, or in Megatron's Float16Module and DistributedDataParallel.

    Names are those of the model in one process: layers and experts are numbered as in the whole model.
    """

    unites = True

    def matches(self, value: Any) -> bool:
        """Return whether this is a model of Megatron."""
        return megatron_private.is_module(value)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect the tensors and objects of the model.  Its own `sharded_state_dict` sends nothing."""
        found = model(value, place, saving)
        if max(len(groups(saving).data), len(groups(saving).expert_data)) > 1:
            megatron_private.require_gathered(value, place)
        for _, sharded, parts in found:
            if not dist_checkpointing.is_tensor(sharded):
                collect_object(sharded, place, saving)
            for one in parts:
                collect_part(sharded.data, one, place.child(one.name), saving)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Fill the model's tensors where they are."""
        bare, found = megatron_private.bare(value, place), model(value, place, loading)
        comes = any(loading.takes(place.child(one.name)) for _, _, parts in found for one in parts)
        if comes and own_load.has_own(bare):
            read = members.read(bare, place, loading)
            for back in own_load.returns(read, place, loading).values():
                # Before the extra state: `give` restores the present one.
                loading.later(lambda back=back: back.give(read, place))  # type: ignore[misc]
        for key, sharded, parts in found:
            if not dist_checkpointing.is_tensor(sharded):
                want_object(sharded, place, loading, partial(_set_extra, bare, key))
            for one in parts:
                want_part(sharded.data, one, place.child(one.name), loading)
