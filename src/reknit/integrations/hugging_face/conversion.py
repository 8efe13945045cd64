"""The rule from the files of a live model of transformers to its state, by the model's own table.

transformers 5 keeps some weights under other names and in other shapes than files have.  It stacks experts,
for example.  Each model has a table for that, of renamings and of operations.  The rule here asks
transformers for the names, and works out the boxes, so that a load reads them straight from the files.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reknit.errors import MismatchError, UsageError
from reknit.plugins.format import Binding, Box, Made, Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from reknit.plugins.format import Shape
    from reknit.transforms import Rule

_WRAPPERS = ("module", "_orig_mod")
_REMEDY = "load the folder with from_pretrained of transformers, and save that model with reknit"


def rules_for(program: str, targets: Iterable[Any]) -> list[Rule]:
    """Return the rules that the targets of a load bring along for the files of a program."""
    return conversions_of(targets) if program in ("Hugging Face", "safetensors") else []


def conversions_of(targets: Iterable[Any]) -> list[Rule]:
    """Return the rules for the files of the models of transformers among the targets of a load."""
    models = [model for target in targets if (model := _pretrained(target)) is not None]
    return [Conversion(model) for model in models]


def _pretrained(target: Any) -> Any:
    """Return the model of transformers in a target, None without one that has a table of conversions."""
    for name in _WRAPPERS:
        target = getattr(target, "_modules", {}).get(name, target)
    is_model = any(
        kind.__name__ == "PreTrainedModel" and kind.__module__ == "transformers.modeling_utils"
        for kind in type(target).__mro__
    )
    return target if is_model and "transformers.core_model_loading" in sys.modules else None


@dataclass
class Conversion:
    """The rule from the files of a model of transformers to its state."""

    model: Any
    optional: bool = True
    keeps: bool = False
    _converters: dict[Binding, tuple[Any, dict[str, int]]] = field(default_factory=dict)

    def bind(self, names: Mapping[str, Shape | None]) -> list[Binding]:
        """See `Rule`."""
        loading = sys.modules["transformers.core_model_loading"]
        renamings, converters = self._table()
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        known = self._shapes()
        prefix = self.model.base_model_prefix
        bindings: list[Binding] = []
        collected: dict[str, dict[str, list[str]]] = {}
        for name in sorted(names, key=loading.dot_natural_key):
            new, pattern = loading.rename_source_key(name, renamings, converters, prefix, known)
            if new not in known and name in known:
                new, pattern = loading.rename_source_key(name, [], [], prefix, known)
            if pattern is not None and new in known:
                collected.setdefault(new, {}).setdefault(pattern, []).append(name)
            elif new != name and new in known:
                bindings.append(Binding((name,), (new,)))
        for first, sources in collected.items():
            converter = by_pattern[next(iter(sources))]
            targets = _targets(first, converter.target_patterns)
            binding = Binding(tuple(name for each in sources.values() for name in each), targets)
            self._converters[binding] = converter, {pattern: len(each) for pattern, each in sources.items()}
            bindings.append(binding)
        return bindings

    def make(self, shapes: Sequence[Shape], binding: Binding) -> list[Made]:
        """See `Rule`."""
        parts = [_whole(number, shape) for number, shape in enumerate(shapes)]
        if binding not in self._converters:
            return parts
        converter, numbers = self._converters[binding]
        left = iter(parts)
        held = {pattern: [next(left) for _ in range(number)] for pattern, number in numbers.items()}
        for operation in converter.operations:
            if (apply := _OPERATIONS.get(type(operation).__name__)) is None or not _is_plain(operation):
                raise MismatchError(
                    f"transformers makes {binding.targets[0]} of {binding.sources[0]} by its operation "
                    f"{type(operation).__name__}, which a load does not have",
                    remedy=_REMEDY,
                )
            held = apply(held, operation, converter, [self._shapes()[name] for name in binding.targets])
        made = [each[0] for each in held.values()]
        if len(made) != len(binding.targets) or any(len(each) != 1 for each in held.values()):
            raise MismatchError(
                f"the files have {len(shapes)} tensors for {binding.targets[0]}, which do not fit it",
                remedy=_REMEDY,
            )
        return made

    def inverse(self) -> Rule:
        """See `Rule`."""
        raise UsageError("the conversion of a model of transformers has no inverse", remedy="save the model")

    def _table(self) -> tuple[list[Any], list[Any]]:
        """Return the renamings and the converters of the model."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        loading = sys.modules["transformers.core_model_loading"]
        quantizer = getattr(self.model, "hf_quantizer", None)
        table = get_model_conversion_mapping(self.model, None, quantizer)
        return (
            [one for one in table if isinstance(one, loading.WeightRenaming)],
            [one for one in table if isinstance(one, loading.WeightConverter)],
        )

    def _shapes(self) -> dict[str, Shape]:
        """Return the shapes of the parameters and buffers of the model, under each of their names."""
        model = self.model
        held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        return {name: tuple(tensor.shape) for name, tensor in held}


