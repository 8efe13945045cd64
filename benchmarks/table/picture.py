"""The table as a picture: how far is reknit from the best rival, and from the limit?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OTHERS = (("rival", "the best rival", "o"), ("limit", "the limit", "|"))


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw reknit's figure in each row over that of the best rival and over the limit."""
    import matplotlib as mpl

    mpl.use("agg")
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
    axes.grid(axis="x", color="0.9")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
