"""Rules that turn the names and layouts of a checkpoint into those of a state, while it is loaded.

Give rules to `reknit.LoadOptions(transforms=[...])`; each applies to the result of the one before.  `names`
renames anything, by whole names ``item/fqn``.  The other rules take templates of the names of parameters,
without the item: ``layers.{i}.weight``, where ``{i}`` is one part of a dotted name and ``{i*}`` one or more.
Such a rule changes the optimizer states and options of a parameter like the parameter.  Only the bytes that a
rank needs are read.  With `optional` a rule may match nothing.  Ready-made rules for families of models are
in `reknit.transforms.models`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reknit.errors import UsageError, shown
from reknit.keywords import checked_call
from reknit.transforms import cuts, rules
from reknit.transforms.base import Names as Names
from reknit.transforms.base import Pattern, Rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "Rule",
    "copy",
    "deinterleave",
    "drop",
    "fuse",
    "interleave",
    "inverted",
    "names",
    "pad",
    "rename",
    "rewrite",
    "split",
    "stack",
    "transpose",
    "trim",
    "unstack",
]


@checked_call
def names(
    rename: Mapping[str, str] | None = None,
    *,
    rewrite: Sequence[tuple[str, str]] = (),
    optional: bool = False,
) -> Names:
    """Give other names ``item/fqn`` to everything: tensors, values, and ranks' own values.

    `rename` goes from names in the checkpoint to names in the state; one that ends in ``/`` or ``.`` is a
    prefix, and takes all below with it; the longest that fits counts.  `rewrite` are pairs of a regular
    expression and its replacement, as for ``re.sub``, applied one after the other to the result of `rename`.
    This is the first rule of a list, and stands only once.  Raises `UsageError`.
    """
    if not isinstance(optional, bool):
        raise UsageError(f"optional is True or False, not {shown(optional)}")
    return Names({} if rename is None else rename, tuple(rewrite), optional)


@checked_call
def rename(source: str, target: str, *, optional: bool = False) -> Rule:
    """Give another name."""
    return rules.Rename((Pattern(source),), (Pattern(target),), optional=optional)


@checked_call
def copy(source: str, target: str, *, optional: bool = False) -> Rule:
    """Give a second name, for weights that are tied in the checkpoint and not in the state."""
    return rules.Rename((Pattern(source),), (Pattern(target),), optional=optional, keeps=True)


@checked_call
def rewrite(expression: str, replacement: str, *, optional: bool = False) -> Rule:
    """Give other names by a regular expression, as `re.sub` does it."""
    return rules.Rewrite(expression, replacement, optional)


@checked_call
def drop(source: str, *, optional: bool = False) -> Rule:
    """Leave out tensors and values that the state does not use, which would otherwise be an error."""
    return rules.Drop((Pattern(source),), (), optional=optional)


@checked_call
def split(
    source: str,
    targets: Sequence[str],
    *,
    dim: int = 0,
    parts: Sequence[int] | None = None,
    repeat: int = 1,
    optional: bool = False,
) -> Rule:
    """Cut one tensor into several along `dim`.

    The tensor is `repeat` times a run of each target, in order; `parts` are how long these are in proportion,
    None for equal ones.  The query, key and value weights of grouped attention, fused group by group, are
    ``parts=(query heads per group, 1, 1), repeat=groups``.
    """
    numbers = _cuts(targets, dim, parts, repeat)
    return cuts.Split((Pattern(source),), tuple(map(Pattern, targets)), numbers, optional=optional)


@checked_call
def fuse(
    sources: Sequence[str],
    target: str,
    *,
    dim: int = 0,
    parts: Sequence[int] | None = None,
    repeat: int = 1,
    optional: bool = False,
) -> Rule:
    """Join several tensors to one along `dim`, which `split` with the same numbers takes apart."""
    numbers = _cuts(sources, dim, parts, repeat)
    return cuts.Fuse(tuple(map(Pattern, sources)), (Pattern(target),), numbers, optional=optional)


def _cuts(names: Sequence[str], dim: int, parts: Sequence[int] | None, repeat: int) -> cuts.Cuts:
    if isinstance(names, str) or not names:
        raise UsageError(f"{names!r} is not a list of names", remedy="give the names as a list")
    given = (1,) * len(names) if parts is None else tuple(parts)
    if len(given) != len(names):
        raise UsageError(
            f"{len(given)} parts were given for {len(names)} tensors", remedy="give one for each"
        )
    return cuts.Cuts(dim, given, repeat)


@checked_call
def transpose(
    source: str, target: str | None = None, *, order: Sequence[int] = (1, 0), optional: bool = False
) -> Rule:
    """Put the dimensions into another order: dimension `d` of the target is `order[d]` of the source."""
    return rules.Transpose((Pattern(source),), (Pattern(target or source),), tuple(order), optional=optional)


@checked_call
def stack(source: str, target: str, *, over: str, dim: int = 0, optional: bool = False) -> Rule:
    """Join tensors numbered by the field `over` (layers, experts) to one with a dimension more."""
    return cuts.Stack(Pattern(source), Pattern(target), over, dim, optional)


@checked_call
def unstack(source: str, target: str, *, over: str, dim: int = 0, optional: bool = False) -> Rule:
    """Take a tensor apart along `dim`, into one for each number in the field `over`."""
    return cuts.Unstack(Pattern(source), Pattern(target), over, dim, optional)


@checked_call
def pad(source: str, size: int, *, dim: int = 0, was: int | None = None, optional: bool = False) -> Rule:
    """Make a tensor longer, with zeros.  `was` is its length, which only `inverted` needs."""
    return _resize(source, size, dim, was, optional=optional, grows=True)


@checked_call
def trim(source: str, size: int, *, dim: int = 0, was: int | None = None, optional: bool = False) -> Rule:
    """Leave out the end of a tensor, which is padding.  `was` is its length, which only `inverted` needs."""
    return _resize(source, size, dim, was, optional=optional, grows=False)


def _resize(source: str, size: int, dim: int, was: int | None, *, grows: bool, optional: bool) -> Rule:
    both = (Pattern(source),)
    return rules.Resize(both, both, size, dim, grows=grows, back=was, optional=optional)


@checked_call
def interleave(
    source: str,
    target: str | None = None,
    *,
    dim: int = 0,
    parts: int = 2,
    repeat: int = 1,
    optional: bool = False,
) -> Rule:
    """Take one element along `dim` of each of several equal parts in turn, where the parts follow each other.

    The tensor is `repeat` times `parts` parts.  With two parts for each head, rotary embeddings of halves
    become those of pairs.
    """
    return _interleave(source, target, (dim, parts, repeat), optional=optional, apart=False)


@checked_call
def deinterleave(
    source: str,
    target: str | None = None,
    *,
    dim: int = 0,
    parts: int = 2,
    repeat: int = 1,
    optional: bool = False,
) -> Rule:
    """Lay parts one after the other that `interleave` with the same numbers interleaves."""
    return _interleave(source, target, (dim, parts, repeat), optional=optional, apart=True)


def _interleave(
    source: str, target: str | None, numbers: tuple[int, int, int], *, optional: bool, apart: bool
) -> Rule:
    both = (Pattern(source),), (Pattern(target or source),)
    return rules.Interleave(*both, *numbers, apart=apart, optional=optional)


@checked_call
def inverted(steps: Iterable[Rule]) -> list[Rule]:
    """Return the rules that lead back.  Raises `UsageError` where one has no inverse."""
    return [step.inverse() for step in reversed(list(steps))]


def __getattr__(name: str) -> Any:
    if name == "models":
        return import_module("reknit.transforms.models")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
