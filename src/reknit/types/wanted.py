"""What a rank wants of a checkpoint, and what it will do with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.types.shard import Shard


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a rank wants of a checkpoint, and what it will do with it.

    `shards`: as in `Holdings`, but `data` is the writable memory to fill; `replicas` plays no part yet.
    `aliases`: (item, fqn, of) of saved tensors that the target ties to the wanted tensor `of` of the item.
    `blobs`: (item, fqn) of saved shared values that this rank takes.
    `own`: (item, fqn) of values that this rank saved for itself and takes back.
    `missing`: (item, fqn, why) of what the target needs and the catalog does not have.
    `mismatched`: (item, fqn, why) of what the catalog has in a form that the target cannot take.
    `notes`: (item, fqn, what) of what could not be restored by design, such as a random state after a change
    of world.
    `deliver`: called with nothing once every byte has arrived; puts values into the live objects.  Until then
    nothing live has changed but the memory behind `shards`.
    """

    items: tuple[str, ...]
    shards: tuple[Shard, ...] = ()
    aliases: tuple[tuple[str, str, str], ...] = ()
    blobs: tuple[tuple[str, str], ...] = ()
    missing: tuple[tuple[str, str, str], ...] = ()
    mismatched: tuple[tuple[str, str, str], ...] = ()
    notes: tuple[tuple[str, str, str], ...] = ()
    own: tuple[tuple[str, str], ...] = ()
    deliver: Callable[[], None] = field(default=lambda: None)
