"""Which names does a rule mean?  Templates with fields, such as ``layers.{i}.weight``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from reknit.errors import UsageError
from reknit.types.lazy_property import lazy_property

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
        for field in _FIELD.finditer(self.template):
            parts.append(re.escape(self.template[end : field.start()]))
            parts.append(f"(?P<{field[1]}>{'.+' if field[2] else '[^./]+'})")
            end = field.end()
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
