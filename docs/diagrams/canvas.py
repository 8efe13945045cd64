"""The colours, the letters and the frame of every diagram."""

from __future__ import annotations

from typing import NamedTuple

# Lengths are pixels.  A letter is a little wider here than in most fonts, so that texts fit with any.
LETTER, BOLD, LINE, MARGIN = 6.3, 7.0, 15, 12


class Palette(NamedTuple):
    """The colours of a drawing."""

    ground: str
    ink: str
    line: str
    accent: str
    head: str
    frame: str


PALETTES = {
    "": Palette("#ffffff", "#1f2328", "#8c959f", "#2757b8", "#eef2fb", "#f3f4f6"),
    "-dark": Palette("#131416", "#e2e5e9", "#6e7681", "#8ab0ff", "#1f2636", "#1d1f23"),
}


def picture(width: float, height: float, palette: Palette, elements: list[str]) -> str:
    """Return a picture of these elements, the first behind the others."""
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="system-ui, Segoe UI, Roboto, Helvetica, '
        f'Arial, sans-serif" font-size="12" fill="{palette.ink}">'
    )
    ground = f'<rect width="100%" height="100%" rx="8" fill="{palette.ground}"/>'
    return "\n".join([opening, ground, *elements, "</svg>", ""])
