"""The claims of the demo and its measurements, as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    what: str
    expected: str
    measured: str
    ok: bool


def table(checks: Sequence[Check]) -> str:
    """Return the checks as aligned text."""
    rows = [("what", "expected", "measured", "ok")]
    rows += [(c.what, c.expected, c.measured, "yes" if c.ok else "NO") for c in checks]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = tuple("-" * width for width in widths)
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (rows[0], rule, *rows[1:])
    )
    return "\n".join(line.rstrip() for line in lines)


def write_checks(path: Path, checks: Sequence[Check]) -> None:
    """Hand checks over to another process."""
    path.write_text(json.dumps([asdict(check) for check in checks]))


def read_checks(path: Path) -> list[Check]:
    """Read what `write_checks` wrote."""
    return [Check(**fields) for fields in json.loads(path.read_text())]
