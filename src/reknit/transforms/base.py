"""A transform as names and boxes: the new name of each entry, and where each of its boxes lies.

The rule for whole names is here too, since a load applies it without any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from reknit.errors import UsageError
from reknit.types.box import Box
from reknit.types.small import lazy_property

if TYPE_CHECKING:
    from collections.abc import Iterator


class Interleaving(NamedTuple):
    """The places of equal parts along `dim`, within groups of `parts` times `length` elements.

    On one side, the parts of a group lie one after the other.  On the other side, one element of each part
    comes in turn.  With `apart`, the target has them one after the other.
    """

    dim: int
    parts: int
    length: int
    apart: bool

    def needed(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of the source that has all elements of a range of the target."""
        group = self.parts * self.length
        first, last = start // group * group, (stop - 1) // group * group
        if first != last:
            return first, last + group
        # Within a group, row and column of the target are column and row of the source.
        columns, rows = (self.length, self.parts) if self.apart else (self.parts, self.length)
        (top, left), (bottom, right) = divmod(start - first, columns), divmod(stop - 1 - first, columns)
        if top != bottom:
            left, right = 0, columns - 1
        return first + left * rows + top, first + right * rows + bottom + 1

    def moves(self, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Yield places in a range of the target, and in the range of the source that is `needed` for it."""
        group = self.parts * self.length
        origin = self.needed(start, stop)[0]
        for first in range(start // group * group, stop, group):
            for part in range(self.parts):
                together, turns = (first + part * self.length, 1), (first + part, self.parts)
                (at, step), (of, source_step) = (together, turns) if self.apart else (turns, together)
                low = max(0, -((at - start) // step))
                high = min(self.length, -((at - stop) // step))
                if low < high:
                    yield (_places(at - start, step, low, high), _places(of - origin, source_step, low, high))


def _places(first: int, step: int, low: int, high: int) -> slice:
    return slice(first + low * step, first + (high - 1) * step + 1, step)


_FIELD = re.compile(r"\{([A-Za-z_]\w*)(\*?)\}")


@dataclass(frozen=True, repr=False)
class Pattern:
    """A template of names: ``{field}`` stands for one part of a dotted name, ``{field*}`` for one or more.

    Raises `UsageError` for braces without a field, and for a field that stands twice.
    """

    template: str

    def __post_init__(self) -> None:
        rest = _FIELD.sub("", self.template)
        if not self.template or "{" in rest or "}" in rest:
            raise UsageError(
                f"{self.template!r} is not a template of names",
                remedy="fields are written {i}, or {path*} for several parts",
            )
        if len(set(self.fields)) < len(self.fields):
            raise UsageError(
                f"{self.template!r} has a field twice", remedy="give every field a different name"
            )

    @lazy_property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields."""
        return tuple(name for name, _ in _FIELD.findall(self.template))

    @lazy_property
    def _expression(self) -> re.Pattern[str]:
        parts, end = [], 0
        for one in _FIELD.finditer(self.template):
            parts.append(re.escape(self.template[end : one.start()]))
            parts.append(f"(?P<{one[1]}>{'.+' if one[2] else '[^./]+'})")
            end = one.end()
        return re.compile("".join([*parts, re.escape(self.template[end:])]))

    def match(self, name: str) -> dict[str, str] | None:
        """Return the values of the fields in a name, or None for a name that does not match."""
        found = self._expression.fullmatch(name)
        return None if found is None else found.groupdict()

    def fill(self, fields: dict[str, str]) -> str:
        """Return the name in which the fields stand for these."""
        return _FIELD.sub(lambda field: fields[field[1]], self.template)

    def __repr__(self) -> str:
        return repr(self.template)

    def __str__(self) -> str:
        return self.template


def check_expression(expression: str, replacement: str) -> None:
    """Raise `UsageError` for anything but a regular expression with its replacement."""
    try:
        re.sub(expression, replacement, "")
    except (re.error, IndexError) as error:
        raise UsageError(
            f"{expression!r} with its replacement {replacement!r} is not a valid rewrite: {error}",
            remedy="write both as for re.sub, as raw strings",
        ) from error


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


@dataclass(frozen=True)
class Names:
    """The rule for whole names, ``item/fqn``.

    First the longest prefix in `rename`, or the name itself, has another name, then each pair of `rewrite`
    replaces a part.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    rewrite: tuple[tuple[str, str], ...] = ()
    optional: bool = False

    def __post_init__(self) -> None:
        _check_rename(self.rename)
        _check_rewrite(self.rewrite)
        object.__setattr__(self, "rename", dict(self.rename))
        object.__setattr__(self, "rewrite", tuple((old, new) for old, new in self.rewrite))

    def inverse(self) -> Names:
        """Raise `UsageError`: names may have come from any others."""
        raise UsageError("transforms.names has no inverse", remedy="write the inverse rule yourself")

    @staticmethod
    def split(rules: Sequence[Any]) -> tuple[Names | None, list[Rule]]:
        """Return the rule for whole names, if there is one, and the rules for parameters.

        Raises `UsageError` unless it is the first of all.
        """
        names, others = [rule for rule in rules if isinstance(rule, Names)], list(rules)
        if not names:
            return None, others
        if len(names) > 1 or rules[0] is not names[0]:
            raise UsageError(
                "transforms.names is the first rule, and the only one of its kind",
                remedy="put all names into one rule: names({...}, rewrite=[...]), and others after it",
            )
        return names[0], cast("list[Rule]", others[1:])


def _check_rename(rename: Any) -> None:
    """Raise `UsageError` unless names go to names, and prefixes to prefixes."""
    _require(isinstance(rename, Mapping), f"rename maps names to names, and is not a {type(rename).__name__}")
    for old, new in rename.items():
        _require(
            isinstance(old, str) and isinstance(new, str) and old != "",
            f"rename maps names to names, which {old!r}: {new!r} does not",
        )
        below = old.endswith(("/", "."))
        _require(
            not below or new == "" or new.endswith(("/", ".")),
            f"rename maps everything below the prefix {old!r} to {new!r}, which is not a prefix: "
            "end it in / or .",
        )
        _require(below or new != "", f"rename leaves {old!r} without a name")


def _check_rewrite(rewrite: Any) -> None:
    """Raise `UsageError` for anything but a list of expressions and replacements."""
    _require(
        isinstance(rewrite, (tuple, list))
        and all(
            isinstance(rule, (tuple, list)) and len(rule) == 2 and all(isinstance(part, str) for part in rule)
            for rule in rewrite
        ),
        f"rewrite is a tuple of pairs (expression, replacement), not {rewrite!r}",
    )
    for expression, replacement in rewrite:
        check_expression(expression, replacement)


def _require(ok: object, message: str) -> None:
    if not ok:
        raise UsageError(message)
