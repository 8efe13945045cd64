"""The rule for whole names, ``item/fqn``, of all that a checkpoint holds: tensors and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from reknit.errors import UsageError
from reknit.transforms.base import check_expression

if TYPE_CHECKING:
    from reknit.transforms.base import Rule


@dataclass(frozen=True)
class Names:
    """Other names: first the longest prefix, or the name itself, in `rename`, then each pair of `rewrite`."""

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


def split_rules(rules: Sequence[Any]) -> tuple[Names | None, list[Rule]]:
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
