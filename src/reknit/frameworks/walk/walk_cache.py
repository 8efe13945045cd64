"""Walks that reuse the results of the last walk, if the state has the same signature."""

from __future__ import annotations

from itertools import islice
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from reknit.frameworks.walk.state_signature import sign
from reknit.types.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.state_signature import Signature, SignedPart, TensorsAtOnce, TensorSigner
    from reknit.types.box import Box
    from reknit.types.shard import Alias, Blob, Holdings, TensorSpec

NUM_KEPT = 4
"""Number of walks that are kept: of states with different items, or of different groups."""


class _FoundPart(NamedTuple):
    """The results of a walk in one part of a state.

    The columns have all of its shards without their memory, which is that of the tensors numbered `memories`.
    `locate` are the tensors that give the coordinate of this rank.
    """

    items: list[str]
    fqns: list[str]
    specs: list[TensorSpec]
    boxes: list[Box]
    replicas: list[tuple[int, ...] | None]
    frozen: list[bool]
    memories: list[int]
    aliases: list[Alias]
    blobs: list[Blob]
    locate: list[int]

    @classmethod
    def of(
        cls,
        shards: Sequence[Shard],
        memories: list[int],
        aliases: list[Alias],
        blobs: list[Blob],
        locate: list[int],
    ) -> _FoundPart:
        """Return results as columns."""
        return cls(
            [shard.item for shard in shards],
            [shard.fqn for shard in shards],
            [shard.spec for shard in shards],
            [shard.box for shard in shards],
            [shard.replicas for shard in shards],
            frozen=[shard.frozen for shard in shards],
            memories=memories,
            aliases=aliases,
            blobs=blobs,
            locate=locate,
        )


class _PastWalk(Struct, frozen=True):
    """A walk that is over: the signature of its state, and its results.

    `found` has None for a part that is walked anew, and `items` are the items with a part that is not.
    `known` are results that others computed from the shards and aliases.
    """

    facts: list[Any]
    objects: list[Any]
    found: list[_FoundPart | None]
    items: frozenset[str]
    coordinate: dict[str, int]
    known: dict[Hashable, Any]


class WalkCache:
    """The latest walks.  They keep no tensor, module or optimizer alive."""

    def __init__(self) -> None:
        self._walked: dict[Hashable, _PastWalk] = {}

    def collect(self, make: Callable[[], Saving], look: TensorSigner) -> Holdings:
        """Return the results of a walk with a new `Saving`.

        No walk is made if all facts that it depends on are as they were at the last.  The tensors then have
        the places of that walk, and only values are read.
        """
        saving = make()
        world = saving.world
        key = (world.rank, world.size, world.ranks, *saving.state)
        signature = sign(saving, look.kinds)
        looked = None if signature is None else look.signed(signature)
        if signature is None or looked is None:
            self._walked.pop(key, None)
            return saving.walk()
        last = self._walked.get(key)
        if last is not None and _is_same(signature, last):
            fits, num_others = _repeat(saving, signature, looked, last)
            if fits:
                return saving.holdings(None if num_others else last.known)
        self._walked.pop(key, None)
        saving = make()
        walked, num_others = _walk(saving, signature, looked)
        if walked is None:
            return saving.holdings()
        for oldest in list(self._walked)[: 1 - NUM_KEPT]:
            self._walked.pop(oldest, None)
        self._walked[key] = walked
        return saving.holdings(None if num_others else walked.known)


def _is_same(signature: Signature, last: _PastWalk) -> bool:
    """Return whether all facts that a walk depends on are as they were at the last."""
    return (
        signature.facts == last.facts
        and len(signature.objects) == len(last.objects)
        and all(map(is_, signature.objects, last.objects))
    )


def _repeat(saving: Saving, signature: Signature, looked: TensorsAtOnce, last: _PastWalk) -> tuple[bool, int]:
    """Reuse the results of the last walk, and walk through the rest.

    Returns whether a walk would have the same results, and the number of shards in the rest.  In an item with
    a reused part, the rest may have no shards: one could be the same memory as another there.
    """
    memories, num_others = looked.memories, 0
    for part, found in zip(signature.parts, last.found, strict=True):
        if found is None:
            before = len(saving.shards)
            saving.visit(part.value, part.place)
            num_new = len(saving.shards) - before
            if num_new and part.place.item in last.items:
                return False, 0
            num_others += num_new
            continue
        for number in found.locate:
            looked.locate(number, saving.world)
        here = [memories[number] for number in found.memories]
        columns = found.items, found.fqns, found.specs, found.boxes, found.replicas, here, found.frozen
        saving.shards.extend(map(Shard, *columns))
        saving.aliases.extend(found.aliases)
        if part.adapter is not None:
            part.adapter.add_values(part.value, part.place, saving, found.blobs)
    return saving.world.coordinate == last.coordinate, num_others


def _walk(saving: Saving, signature: Signature, looked: TensorsAtOnce) -> tuple[_PastWalk | None, int]:
    """Walk through a state, and return the results that the next walk can reuse, or None.

    Returns as well the number of shards in parts that cannot be reused.
    """
    leads = {*looked.leads()}
    items = frozenset(part.place.item for part in signature.parts if part.end is not None)
    found: list[_FoundPart | None] = []
    num_others = num_unfit = start = 0
    for part in signature.parts:
        shards, blobs = len(saving.shards), len(saving.blobs)
        aliases, witnesses = len(saving.aliases), len(saving.witnesses)
        _visit(part, start, saving)
        new = saving.shards[shards:]
        if part.end is None:
            found.append(None)
            num_others += len(new)
            num_unfit += len(new) if part.place.item in items else 0
            continue
        start = part.end
        numbers = looked.find([shard.memory for shard in new])
        locate = [number for number in dict.fromkeys(numbers) if number in leads]
        leads.difference_update(locate)
        found.append(_FoundPart.of(new, numbers, saving.aliases[aliases:], saving.blobs[blobs:], locate))
        num_unfit += len(new) - len(numbers) + len(saving.witnesses) - witnesses
        num_unfit += len(saving.blobs) - blobs != part.num_values
    if num_unfit:
        return None, num_others
    coordinate = dict(saving.world.coordinate)
    return _PastWalk(signature.facts, signature.objects, found, items, coordinate, known={}), num_others


def _visit(part: SignedPart, start: int, saving: Saving) -> None:
    """Walk through a part; of tensors in a container these are the first after `start` of all tensors."""
    if part.first is None:
        saving.visit(part.value, part.place)
        return
    assert part.end is not None
    for key, tensor in islice(part.value.items(), part.first, part.first + part.end - start):
        saving.tensor(tensor, part.place.child(key))
