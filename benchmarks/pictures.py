"""Pictures of results, each for light pages and for dark ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.figure import Figure

GROUND = "#131416"
"""The ground of a dark page."""


def draw_both(draw: Callable[[], Figure], path: Path, dpi: int) -> None:
    """Write the figure of `draw` to `NAME.png`, and with light lines on a dark ground to `NAME-dark.png`."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    dark = {"figure.facecolor": GROUND, "axes.facecolor": GROUND, "savefig.facecolor": GROUND}
    for suffix, styles in (("", ()), ("-dark", ("dark_background", dark))):
        with pyplot.style.context(["default", *styles]):
            figure = draw()
            figure.savefig(path.with_stem(path.stem + suffix), dpi=dpi, metadata={"Software": None})
            pyplot.close(figure)
