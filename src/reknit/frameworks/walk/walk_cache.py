"""Walks that reuse the results of the last walk, if the state has the same signature."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from operator import is_
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from msgspec import Struct, field, structs

from reknit.errors import ReknitError
from reknit.frameworks import tree
from reknit.frameworks.walk.walk import Place, first_match
from reknit.types.shard import MAPPING, MAX_DEPTH, HostRuns, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import View, World
    from reknit.types.box import Box
    from reknit.types.shard import Alias, Blob, Holdings, TensorSpec


class SignedPart(Struct, frozen=True):
    """A value that an adapter collects whole, or tensors in a dict: those from its entry number `first` on.

    `end` counts the tensors of the signature up to there, and `num_values` the blobs.  `end` is None for a
    part that is walked anew at every save.
    """

    value: Any
    place: Place
    end: int | None
    adapter: SigningAdapter | None = None
    num_values: int = 0
    first: int | None = None


class Signature(Struct):
    """All facts of a state that decide how its tensors are stored, in the order of the walk.

    `facts` are equal, and `objects` the same, as long as no fact has changed.  They keep no tensor alive.
    `tensors` are those of the state, several times if they are at several places.
    """

    facts: list[Any] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)
    parts: list[SignedPart] = field(default_factory=list)


@runtime_checkable
class SigningAdapter(Protocol):
    """An adapter that can check, quicker than a walk, whether a walk would have the same results."""

    def sign(self, value: Any, signature: Signature) -> int | None:
        """Add all facts for `collect` except memory and plain values; return the number of blobs.

        Two values with equal facts, the same objects and such tensors have the same shards, aliases and names
        of blobs.  Returns None for a value without this property.
        """

    def add_values(self, value: Any, place: Place, saving: Saving, before: Sequence[Blob]) -> None:
        """Add the blobs and barriers that `collect` would; `before` are the blobs of the last walk."""


class TensorsAtOnce(Protocol):
    """A library's record of tensors: `memories` are the local memories of the different ones.

    `runs` are those of the memories, if they are known.
    """

    memories: Sequence[Any]
    runs: HostRuns | None

    @property
    def facts(self) -> TensorFacts:
        """The facts of all the tensors."""

    def find(self, memories: Sequence[Any]) -> list[int]:
        """Return the number of the tensor for each memory that is all of that tensor's own memory."""

    def leads(self) -> list[int]:
        """Return the first of the different tensors on each mesh, for `locate`."""

    def locate(self, number: int, world: World) -> None:
        """Add the coordinate of this rank to `world`, as a walk finds it from one of the tensors."""


class TensorFacts(Protocol):
    """The facts that decide how some tensors are stored.  They keep no tensor alive."""

    def are_same(self, other: Any) -> bool:
        """Return whether the tensors of the `other` facts are stored alike."""


class TensorSigner(Protocol):
    """A library that reads many tensors of these types at once."""

    kinds: frozenset[type]

    def look(self, tensors: Sequence[Any], last: Any) -> TensorsAtOnce | None:
        """Return a record of tensors with their facts; None if there may be other facts.

        `last` are the facts of the last tensors, if any: it takes less time to see that these are the same.
        """

    def views(self, tensors: Sequence[Any], places: Sequence[Place], world: World) -> list[View | None]:
        """Return the view of each tensor, to fill it; None for a tensor that takes a closer look."""


def sign(saving: Saving, kinds: frozenset[type]) -> Signature | None:
    """Return the signature of a state, with tensors of these types; None for an unusual state."""
    signature = Signature()
    try:
        for item, value in saving.state.items():
            signature.facts.append(item)
            _sign(value, Place(item), saving, kinds, signature)
    except _Unusual:
        return None
    except ReknitError:
        raise
    except Exception:  # of an object's own code: it is raised again in the walk, which names the object
        return None
    return signature


class _Unusual(Exception):
    """A state has an object that most states do not have."""


def _sign(value: Any, place: Place, saving: Saving, kinds: frozenset[type], signature: Signature) -> None:
    facts, parts = signature.facts, signature.parts
    if type(value) in kinds:
        facts.append("tensor")
        signature.tensors.append(value)
        parts.append(SignedPart(value, place, len(signature.tensors)))
        return
    adapter = first_match(saving.adapters, value)
    if adapter.unites:
        if not isinstance(adapter, SigningAdapter):
            raise _Unusual
        num_values = adapter.sign(value, signature)
        if num_values is None:
            raise _Unusual
        facts.append("signed")
        parts.append(SignedPart(value, place, len(signature.tensors), adapter, num_values))
    elif type(value) in (dict, OrderedDict) and value:
        _sign_dict(value, place, saving, kinds, signature)
    elif type(value) in (list, tuple) and value and _unites(saving, value[0]):
        facts.append((type(value), len(value)))
        if len({id(first_match(saving.adapters, inner)) for inner in value}) > 1:
            raise _Unusual
        for inner in value:
            _sign(inner, place, saving, kinds, signature)
    elif tree.any_leaf(value, lambda leaf: _unites(saving, leaf)):
        raise _Unusual  # it may have parameters whose names an optimizer needs
    else:
        facts.append("anew")
        parts.append(SignedPart(value, place, None))


