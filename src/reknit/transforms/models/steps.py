"""The rules in maps: all may match nothing, since a load finds missing and unexpected tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.transforms.cuts import Cuts, Fuse, Split, Stack, Unstack
from reknit.transforms.pattern import Pattern
from reknit.transforms.rules import Interleave, Rename, Resize, Transpose

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.transforms.base import Rule


def renamed(names: Mapping[str, str], before: str = "", after: str = "") -> list[Rule]:
    """Return the rules for other names, each with its prefixes `before` and `after`."""
    return [
        Rename((Pattern(before + old),), (Pattern(after + new),), optional=True) for old, new in names.items()
    ]


def split(source: str, targets: Sequence[str], parts: Sequence[int], repeat: int = 1) -> Rule:
    """Return the rule that cuts the rows of a tensor."""
    both = (Pattern(source),), tuple(map(Pattern, targets))
    return Split(*both, Cuts(0, tuple(parts), repeat), optional=True)


def fuse(sources: Sequence[str], target: str, dim: int) -> Rule:
    """Return the rule that joins tensors of the same shape along a dimension."""
    both = tuple(map(Pattern, sources)), (Pattern(target),)
    return Fuse(*both, Cuts(dim, (1,) * len(sources), 1), optional=True)


def stack(source: str, target: str) -> Rule:
    """Return the rule that joins the tensors of all experts `e`."""
    return Stack(Pattern(source), Pattern(target), "e", optional=True)


def unstack(source: str, target: str) -> Rule:
    """Return the rule that takes a tensor of all experts `e` apart."""
    return Unstack(Pattern(source), Pattern(target), "e", optional=True)


def transpose(name: str) -> Rule:
    """Return the rule that exchanges the rows and columns of every expert."""
    both = (Pattern(name),)
    return Transpose(both, both, (0, 2, 1), optional=True)


def in_turns(name: str, dim: int, *, apart: bool = False, repeat: int = 1) -> Rule:
    """Return the rule that interleaves two halves, or lays them one after the other (`apart`)."""
    both = (Pattern(name),)
    return Interleave(both, both, dim, 2, repeat, apart, optional=True)


def trim(name: str, size: int, padded: int | None) -> Rule:
    """Return the rule that removes the padding of a vocabulary."""
    both = (Pattern(name),)
    return Resize(both, both, size, 0, grows=False, back=padded, optional=True)
