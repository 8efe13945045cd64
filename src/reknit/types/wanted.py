"""The request of a rank for parts of a checkpoint, and how it delivers them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING

from msgspec import Struct, field

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.types.shard import Shard


RESIZE = " (LoadOptions(allow_shape_mismatch=...) takes the common part)"


def reshaping(here: Sequence[int]) -> str:
    """Return the advice about a tensor of a shape that is not the saved one, which has as many dimensions."""
    return RESIZE if prod(here) else ": give it the saved shape first, as it has no place for a value"


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name (`full_name`) matches any of the patterns."""
    return bool(patterns) and any(fnmatchcase(name, pattern) for pattern in patterns)


def selects(name: str, patterns: Sequence[str]) -> bool:
    """Return whether the last pattern that matches a name selects it, and so does not begin with ``!``."""
    last = next((p for p in reversed(patterns) if fnmatchcase(name, p.removeprefix("!"))), "!")
    return not last.startswith("!")


class Terms(Struct, frozen=True):
    """The options of a load that decide which entries are wanted.

    `only` are patterns of the names to load; empty for all.  `resizable` are patterns of tensors that may
    have another shape in the checkpoint.  `cast` is whether another dtype will be converted.  `watched` are
    other patterns that are checked for matches.
    """

    only: tuple[str, ...] = ()
    resizable: tuple[str, ...] = ()
    cast: bool = False
    watched: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        """Return whether the entry with this name is loaded."""
        return not self.only or matches(name, self.only)


class Wanted(Struct, frozen=True):
    """The parts of a checkpoint that a rank requests, and the functions that deliver them.

    `shards`: as in `Holdings`, but `data` is the writable memory to fill, and `replicas` is not used.
    `aliases`: (item, fqn, item, fqn) of a saved tensor, and of the wanted tensor in its place in the target;
    the two saved tensors must be equal.
    `blobs`: (item, fqn) of saved shared values that this rank takes.
    `own`: (item, fqn) of values that this rank saved for itself and takes back.
    `missing`: (item, fqn, why) of entries that the target needs and the catalog does not have.
    `mismatched`: (item, fqn, why) of entries that the catalog has in a form that the target cannot take.
    `notes`: (item, fqn, note) of entries that are not restored by design, such as a random state after a
    change of the number of ranks.
    `resizable`: (item, fqn) of wanted tensors that take the common part of a saved tensor of another shape.
    `resized`: (name, note) of wanted tensors of another shape whose shards were already adapted to the saved
    shape.
    `unlike`: (item, fqn, dtype) of wanted tensors that the catalog lacks, or has in another dtype than the
    target, which is given.
    `superseded`: (item, fqn) of saved entries that are not needed: another tensor replaces them, or they are
    dropped.
    `labels`: the name of each shard in messages to users, if that differs from its own.
    `idle`: patterns of `Terms`, of any kind, that do not match any name of this rank's target.
    `num_tensors`: number of tensors of the target to load; `num_kept` of them come from values, of `own` or
    `blobs`.
    `coordinate`: as in `Holdings`.
    `early`: names (`full_name`) of wanted tensors in new memory, for objects with a `state_dict`.
    `deliver_early`: called without arguments once these have arrived, before any other memory is filled;
    gives objects their states, and may raise an error.  `has_early` is whether it does anything.
    `deliver`: called without arguments once every byte has arrived; puts values into the live objects.
    Before that, only the memory of `shards` has changed.
    """

    items: tuple[str, ...]
    shards: tuple[Shard, ...] = ()
    aliases: tuple[tuple[str, str, str, str], ...] = ()
    blobs: tuple[tuple[str, str], ...] = ()
    missing: tuple[tuple[str, str, str], ...] = ()
    mismatched: tuple[tuple[str, str, str], ...] = ()
    notes: tuple[tuple[str, str, str], ...] = ()
    own: tuple[tuple[str, str], ...] = ()
    resizable: tuple[tuple[str, str], ...] = ()
    resized: tuple[tuple[str, str], ...] = ()
    unlike: tuple[tuple[str, str, str], ...] = ()
    superseded: tuple[tuple[str, str], ...] = ()
    labels: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    num_tensors: int = 0
    num_kept: int = 0
    coordinate: Mapping[str, int] = field(default_factory=dict)
    early: frozenset[str] = frozenset()
    has_early: bool = False
    deliver_early: Callable[[], None] = field(default=lambda: None)
    deliver: Callable[[], None] = field(default=lambda: None)
