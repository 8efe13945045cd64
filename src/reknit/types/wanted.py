"""What a rank wants of a checkpoint, and what it will do with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.types.shard import Shard


RESIZE = " (LoadOptions(allow_shape_mismatch=...) takes what both have)"
"""What is said of a tensor whose shape differs, in as many dimensions, from the one that was saved."""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a name (`full_name`) is one that the patterns mean."""
    return bool(patterns) and any(fnmatchcase(name, pattern) for pattern in patterns)


def selects(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether the last pattern that matches a name selects it; one that begins with ``!`` does not."""
    last = next((p for p in reversed(patterns) if fnmatchcase(name, p.removeprefix("!"))), "!")
    return not last.startswith("!")


@dataclass(frozen=True, slots=True)
class Terms:
    """The options of a load that decide what is wanted.

    `only` are patterns of the names that are loaded, none for all.  `resizable` are patterns of tensors that
    may have another shape in the checkpoint.  `cast` tells whether another dtype will be converted.
    `watched` are other patterns of which it is to be found out whether they match anything.
    """

    only: tuple[str, ...] = ()
    resizable: tuple[str, ...] = ()
    cast: bool = False
    watched: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        """Tell whether what has this name is loaded."""
        return not self.only or matches(name, self.only)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a rank wants of a checkpoint, and what it will do with it.

    `shards`: as in `Holdings`, but `data` is the writable memory to fill; `replicas` plays no part yet.
    `aliases`: (item, fqn, item, fqn) of saved tensors, and of the wanted tensor that is the same in the
    target, or stands there for both: they have to be equal.
    `blobs`: (item, fqn) of saved shared values that this rank takes.
    `own`: (item, fqn) of values that this rank saved for itself and takes back.
    `missing`: (item, fqn, why) of what the target needs and the catalog does not have.
    `mismatched`: (item, fqn, why) of what the catalog has in a form that the target cannot take.
    `notes`: (item, fqn, what) of what could not be restored by design, such as a random state after a change
    of world.
    `resizable`: (item, fqn) of wanted tensors that take what they have in common with a saved one of another
    shape.
    `resized`: (name, what) of wanted tensors whose shards say no more that the saved one has another shape.
    `superseded`: (item, fqn) of what was saved and is not needed: another tensor says more, or it is dropped.
    `labels`: the name of each shard in messages to users, where that is not its own.
    `idle`: patterns of `Terms`, of any kind, that match no name of this rank's target.
    `num_tensors`: how many tensors of the target are to be loaded, `num_kept` how many of them come
    from values, of `own` or `blobs`.
    `coordinate`: as in `Holdings`.
    `early`: names (`full_name`) of wanted tensors whose memory is new, and for objects with a `state_dict`.
    `deliver_early`: called with nothing once these have arrived, before any other memory is filled; gives
    objects their states, and may raise an error.  `has_early` tells whether it does anything.
    `deliver`: called with nothing once every byte has arrived; puts values into the live objects.  Until then
    nothing live has changed but the memory behind `shards`.
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
