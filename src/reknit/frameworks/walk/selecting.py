"""The names of a checkpoint that a load takes, and the forms that they may have."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from reknit.frameworks.walk.rank_catalog import RankCatalog
from reknit.frameworks.walk.walk import Walk
from reknit.types.dtype import converts
from reknit.types.shard import full_name
from reknit.types.wanted import matches

if TYPE_CHECKING:
    from reknit.frameworks.walk.walk import Place
    from reknit.types.manifest import Catalog
    from reknit.types.shard import TensorSpec


@dataclass
class Selecting(Walk):
    """A walk over the target of a load, with the terms of the load and the contents saved for this rank.

    `idle` are the patterns of the terms that no name has matched yet.
    """

    catalog: Catalog = field(kw_only=True)
    saved: RankCatalog = field(init=False)
    idle: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.saved = RankCatalog(self.catalog, self.world)
        terms = self.catalog.terms
        self.idle = tuple(dict.fromkeys((*terms.only, *terms.resizable, *terms.watched)))

    def takes(self, place: Place) -> bool:
        """Return whether to load this name; if not, the target stays as it is."""
        terms = self.catalog.terms
        if not (terms.only or self.idle):
            return True
        name = full_name(place.item, place.fqn)
        if self.idle:
            self.idle = tuple(pattern for pattern in self.idle if not fnmatchcase(name, pattern))
        return terms.takes(name)

    def may_take_below(self, place: Place) -> bool:
        """Return whether a pattern of names to load may match some name below a place."""
        below = full_name(place.item, place.fqn).rstrip("/") + "/"
        literal = [re.split(r"[*?\[]", pattern, maxsplit=1)[0] for pattern in self.catalog.terms.only]
        return any(below.startswith(start) or start.startswith(below) for start in literal)

    def names(self, place: Place) -> bool:
        """Return whether a pattern of `strict` names a place, so that the caller may want it left out."""
        return matches(full_name(place.item, place.fqn), self.catalog.terms.watched)

    def may_resize(self, place: Place) -> bool:
        """Return whether a tensor with this name may have another shape in the checkpoint."""
        patterns = self.catalog.terms.resizable
        return bool(patterns) and matches(full_name(place.item, place.fqn), patterns)

    def comes(self, place: Place, spec: TensorSpec) -> bool:
        """Return whether the load fills a tensor with this name, as a whole or, if resized, in part."""
        saved = self.saved.spec(place)
        if saved is None or self.is_kept(place):
            return saved == spec
        alike = len(saved.shape) == len(spec.shape) and self.may_resize(place)
        return (alike or saved.shape == spec.shape) and self.converts_to(saved, spec)

    def converts_to(self, saved: TensorSpec, wanted: TensorSpec) -> bool:
        """Return whether a tensor saved in one dtype may be loaded into another."""
        return saved.dtype == wanted.dtype or (
            self.catalog.terms.cast and converts(saved.dtype, wanted.dtype)
        )

    def is_kept(self, place: Place) -> bool:
        """Return whether the checkpoint stores a tensor for each rank separately."""
        return place.fqn not in self.catalog.tensors.get(place.item, {})
