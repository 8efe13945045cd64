"""A checkpoint in memory, for tests of adapters alone: put together from holdings, offered as a catalog."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from msgspec import structs

from reknit.frameworks.numbers import same_value
from reknit.frameworks.registry import collect, wanted
from reknit.types.manifest import Catalog
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.types.shard import Holdings, Shard, TensorSpec
    from reknit.types.wanted import Wanted

Name = tuple[str, str]


def portable(holdings: Holdings) -> Holdings:
    """Return holdings with copies of the live memory, to be sent to another process or kept over a change."""
    shards = tuple(structs.replace(s, memory=_copy(s.data)) for s in holdings.shards)
    return structs.replace(holdings, shards=shards)


def _copy(data: Any) -> torch.Tensor:
    return data.detach().clone() if isinstance(data, torch.Tensor) else torch.from_numpy(data.copy())


@dataclass
class Checkpoint:
    """Whole tensors and values, by (item, fqn), checked while they were put together."""

    items: tuple[str, ...]
    specs: dict[Name, TensorSpec] = field(default_factory=dict)
    tensors: dict[Name, torch.Tensor] = field(default_factory=dict)
    shared: dict[Name, Any] = field(default_factory=dict)
    own: dict[tuple[str, tuple[tuple[str, int], ...]], dict[str, Any]] = field(default_factory=dict)
    num_ranks: int | None = None

    def catalog(self) -> Catalog:
        """Return the catalog that a loading rank receives."""
        tensors: dict[str, dict[str, TensorSpec]] = {item: {} for item in self.items}
        blobs: dict[str, dict[str, Any]] = {item: {} for item in self.items}
        for (item, fqn), spec in self.specs.items():
            tensors[item][fqn] = spec
        for (item, fqn), value in self.shared.items():
            blobs[item][fqn] = value
        places = {item: tuple(dict(place) for of, place in self.own if of == item) for item in self.items}
        return Catalog(self.items, tensors, blobs, places, self._own, num_ranks=self.num_ranks)

    def _own(self, item: str, coordinate: Mapping[str, int]) -> dict[str, Any]:
        return self.own.get((item, tuple(sorted(coordinate.items()))), {})


def assemble(everyone: Sequence[Holdings]) -> Checkpoint:
    """Put the holdings of all ranks together, and check their claims.

    Every element of every tensor is there, copies are equal, the ranks in `replicas` hold exactly that box.
    """
    checkpoint = Checkpoint(everyone[0].items, num_ranks=len(everyone))
    held = [{(s.item, s.fqn, s.box): s for s in holdings.shards} for holdings in everyone]
    covered: dict[Name, torch.Tensor] = {}
    for rank, holdings in enumerate(everyone):
        assert set(holdings.items) == set(checkpoint.items)
        assert len(held[rank]) == len(holdings.shards), "a rank holds one box twice"
        for shard in holdings.shards:
            name = (shard.item, shard.fqn)
            assert tuple(shard.data.shape) == shard.box.lengths
            assert str(shard.data.dtype).removeprefix("torch.") == shard.spec.dtype
            assert checkpoint.specs.setdefault(name, shard.spec) == shard.spec
            blank = torch.zeros(shard.spec.shape, dtype=shard.data.dtype)
            whole = checkpoint.tensors.setdefault(name, blank)
            seen = covered.setdefault(name, torch.zeros(shard.spec.shape, dtype=torch.bool))
            if shard.replicas == ():
                continue  # another rank has to hold it
            at = shard.box.slices()
            assert torch.equal(whole[at][seen[at]], shard.data[seen[at]]), f"copies of {name} differ"
            whole[at] = shard.data
            seen[at] = True
            for other in shard.replicas or ():
                twin = held[other].get((shard.item, shard.fqn, shard.box))
                assert twin is not None, f"rank {rank} says that rank {other} holds {name}{shard.box}"
                assert twin.replicas == shard.replicas
            assert shard.replicas is None or (
                rank in shard.replicas and list(shard.replicas) == sorted(shard.replicas)
            )
    for name, seen in covered.items():
        assert bool(seen.all()), f"{name} has holes"
    _add_aliases(checkpoint, everyone)
    _add_values(checkpoint, everyone)
    return checkpoint


def gathered(mine: Holdings) -> Checkpoint:
    """Put the holdings of all ranks of the job together, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, portable(mine))
    return assemble(everyone)


def _add_aliases(checkpoint: Checkpoint, everyone: Sequence[Holdings]) -> None:
    for holdings in everyone:
        for alias in holdings.aliases:
            checkpoint.specs[alias.item, alias.fqn] = checkpoint.specs[alias.item, alias.of]
            checkpoint.tensors[alias.item, alias.fqn] = checkpoint.tensors[alias.item, alias.of]


def _add_values(checkpoint: Checkpoint, everyone: Sequence[Holdings]) -> None:
    """Share the values that all ranks agree on; give each rank its own of the others."""
    values: dict[Name, dict[int, Any]] = {}
    for rank, holdings in enumerate(everyone):
        for blob in holdings.blobs:
            if blob.coordinate is None:
                values.setdefault((blob.item, blob.fqn), {})[rank] = blob.value
            else:
                place = (blob.item, tuple(sorted(blob.coordinate.items())))
                checkpoint.own.setdefault(place, {})[blob.fqn] = blob.value
    for (item, fqn), by_rank in values.items():
        first = next(iter(by_rank.values()))
        if all(same_value(first, value) for value in by_rank.values()):
            checkpoint.shared[item, fqn] = first
            continue
        for rank, value in by_rank.items():
            checkpoint.own.setdefault((item, (("rank", rank),)), {})[fqn] = value


def save(state: Mapping[str, Any]) -> Checkpoint:
    """Save a state of one rank."""
    return assemble([portable(collect(state, 0, 1))])


def fill(want: Wanted, checkpoint: Checkpoint) -> None:
    """Do an engine's part of a load: fill the memory for objects, deliver these, then all the rest."""
    early = [full_name(shard.item, shard.fqn) in want.early for shard in want.shards]
    _fill([shard for shard, first in zip(want.shards, early, strict=True) if first], checkpoint)
    want.deliver_early()
    _fill([shard for shard, first in zip(want.shards, early, strict=True) if not first], checkpoint)
    want.deliver()


def _fill(shards: Sequence[Shard], checkpoint: Checkpoint) -> None:
    for shard in shards:
        whole = checkpoint.tensors[shard.item, shard.fqn]
        assert checkpoint.specs[shard.item, shard.fqn] == shard.spec
        assert tuple(shard.data.shape) == shard.box.lengths
        target = shard.data if isinstance(shard.data, torch.Tensor) else torch.from_numpy(shard.data)
        target.copy_(whole[shard.box.slices()])


def load(state: Mapping[str, Any], checkpoint: Checkpoint, rank: int = 0, size: int = 1) -> Wanted:
    """Load into a state that the checkpoint fits exactly."""
    want = wanted(state, checkpoint.catalog(), rank, size)
    assert want.missing == ()
    assert want.mismatched == ()
    fill(want, checkpoint)
    return want
