"""A checkpoint under other names and in other cuts: its tensors and values, and their places.

Nothing is copied.  The wanted part of a target becomes wanted parts of the sources, with views of the same
memory.  So only the needed bytes are read, and the rest of a load does not depend on transforms.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import structs
from msgspec.structs import replace

from reknit.transforms.base import Made
from reknit.transforms.cuts import aligned, resized
from reknit.transforms.step import apply_rule
from reknit.types.box import Box
from reknit.types.dtype import converts
from reknit.types.shard import Shard, TensorSpec, full_name
from reknit.types.wanted import Wanted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reknit.errors import MismatchError
    from reknit.transforms.base import Interleaving, Piece, Rule, Shape
    from reknit.transforms.step import Name, SourcePart, Step
    from reknit.types.manifest import Catalog


class _Found(NamedTuple):
    """Results of the way back: memory to fill in the end, and tensors that have to be equal.

    `blanks` become zero.  `moves` are places in memory, and elements of other memory that belong there.
    """

    blanks: list[Any]
    equal: dict[tuple[str, str, str, str], None]
    moves: list[tuple[Any, Any]]

    def fill(self) -> None:
        """Fill the memory that no bytes of the checkpoint go to."""
        for blank in self.blanks:
            blank[...] = 0
        for place, elements in reversed(self.moves):  # the last were found nearest to the checkpoint
            place[...] = elements


class _Runs(NamedTuple):
    """The pieces of a target in the order of their places along a dimension in which none overlap.

    Experts are stacked from hundreds of pieces, and each is wanted for itself.  `dim` is None if pieces
    overlap along every dimension that was tried.
    """

    dim: int | None
    starts: list[int]
    pieces: Sequence[Piece]

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> _Runs:
        """Put pieces in order."""
        one, other = (piece.target_box.offsets for piece in pieces[:2])
        dim = next((d for d, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if dim is None:
            return cls(None, [], pieces)
        ordered = sorted(pieces, key=lambda piece: piece.target_box.offsets[dim])
        starts = [piece.target_box.offsets[dim] for piece in ordered]
        ends = [start + piece.target_box.lengths[dim] for start, piece in zip(starts, ordered, strict=True)]
        apart = all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        return cls(dim, starts, ordered) if apart else cls(None, [], pieces)

    def touched(self, box: Box) -> Sequence[Piece]:
        """Return the pieces that a box may touch."""
        if self.dim is None:
            return self.pieces
        start, length = box.offsets[self.dim], box.lengths[self.dim]
        return self.pieces[
            max(bisect_right(self.starts, start) - 1, 0) : bisect_left(self.starts, start + length)
        ]


@dataclass
class Transformed:
    """A checkpoint after all rules; `catalog` has the names, shapes and values of the state."""

    catalog: Catalog
    _steps: list[Step]
    _specs: dict[Name, TensorSpec]
    _runs: dict[int, _Runs] = field(default_factory=dict)

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

    def sources_of(self, item: str, boxes: Sequence[tuple[str, Box, Any]]) -> Wanted:
        """Return the parts of the checkpoint itself that fill arrays with boxes of the tensors of an item."""
        made = self.catalog.tensors[item]
        shards = tuple(Shard(item, name, made[name], box, None, array) for name, box, array in boxes)
        return self.back(Wanted((item,), shards))

    def back(self, wanted: Wanted) -> Wanted:
        """Return the wanted parts in terms of the checkpoint itself."""
        shards: list[Shard] = []
        labels: list[str] = []
        taken: dict[Name, None] = {}
        resized: dict[str, str] = {}
        found, early = _Found([], {}, []), _Found([], {}, [])
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
            early.fill()
            wanted.deliver_early()

        def deliver() -> None:
            found.fill()
            wanted.deliver()

        return replace(
            wanted,
            shards=tuple(shards),
            labels=tuple(labels),
            aliases=(*(saved for alias in wanted.aliases if (saved := self._saved(alias))), *found.equal),
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

    def _saved(self, alias: tuple[str, str, str, str]) -> tuple[str, str, str, str] | None:
        """Return two tensors that are one in the target by their saved names, None if rules changed more."""
        one, other = self._renamed(alias[:2]), self._renamed(alias[2:])
        return None if one is None or other is None else (*one, *other)

    def _renamed(self, name: Name) -> Name | None:
        """Return the saved name of a tensor, None if rules changed more than its name."""
        for step in reversed(self._steps):
            if (part := step.tensors.get(name)) is not None:
                box = Box.whole(part.shapes[0])
                if part.made != Made(box.lengths, (aligned(0, box, box),)):
                    return None
                name = part.names[0]
        return name

    def _is_made(self, alias: tuple[str, str, str, str]) -> bool:
        """Return whether a rule made one of two tensors that are one in the target."""
        return any(name in step.tensors for step in self._steps for name in (alias[:2], alias[2:]))

    def _untied(self, aliases: Iterable[tuple[str, str, str, str]]) -> Iterator[tuple[str, str, str]]:
        """Yield tensors that are one in the target and that rules make of different ones, perhaps unequal."""
        for item, fqn, *of in filter(self._is_made, aliases):
            tied = (of[0], of[1])
            renamed = self._saved((item, fqn, *tied))
            if renamed is None and self.origins((item, fqn)) != self.origins(tied):
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
        if source.made.interleaving is not None and shard.box.numel:
            whole, moves = _reordered(shard, source.made.interleaving, source)
            found.moves.extend(moves if self._is_filled(shard, depth) else ())
            yield from self._back(whole, depth - 1, found)
        for piece in self._pieces(source.made, shard.box):
            if (part := _part(shard, piece, source)) is not None:
                yield from self._back(part, depth - 1, found)

    def _pieces(self, made: Made, box: Box) -> Sequence[Piece]:
        """Return the pieces of a target that a box may touch."""
        if len(made.pieces) < 2 or not box.numel:
            return made.pieces
        runs = self._runs.get(id(made))  # the steps keep it alive
        if runs is None:
            runs = self._runs[id(made)] = _Runs.of(made.pieces)
        return runs.touched(box)

    def _is_filled(self, shard: Shard, depth: int) -> bool:
        """Return whether a shard is filled: a lenient load skips shards whose dtype does not fit."""
        saved = self._dtype((shard.item, shard.fqn), depth)
        return saved == shard.spec.dtype or (self.catalog.terms.cast and converts(saved, shard.spec.dtype))

    def _dtype(self, name: Name, depth: int) -> str:
        """Return the dtype of a tensor in the checkpoint, by a name that it has after `depth` rules."""
        for step in reversed(self._steps[:depth]):  # all sources of a tensor have its dtype
            name = step.sources(name, tensors=True)[0]
        return self._specs[name].dtype


def _resized(made: Shape, wanted: Shape) -> str:
    """Return the warning about a tensor that has another shape: the part that is taken."""
    taken = Box.whole(tuple(map(min, made, wanted)))
    return f"transforms make shape {list(made)} of the saved tensor, wanted {list(wanted)}: took {taken}"


def _reordered(
    shard: Shard, interleaving: Interleaving, source: SourcePart
) -> tuple[Shard, list[tuple[Any, Any]]]:
    """Return the part of a source with all elements of a shard, in new memory, and the moves from there."""
    data, dim = shard.data, interleaving.dim
    start = shard.box.offsets[dim]
    stop = start + shard.box.lengths[dim]
    first, last = interleaving.needed(start, stop)
    box = Box(resized(shard.box.offsets, dim, first), resized(shard.box.lengths, dim, last - first))
    memory = data.new_empty(box.lengths) if hasattr(data, "new_empty") else np.empty(box.lengths, data.dtype)
    item, fqn = source.names[0]
    moves = [(data[_along(dim, to)], memory[_along(dim, of)]) for to, of in interleaving.moves(start, stop)]
    spec = TensorSpec(source.shapes[0], shard.spec.dtype)
    return Shard(item, fqn, spec, box, shard.replicas, memory), moves


def _along(dim: int, places: slice) -> tuple[slice, ...]:
    """Return the index of some places along a dimension."""
    return (*(slice(None),) * dim, places)


def _part(shard: Shard, piece: Piece, source: SourcePart) -> Shard | None:
    """Return the part of a source that one piece puts into a shard, None without such a part."""
    common = shard.box.intersect(piece.target_box)
    if common is None and not (shard.box.numel or piece.target_box.numel):
        common = shard.box  # a tensor without elements
    if common is None:
        return None
    box = piece.source_of(common)
    data = shard.data
    if common != shard.box:
        data = data[common.relative_to(shard.box.offsets).slices()]
    kept = [axis for axis in piece.axes if axis is not None]
    order = kept + [axis for axis in range(common.ndim) if axis not in kept]
    if order != sorted(order):
        data = data.permute(order) if hasattr(data, "permute") else data.transpose(order)
    if tuple(data.shape) != box.lengths:
        data = data.reshape(box.lengths)  # a view: only dimensions of length 1 come and go
    item, fqn = source.names[piece.source]
    spec = TensorSpec(source.shapes[piece.source], shard.spec.dtype)
    return Shard(item, fqn, spec, box, shard.replicas, data)
