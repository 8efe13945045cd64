"""The table as a picture: how far is reknit from the best rival, and from the limit?"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.pictures import draw_both

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

OTHERS = (("rival", "the best rival", "o"), ("limit", "the limit", "|"))


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw reknit's figure in each row over that of the best rival and over the limit."""
    draw_both(partial(figure_of, rows), path, dpi=100)


def figure_of(rows: Sequence[dict[str, Any]]) -> Figure:
    """Return a figure with a line for each row."""
    from matplotlib import pyplot

    rows = [row for row in rows if any(row[f"ours_over_{kind}"] is not None for kind, _, _ in OTHERS)]
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.3 * len(rows)), layout="constrained")
    places = range(len(rows), 0, -1)
    for kind, name, marker in OTHERS:
        points = [
            (row[f"ours_over_{kind}"], place)
            for row, place in zip(rows, places, strict=True)
            if row[f"ours_over_{kind}"] is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker, ms=8, mew=2, ls="", label=f"reknit / {name}")
    axes.axvline(1.0, color="0.6", lw=1)
    axes.set(xscale="log", xlabel="less is better")
    axes.set_yticks(list(places), [row["row"] for row in rows], fontsize=8)
    axes.grid(axis="x", color="0.6", alpha=0.3)
    axes.legend(fontsize=8)
    return figure
