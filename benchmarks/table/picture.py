"""The table as pictures: reknit beside its rivals and the limit, and the time that training stops."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.pictures import draw_both

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

COLOURS = {"ours": "#2757b8", "rival": "#b0722b", "limit": "#8c959f"}

OTHERS = (("rival", "the best rival", "o"), ("limit", "the limit", "|"))


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw reknit's figure in each row over that of the best rival and over the limit."""
    draw_both(partial(figure_of, rows), path, dpi=100)


def draw_stall(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw for how long a save in the background stops training, with each library."""
    draw_both(partial(stall_of, rows), path, dpi=100)


def stall_of(rows: Sequence[dict[str, Any]]) -> Figure:
    """Return a figure with a panel for the first save of a process, and one for later saves."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
    for axes, kind in zip(panels, ("first", "later"), strict=True):
        blocked = [row for row in rows if row["row"].startswith(kind) and "blocked" in row["row"]]
        found = {
            name: each for row in blocked for name, each in row["all"].items() if each["kind"] != "beside"
        }
        if not found:
            axes.set_axis_off()
            continue
        bars = sorted(found.items(), key=lambda bar: -bar[1]["median"])
        names = [name.replace(", stager", "\nstager") for name, _ in bars]
        seconds = [each["median"] for _, each in bars]
        drawn = axes.barh(names, seconds, color=[COLOURS[each["kind"]] for _, each in bars])
        axes.bar_label(drawn, [f"{value:.2f}" for value in seconds], padding=3, fontsize=7)
        axes.set(xlim=(0, 1.12 * max(seconds)), title=f"{kind} save", xlabel="seconds that training stops")
        axes.tick_params(labelsize=7)
    return figure


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
