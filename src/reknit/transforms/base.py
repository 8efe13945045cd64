"""What is a transform?  Which names become which, and which box of each lies where in the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from reknit.types.box import Box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.transforms.interleaving import Interleaving

Shape = tuple[int, ...]


class Binding(NamedTuple):
    """Names that become other names, together."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]


class Piece(NamedTuple):
    """A box of a source, and where its elements are in a target.

    Dimension `d` of the source is dimension `axes[d]` of the target, or has length 1 in the box where that is
    None; dimensions of the target that no `axes` names have length 1 in `target_box`.
    """

    source: int
    source_box: Box
    target_box: Box
    axes: tuple[int | None, ...]

    def source_of(self, part: Box) -> Box:
        """Return the box of the source whose elements are in a part of `target_box`."""
        skipped = part.relative_to(self.target_box.offsets).offsets
        offsets, lengths = list(self.source_box.offsets), list(self.source_box.lengths)
        for d, axis in enumerate(self.axes):
            if axis is not None:
                offsets[d] += skipped[axis]
                lengths[d] = part.lengths[axis]
        return Box(tuple(offsets), tuple(lengths))


class Made(NamedTuple):
    """A target: its shape, and its pieces.  The boxes in `blank` come from nowhere, and are zero.

    With `interleaving`, the target has the shape of its only source, and its elements in another order.
    """

    shape: Shape
    pieces: tuple[Piece, ...]
    blank: tuple[Box, ...] = ()
    interleaving: Interleaving | None = None


class Rule(Protocol):
    """A step from the names and shapes of a checkpoint to those of a state.

    Names are those of parameters: a rule for one applies to its optimizer states and options too.
    """

    @property
    def optional(self) -> bool:
        """Whether the rule may match nothing."""

    @property
    def keeps(self) -> bool:
        """Whether the sources stay under their own names too."""

    def bind(self, names: Mapping[str, Shape | None]) -> list[Binding]:
        """Return the bindings of old to new names; the shape is None where no tensor has the name.

        Sources need not all be among the names.  Raises `MismatchError` for names that the rule is not for.
        """

    def make(self, shapes: Sequence[Shape], binding: Binding) -> list[Made]:
        """Return the targets of a binding whose sources have these shapes.

        Raises `MismatchError` for shapes that the rule is not for.
        """

    def inverse(self) -> Rule:
        """Return the rule that leads back.  Raises `UsageError` where none does."""
