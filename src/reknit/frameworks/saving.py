"""What does a walk through the state gather to save?"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from reknit.frameworks.walk import Walk
from reknit.types.shard import Alias, Blob, Holdings, Shard

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from reknit.frameworks.walk import Place, Replicas, View


@dataclass
class Saving(Walk):
    """What a walk gathers to save."""

    shards: list[Shard] = field(default_factory=list)
    blobs: list[Blob] = field(default_factory=list)
    aliases: list[Alias] = field(default_factory=list)
    _first: dict[Hashable, str] = field(default_factory=dict)

    def visit(self, value: Any, place: Place) -> None:
        """Collect a value, whatever it is."""
        self.adapter(value).collect(value, place, self)

    def tensor(self, tensor: Any, place: Place, replicas: Replicas | EllipsisType = ...) -> None:
        """Collect a tensor; `replicas` says more than the tensor itself can know."""
        self.view(self.look(tensor, place, fill=False), place, tensor, replicas)

    def view(self, view: View, place: Place, tensor: Any, replicas: Replicas | EllipsisType = ...) -> None:
        """Collect a tensor that was looked at already."""
        if not self.claim_name(place, ("tensor", view.memory), tensor):
            return
        first = self._first.setdefault((place.item, view.memory), place.fqn)
        if first != place.fqn:
            self.aliases.append(Alias(place.item, place.fqn, first))
            return
        holders = view.replicas if isinstance(replicas, EllipsisType) else replicas
        for number, (box, data) in enumerate(view.parts):
            if view.holders is not None and isinstance(replicas, EllipsisType):
                holders = view.holders[number]
            self.shards.append(Shard(place.item, place.fqn, view.spec, box, holders, data))

    def blob(self, value: Any, place: Place, coordinate: Mapping[str, int] | None = None) -> None:
        """Collect a neutral value."""
        self.claim_name(place, ("value", object()), value)
        self.blobs.append(Blob(place.item, place.fqn, value, coordinate))

    def holdings(self) -> Holdings:
        """Return all that was collected."""
        return Holdings(tuple(self.state), tuple(self.shards), tuple(self.blobs), tuple(self.aliases))
