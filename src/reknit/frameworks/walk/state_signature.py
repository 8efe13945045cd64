"""The facts that decide the results of a walk over a state, except memory and plain values."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from msgspec import Struct, field

from reknit.errors import ReknitError
from reknit.frameworks import tree
from reknit.frameworks.walk.walk import Place, first_match
from reknit.types.shard import MAPPING, MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import World
    from reknit.types.shard import Blob


class SignedPart(NamedTuple):
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
    """All facts that decide how the tensors of a state are stored, in the order of the walk.

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
    """A library's record of tensors: `memories` are the local memories of the different ones."""

    memories: Sequence[Any]

    def find(self, memories: Sequence[Any]) -> list[int]:
        """Return the number of the tensor for each memory that is all of that tensor's own memory."""

    def leads(self) -> list[int]:
        """Return the first of the different tensors on each mesh, for `locate`."""

    def locate(self, number: int, world: World) -> None:
        """Add the coordinate of this rank to `world`, as a walk finds it from one of the tensors."""


class TensorSigner(Protocol):
    """A library that reads many tensors of these types at once."""

    kinds: frozenset[type]

    def signed(self, signature: Signature) -> TensorsAtOnce | None:
        """Add the facts that decide how all the tensors are stored; None if there may be other facts."""


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
