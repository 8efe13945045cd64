"""Do the measured ratios meet their aims?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

Row = tuple[str, float | None, str, float | None]
"""A quantity, its value, ``"<="`` or ``">="``, and its aim; None for a value that was not measured."""


def ratio(over: float | None, under: float | None) -> float | None:
    return round(over / under, 3) if over is not None and under else None


def judged(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return every value with its aim and whether the aim is met, None if it cannot be decided."""
    return [
        {
            "what": what,
            "value": value,
            "aim": None if aim is None else f"{sign} {aim}",
            "met": _met(value, sign, aim),
        }
        for what, value, sign, aim in rows
    ]


def _met(value: float | None, sign: str, aim: float | None) -> bool | None:
    if value is None or aim is None:
        return None
    return value <= aim if sign == "<=" else value >= aim


def show(judgements: list[dict[str, Any]]) -> None:
    """Print every value with its aim to stderr."""
    width = max((len(row["what"]) for row in judgements), default=0)
    for row in judgements:
        met = {True: "met", False: "NOT met", None: "not measured"}[row["met"]]
        if row["value"] is not None and row["aim"] is None:
            met = "for information"
        aim = row["aim"] or "-"
        print(f"{row['what']:{width}s} {row['value']!s:>9s}   aim {aim:>9s}   {met}", file=sys.stderr)