def _targets(first: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of all targets of a converter, given the first; they differ in the patterns alone."""
    before, _, after = first.partition(patterns[0])
    return tuple(before + pattern + after for pattern in patterns)


def _is_plain(operation: Any) -> bool:
    """Return whether the number of parts of an operation follows from the tensors alone."""
    return (
        getattr(operation, "num_shards_attribute", None) is None or type(operation).__name__ == "Concatenate"
    )


def _whole(number: int, shape: Shape) -> Made:
    box = Box.whole(shape)
    return Made(shape, (Piece(number, box, box, tuple(range(box.ndim))),))


_Held = dict[str, list[Made]]
"""The tensors under each pattern of a converter, in the order of its sources."""


def _merge(held: _Held, operation: Any, converter: Any, _: list[Shape]) -> _Held:
    """Stack the tensors of each pattern along a new dimension."""
    return {pattern: [_stacked(parts, operation.dim)] for pattern, parts in held.items()}


def _concatenate(held: _Held, operation: Any, converter: Any, _: list[Shape]) -> _Held:
    """Join all tensors, in the order of the patterns of the converter."""
    parts = [part for pattern in converter.source_patterns for part in held.get(pattern, ())]
    return {converter.target_patterns[0]: [_joined(parts, operation.dim)]}


def _chunk(held: _Held, operation: Any, converter: Any, _: list[Shape]) -> _Held:
    """Cut a tensor into equal parts, the last of which may be shorter."""
    ((part,),) = held.values()
    number = len(converter.target_patterns)
    size = -(-part.shape[operation.dim] // number)
    return _cut(part, operation.dim, [size] * number, converter)


def _split(held: _Held, operation: Any, converter: Any, shapes: list[Shape]) -> _Held:
    """Cut a tensor into parts of the sizes that the model has."""
    ((part,),) = held.values()
    return _cut(part, operation.dim, [shape[operation.dim] for shape in shapes], converter)


def _transpose(held: _Held, operation: Any, converter: Any, shapes: list[Shape]) -> _Held:
    """Swap two dimensions, which some tables do only where the shapes differ."""
    ((pattern, (part,)),) = held.items()
    if operation.check_dims and part.shape == shapes[0]:
        return held
    order = list(range(len(part.shape)))
    a, b = operation.dim0, operation.dim1
    order[a], order[b] = order[b], order[a]
    pieces = tuple(
        piece._replace(
            target_box=Box(
                _ordered(piece.target_box.offsets, order), _ordered(piece.target_box.lengths, order)
            ),
            axes=tuple(None if axis is None else order.index(axis) for axis in piece.axes),
        )
        for piece in part.pieces
    )
    return {pattern: [Made(_ordered(part.shape, order), pieces)]}


_OPERATIONS: dict[str, Callable[[_Held, Any, Any, list[Shape]], _Held]] = {
    "MergeModulelist": _merge,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "Split": _split,
    "Transpose": _transpose,
}
"""The operations of transformers that only move boxes.  Others, as for rotary embeddings, are refused."""


def _ordered(values: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(values[d] for d in order)


def _stacked(parts: list[Made], dim: int) -> Made:
    """Return tensors of one shape as one tensor, in which a new dimension is their number."""
    shape = _equal(parts, [part.shape for part in parts])
    pieces = []
    for number, part in enumerate(parts):
        for piece in part.pieces:
            box = piece.target_box
            offsets = (*box.offsets[:dim], number, *box.offsets[dim:])
            lengths = (*box.lengths[:dim], 1, *box.lengths[dim:])
            axes = tuple(axis if axis is None or axis < dim else axis + 1 for axis in piece.axes)
            pieces.append(piece._replace(target_box=Box(offsets, lengths), axes=axes))
    return Made((*shape[:dim], len(parts), *shape[dim:]), tuple(pieces))


def _joined(parts: list[Made], dim: int) -> Made:
    """Return tensors as one, one after the other along a dimension."""
    rest = _equal(parts, [_resized(part.shape, dim, 0) for part in parts])
    pieces, start = [], 0
    for part in parts:
        for piece in part.pieces:
            offsets = piece.target_box.offsets
            box = Box(_resized(offsets, dim, offsets[dim] + start), piece.target_box.lengths)
            pieces.append(piece._replace(target_box=box))
        start += part.shape[dim]
    return Made(_resized(rest, dim, start), tuple(pieces))


def _equal(parts: list[Made], shapes: list[Shape]) -> Shape:
    """Return the only shape of several.  Raises `MismatchError` for different ones."""
    if len({*shapes}) != 1:
        given = ", ".join(str(list(part.shape)) for part in parts[:8])
        raise MismatchError(f"tensors of the shapes {given} cannot become one", remedy=_REMEDY)
    return shapes[0]


def _cut(part: Made, dim: int, sizes: list[int], converter: Any) -> _Held:
    """Return the parts of a tensor along a dimension, by the target patterns of the converter."""
    if part.shape[dim] > sum(sizes):
        raise MismatchError(
            f"a tensor of the shape {list(part.shape)} cannot be cut into {sizes} along dimension {dim}",
            remedy=_REMEDY,
        )
    held: _Held = {}
    start = 0
    for pattern, size in zip(converter.target_patterns, sizes, strict=True):
        size = min(size, part.shape[dim] - start)
        shape = _resized(part.shape, dim, size)
        run = Box(_resized((0,) * len(shape), dim, start), shape)
        pieces = (_piece_in(piece, run) for piece in part.pieces)
        held[pattern] = [Made(shape, tuple(piece for piece in pieces if piece is not None))]
        start += size
    return held


def _piece_in(piece: Piece, box: Box) -> Piece | None:
    """Return the part of a piece in a box of its target, which becomes the whole target; None without one."""
    common = piece.target_box.intersect(box)
    if common is None:
        return None
    return Piece(piece.source, piece.source_of(common), common.relative_to(box.offsets), piece.axes)


def _resized(shape: Shape, dim: int, length: int) -> Shape:
    """Return a shape with another length along a dimension."""
    return (*shape[:dim], length, *shape[dim + 1 :])
