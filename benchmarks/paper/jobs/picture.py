"""The factors of all tables beside those of the papers, in one picture."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.pictures import draw_both

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

OURS, PAPER = "#2757b8", "#b0722b"


def draw_factors(tables: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw all rows that have a factor here and in a paper."""
    rows = [
        (f"{table['name']}: {row['what']}", row)
        for table in tables
        for row in table["rows"]
        if row["factor"] and row["paper"]
    ]
    if rows:
        draw_both(partial(_factors, rows), path, dpi=100)


def _factors(rows: Sequence[tuple[str, dict[str, Any]]]) -> Figure:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.24 * len(rows)), layout="constrained")
    for place, (_, row) in enumerate(rows):
        first = place == 0
        ends = [min(row["paper"]), max(row["paper"])]
        axes.plot(ends, [place] * 2, "-|", color=PAPER, lw=4, ms=9, label="the paper" if first else None)
        axes.plot(row["factor_least_and_most"], [place] * 2, "-", color=OURS, lw=1.5)
        axes.plot(row["factor"], place, "o", color=OURS, ms=5, label="here" if first else None)
    axes.axvline(1.0, color="0.6", lw=1)
    axes.set(xscale="log", xlabel="times better than the contestant; more is better")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", color="0.6", alpha=0.3)
    axes.legend(fontsize=7)
    return figure