def _unites(saving: Saving, value: Any) -> bool:
    return first_match(saving.adapters, value).unites


def _sign_dict(
    value: dict[Any, Any], place: Place, saving: Saving, kinds: frozenset[type], signature: Signature
) -> None:
    facts, tensors, parts = signature.facts, signature.tensors, signature.parts
    if place.fqn.count("/") >= MAX_DEPTH or len(parts) > tree.COUNTED:
        raise _Unusual
    if not {*map(type, value)} <= {str, int}:
        raise _Unusual  # such keys may be equal to each other, or not be names
    facts.append((type(value), len(value)))
    facts.extend(value)
    if tree.is_numbered(value):
        parts.append(SignedPart(None, place.below(MAPPING), None))
    first: int | None = None
    for number, (key, inner) in enumerate(value.items()):
        if type(inner) in kinds:
            tensors.append(inner)
            first = number if first is None else first
            continue
        if first is not None:
            parts.append(SignedPart(value, place, len(tensors), first=first))
            first = None
        facts.append(number)
        _sign(inner, place.child(key), saving, kinds, signature)
    if first is not None:
        parts.append(SignedPart(value, place, len(tensors), first=first))


NUM_KEPT = 4
"""Number of walks that are kept: of states with different items, or of different groups."""


class _FoundPart(Struct, frozen=True):
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
    """A walk that is over: the signature of its state, the facts of its tensors, and its results.

    `found` has None for a part that is walked anew, and `items` are the items with a part that is not.
    `known` are results that others computed from the shards and aliases.
    """

    facts: list[Any]
    objects: list[Any]
    tensors: TensorFacts
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
        signature, last = sign(saving, look.kinds), self._walked.get(key)
        looked = None if signature is None else look.look(signature.tensors, last and last.tensors)
        if signature is None or looked is None:
            self._walked.pop(key, None)
            return saving.walk()
        if last is not None and _is_same(signature, looked, last):
            numbers, num_others = _repeat(saving, signature, looked, last)
            if numbers is not None:
                self._walked[key] = structs.replace(last, tensors=looked.facts)
                return saving.holdings(*(None, None) if num_others else (last.known, _runs(looked, numbers)))
            saving = make()
        self._walked.pop(key, None)
        walked, num_others = _walk(saving, signature, looked)
        if walked is None:
            return saving.holdings()
        for oldest in list(self._walked)[: 1 - NUM_KEPT]:
            self._walked.pop(oldest, None)
        self._walked[key] = walked
        return saving.holdings(None if num_others else walked.known)


def _is_same(signature: Signature, looked: TensorsAtOnce, last: _PastWalk) -> bool:
    """Return whether all facts that a walk depends on are as they were at the last."""
    return (
        signature.facts == last.facts
        and looked.facts.are_same(last.tensors)
        and len(signature.objects) == len(last.objects)
        and all(map(is_, signature.objects, last.objects))
    )


def _repeat(
    saving: Saving, signature: Signature, looked: TensorsAtOnce, last: _PastWalk
) -> tuple[list[int] | None, int]:
    """Reuse the results of the last walk, and walk through the rest.

    Returns the numbers of the tensors of all reused shards, and the number of shards in the rest.  The first
    is None if a walk would have other results.  In an item with a reused part, the rest may have no shards:
    one could be the same memory as another there.
    """
    memories, num_others, numbers = looked.memories, 0, list[int]()
    for part, found in zip(signature.parts, last.found, strict=True):
        if found is None:
            before = len(saving.shards)
            saving.visit(part.value, part.place)
            num_new = len(saving.shards) - before
            if num_new and part.place.item in last.items:
                return None, 0
            num_others += num_new
            continue
        for number in found.locate:
            looked.locate(number, saving.world)
        numbers += found.memories
        here = map(memories.__getitem__, found.memories)
        columns = found.items, found.fqns, found.specs, found.boxes, found.replicas, here, found.frozen
        saving.shards.extend(map(Shard, *columns))
        saving.aliases.extend(found.aliases)
        if part.adapter is not None:
            part.adapter.add_values(part.value, part.place, saving, found.blobs)
    return numbers if saving.world.coordinate == last.coordinate else None, num_others


def _runs(looked: TensorsAtOnce, numbers: Sequence[int]) -> HostRuns | None:
    """Return the runs of the shards whose memory is that of the tensors with these numbers."""
    runs = looked.runs
    return runs and HostRuns([*map(runs.addresses.__getitem__, numbers)], runs.kept)


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
    past = _PastWalk(
        signature.facts, signature.objects, looked.facts, found, items, coordinate=coordinate, known={}
    )
    return past, num_others


def _visit(part: SignedPart, start: int, saving: Saving) -> None:
    """Walk through a part; of tensors in a container these are the first after `start` of all tensors."""
    if part.first is None:
        saving.visit(part.value, part.place)
        return
    assert part.end is not None
    for key, tensor in islice(part.value.items(), part.first, part.first + part.end - start):
        saving.tensor(tensor, part.place.child(key))


walk_cache = WalkCache()
"""The walks of this process."""
