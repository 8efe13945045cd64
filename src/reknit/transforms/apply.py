"""A checkpoint under other names and in other cuts: its tensors and values, and their places.

Nothing is copied.  The wanted part of a target becomes wanted parts of the sources, with views of the same
memory.  So only the needed bytes are read, and the rest of a load does not depend on transforms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from reknit.transforms.step import apply_rule
from reknit.types.box import Box
from reknit.types.dtype import converts
from reknit.types.shard import Shard, TensorSpec, full_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reknit.errors import MismatchError
    from reknit.transforms.base import Piece, Rule, Shape
    from reknit.transforms.step import Name, SourcePart, Step
    from reknit.types.manifest import Catalog
    from reknit.types.wanted import Wanted


class _Found(NamedTuple):
    """Results of the way back: memory to fill with zeros in the end, and tensors that have to be equal."""

    blanks: list[Any]
    equal: dict[tuple[str, str, str, str], None]

    def clear(self) -> None:
        """Fill the memory that is to be zero."""
        for blank in self.blanks:
            blank[...] = 0


@dataclass
class Transformed:
    """A checkpoint after all rules; `catalog` has the names, shapes and values of the state."""

    catalog: Catalog
    _steps: list[Step]
    _specs: dict[Name, TensorSpec]

    @property
    def idle(self) -> dict[int, MismatchError]:
        """The errors of the rules, by number, that match nothing in the catalog and are not optional."""
        return {number: step.idle for number, step in enumerate(self._steps) if step.idle is not None}

    @classmethod
    def of(cls, rules: Sequence[Rule], catalog: Catalog) -> Transformed:
        """Apply the rules, one after the other.  Raises `MismatchError` as `apply_rule` does.

        A rule that matches nothing is `idle`: the catalog is that of one rank, and others may have the names.
        """
        tensors = {(item, fqn): spec for item, all_ in catalog.tensors.items() for fqn, spec in all_.items()}
        values = {(item, fqn): value for item, all_ in catalog.blobs.items() for fqn, value in all_.items()}
        specs = dict(tensors)
        steps = [apply_rule(rule, tensors, values) for rule in rules]
        offered: dict[str, dict[str, TensorSpec]] = {item: {} for item in catalog.tensors}
        for item, fqn in sorted(tensors):
            offered[item][fqn] = tensors[item, fqn]
        blobs: dict[str, dict[str, Any]] = {item: {} for item in catalog.blobs}
        for (item, fqn), value in values.items():
            blobs[item][fqn] = value
        return cls(replace(catalog, tensors=offered, blobs=blobs), steps, specs)

    def back(self, wanted: Wanted) -> Wanted:
        """Return the wanted parts in terms of the checkpoint itself."""
        shards: list[Shard] = []
        labels: list[str] = []
        taken: dict[Name, None] = {}
        resized: dict[str, str] = {}
        found, early = _Found([], {}), _Found([], {})
        for whole in wanted.shards:
            shard, name = self._clipped(whole), full_name(whole.item, whole.fqn)
            if shard.spec.shape != whole.spec.shape:
                resized[name] = _resized(shard.spec.shape, whole.spec.shape)
            for part in self._back(shard, len(self._steps), early if name in wanted.early else found):
                shards.append(part)
                labels.append(name)
                taken[part.item, part.fqn] = None
        found.equal.update(early.equal)
        taken.update((alias[:2], None) for alias in found.equal)
        for entry in (*(alias[:2] for alias in wanted.aliases), *wanted.superseded):
            for tensors in (True, False):
                taken.update(dict.fromkeys(self.origins(entry, tensors=tensors)))
        for depth, step in enumerate(self._steps):
            for entry in step.dropped:
                for tensors in (True, False):
                    taken.update(dict.fromkeys(self.origins(entry, tensors=tensors, depth=depth)))
        blobs = dict.fromkeys(name for entry in wanted.blobs for name in self.origins(entry, tensors=False))

        def deliver_early() -> None:
            early.clear()
            wanted.deliver_early()

        def deliver() -> None:
            found.clear()
            wanted.deliver()

        return replace(
            wanted,
            shards=tuple(shards),
            labels=tuple(labels),
            aliases=(*(alias for alias in wanted.aliases if not self._is_made(alias)), *found.equal),
            mismatched=wanted.mismatched + tuple(self._untied(wanted.aliases)),
            resized=tuple(resized.items()),
            superseded=tuple(taken),
            blobs=tuple(blobs),
            deliver_early=deliver_early,
            deliver=deliver,
        )

    @property
    def made(self) -> list[Name]:
        """Names of the tensors that rules made, in an order that is the same wherever an item is known."""
        made = {name for step in self._steps for name in step.tensors}
        every = ((item, fqn) for item, all_ in self.catalog.tensors.items() for fqn in all_)
        return [name for name in every if name in made]

    def unchanged(self, name: Name) -> Name | None:
        """Return the tensor of the checkpoint that only has another name here, None if rules changed it."""
        for step in reversed(self._steps):
            if (source := step.tensors.get(name)) is None:
                continue
            made = source.made
            whole = Box.whole(made.shape)
            is_whole = [(piece.source_box, piece.target_box) for piece in made.pieces] == [(whole, whole)]
            if not is_whole or made.blank or made.pieces[0].axes != tuple(range(whole.ndim)):
                return None
            if source.shapes != (made.shape,):
                return None
            name = source.names[0]
        return name

    def origins(self, name: Name, *, tensors: bool = True, depth: int | None = None) -> list[Name]:
        """Return the names in the checkpoint of all that a tensor (or else a value) is made of.

        Its own name is the one that it has after `depth` rules, after all of them by default.
        """
        names = [name]
        for step in reversed(self._steps[:depth]):
            names = [source for one in names for source in step.sources(one, tensors=tensors)]
        return names

    def _is_made(self, alias: tuple[str, str, str, str]) -> bool:
        """Return whether a rule made one of two tensors that are one in the target."""
        return any(name in step.tensors for step in self._steps for name in (alias[:2], alias[2:]))

    def _untied(self, aliases: Iterable[tuple[str, str, str, str]]) -> Iterator[tuple[str, str, str]]:
        """Yield tensors that are one in the target and that rules make of different ones, perhaps unequal."""
        for item, fqn, *of in filter(self._is_made, aliases):
            tied = (of[0], of[1])
            if self.origins((item, fqn)) != self.origins(tied):
                why = (
                    f"it is the same tensor as {full_name(*tied)} in the target, and rules make it of another"
                )
                yield item, fqn, why

    def _clipped(self, shard: Shard) -> Shard:
        """Return the part of a shard that is in the tensor of the checkpoint, if a rule made that tensor."""
        name = (shard.item, shard.fqn)
        if not any(name in step.tensors for step in self._steps):
            return shard
        spec = TensorSpec(self.catalog.tensors[shard.item][shard.fqn].shape, shard.spec.dtype)
        whole = Box.whole(spec.shape)
        box = shard.box.intersect(whole) or Box(shard.box.offsets, (0,) * whole.ndim)
        if spec == shard.spec or box == shard.box:
            return structs.replace(shard, spec=spec)
        data = shard.data[box.relative_to(shard.box.offsets).slices()]
        return structs.replace(shard, spec=spec, box=box, memory=data)

    def _back(self, shard: Shard, depth: int, found: _Found) -> Iterator[Shard]:
        """Yield the parts of a shard by the names before `depth` rules were applied."""
        name = (shard.item, shard.fqn)
        while depth and name not in self._steps[depth - 1].tensors:
            depth -= 1
        if not depth:
            yield shard
            return
        source = self._steps[depth - 1].tensors[name]
        if not source.made.shape and len(source.names) > 1:  # counters: the first stands for all
            first, *others = self.origins(name, depth=depth)
            found.equal.update(dict.fromkeys((*other, *first) for other in others))
            item, fqn = source.names[0]
            yield from self._back(structs.replace(shard, item=item, fqn=fqn), depth - 1, found)
            return
        if self._is_filled(shard, depth):
            for blank in source.made.blank:
                if (common := shard.box.intersect(blank)) is not None:
                    found.blanks.append(shard.data[common.relative_to(shard.box.offsets).slices()])
        for piece in source.made.pieces:
            if (part := _part(shard, piece, source)) is not None:
                yield from self._back(part, depth - 1, found)

    def _is_filled(self, shard: Shard, depth: int) -> bool:
        """Return whether a shard is filled: a lenient load skips shards whose dtype does not fit."""
        saved = self._dtype((shard.item, shard.fqn), depth)
        return saved == shard.spec.dtype or (self.catalog.terms.cast and converts(saved, shard.spec.dtype))

    def _dtype(self, name: Name, depth: int) -> str:
        """Return the dtype of a tensor in the checkpoint, by a name that it has after `depth` rules."""
        return self._specs[self.origins(name, depth=depth)[0]].dtype


def _resized(made: Shape, wanted: Shape) -> str:
    """Return the warning about a tensor that has another shape: the part that is taken."""
    taken = Box.whole(tuple(map(min, made, wanted)))
    return f"transforms make shape {list(made)} of the saved tensor, wanted {list(wanted)}: took {taken}"


def _part(shard: Shard, piece: Piece, source: SourcePart) -> Shard | None:
    """Return the part of a source that one piece puts into a shard, None without such a part."""
    common = shard.box.intersect(piece.target_box)
    if common is None and not (shard.box.numel or piece.target_box.numel):
        common = shard.box  # a tensor without elements
    if common is None:
        return None
    skipped = common.relative_to(piece.target_box.offsets).offsets
    offsets, lengths = list(piece.source_box.offsets), list(piece.source_box.lengths)
    for d, axis in enumerate(piece.axes):
        if axis is not None:
            offsets[d] += skipped[axis]
            lengths[d] = common.lengths[axis]
    data = shard.data
    if common != shard.box:
        data = data[common.relative_to(shard.box.offsets).slices()]
    kept = [axis for axis in piece.axes if axis is not None]
    order = kept + [axis for axis in range(common.ndim) if axis not in kept]
    if order != sorted(order):
        data = data.permute(order) if hasattr(data, "permute") else data.transpose(order)
    if tuple(data.shape) != tuple(lengths):
        data = data.reshape(tuple(lengths))  # a view: only dimensions of length 1 come and go
    item, fqn = source.names[piece.source]
    spec = TensorSpec(source.shapes[piece.source], shard.spec.dtype)
    return Shard(item, fqn, spec, Box(tuple(offsets), tuple(lengths)), shard.replicas, data)
