"""Draw maps of boxes: the bytes of a file, the layers of a program, the processes of a host.

A source begins with `boxes WIDTH HEIGHT`.  Lengths are pixels.  `<br/>` begins a line of a text,
which may be empty.

    box NAME X Y WIDTH HEIGHT KIND: TEXT    KIND is head, part, frame (dashed, with its text on top) or text
    row Y HEIGHT LABEL: TEXT | TEXT         boxes side by side, as wide as their texts need
    arrow FROM TO: TEXT                     an arrow between two boxes; `both` has two heads
    zoom FROM TO                            the second box is the inside of the first
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape

from docs.diagrams.canvas import BOLD, LETTER, LINE, MARGIN, picture

if TYPE_CHECKING:
    from docs.diagrams.canvas import Palette

LABEL, GAP = 42, 6

FIRST = re.compile(r"boxes (\d+) (\d+)")
BOX = re.compile(r"box (\w+) (\d+) (\d+) (\d+) (\d+) (head|part|frame|text):(.*)")
ROW = re.compile(r"row (\d+) (\d+) (\w+): (.+)")
ARROW = re.compile(r"(arrow|both) (\w+) (\w+):(.*)")
ZOOM = re.compile(r"zoom (\w+) (\w+)")


class Box(NamedTuple):
    """A rectangle with a text."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    text: tuple[str, ...]

    def room(self) -> float:
        """Return the width that the text leaves free; negative if it does not fit."""
        letter = BOLD if self.kind == "head" else LETTER
        return self.width - letter * max(map(len, self.text))


class Arrow(NamedTuple):
    """A line between two boxes, with a head at its end, or at both ends."""

    source: Box
    target: Box
    both: bool
    text: tuple[str, ...]

    def ends(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the ends of the line: level or upright between sides that face each other."""
        a, b = self.source, self.target
        top, bottom = max(a.y, b.y), min(a.y + a.height, b.y + b.height)
        if top < bottom:
            y = (top + bottom) / 2
            return ((a.x + a.width, y), (b.x, y)) if a.x < b.x else ((a.x, y), (b.x + b.width, y))
        x = (max(a.x, b.x) + min(a.x + a.width, b.x + b.width)) / 2
        return ((x, a.y + a.height), (x, b.y)) if a.y < b.y else ((x, a.y), (x, b.y + b.height))


class Map(NamedTuple):
    """The boxes and lines of a drawing."""

    width: int
    height: int
    boxes: list[Box]
    arrows: list[Arrow]
    zooms: list[tuple[Box, Box]]


def parse(source: str) -> Map:
    """Return the drawing that a source describes.  Raises `ValueError` with the line that is wrong."""
    first, *lines = [line.strip() for line in source.splitlines() if line.strip()]
    if (size := FIRST.fullmatch(first)) is None:
        raise ValueError(f"line 1: expected boxes WIDTH HEIGHT, not {first!r}")
    found = Map(int(size[1]), int(size[2]), [], [], [])
    names: dict[str, Box] = {}
    for number, line in enumerate(lines, 2):
        try:
            _take(line, found, names)
        except (ValueError, KeyError):
            raise ValueError(f"line {number}: {line!r} is not part of the language of boxes.py") from None
    return found


def _take(line: str, found: Map, names: dict[str, Box]) -> None:
    if match := BOX.fullmatch(line):
        x, y, width, height = map(float, match.groups()[1:5])
        names[match[1]] = Box(x, y, width, height, match[6], _lines(match[7].strip()))
        found.boxes.append(names[match[1]])
    elif match := ROW.fullmatch(line):
        found.boxes.extend(
            _row(float(match[1]), float(match[2]), match[3], match[4].split(" | "), found.width)
        )
    elif match := ARROW.fullmatch(line):
        text = _lines(match[4].strip())
        found.arrows.append(Arrow(names[match[2]], names[match[3]], match[1] == "both", text))
    elif match := ZOOM.fullmatch(line):
        found.zooms.append((names[match[1]], names[match[2]]))
    else:
        raise ValueError(line)


def _row(y: float, height: float, label: str, texts: list[str], width: int) -> list[Box]:
    """Return the boxes of a row, which share the width in proportion to their texts."""
    free = width - 2 * MARGIN - LABEL - GAP * (len(texts) - 1)
    needs = [LETTER * len(text) + 16 for text in texts]
    boxes = [Box(MARGIN, y, LABEL, height, "text", (label,))]
    x = float(MARGIN + LABEL)
    for text, need in zip(texts, needs, strict=True):
        boxes.append(Box(round(x, 1), y, round(need * free / sum(needs), 1), height, "part", (text,)))
        x += need * free / sum(needs) + GAP
    return boxes


def _lines(text: str) -> tuple[str, ...]:
    return tuple(text.split("<br/>"))


def _text(x: float, y: float, lines: tuple[str, ...], more: str) -> list[str]:
    return [
        f'<text x="{x:g}" y="{y + place * LINE:g}" {more}>{escape(line.strip())}</text>'
        for place, line in enumerate(lines)
        if line.strip()
    ]


def _box(box: Box, palette: Palette) -> list[str]:
    x, y, width, height, kind, lines = box
    if kind == "text":
        return _text(x, y + height / 2 + 4 - (len(lines) - 1) * LINE / 2, lines, 'font-style="italic"')
    fill, stroke = {
        "head": (palette.head, f'stroke="{palette.accent}"'),
        "part": (palette.frame, f'stroke="{palette.line}"'),
        "frame": ("none", f'stroke="{palette.line}" stroke-dasharray="2 2"'),
    }[kind]
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" {stroke}/>'
    if kind == "frame":
        return [shape, *_text(x + 8, y + LINE + 1, lines, 'font-weight="600"')]
    top = y + height / 2 + 4 - (len(lines) - 1) * LINE / 2
    weight = ' font-weight="600"' if kind == "head" else ""
    return [shape, *_text(x + width / 2, top, lines, f'text-anchor="middle"{weight}')]


def _arrow(arrow: Arrow, palette: Palette) -> list[str]:
    (x1, y1), (x2, y2) = arrow.ends()
    level = y1 == y2
    towards = (1 if x2 > x1 else -1, 0) if level else (0, 1 if y2 > y1 else -1)
    drawn = [f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{palette.accent}"/>']
    heads = [(x2, y2, 1), (x1, y1, -1)] if arrow.both else [(x2, y2, 1)]
    for x, y, sign in heads:
        dx, dy = towards[0] * sign, towards[1] * sign
        back = f"l{-8 * dx - 4 * dy:g} {-8 * dy - 4 * dx:g} l{8 * dy:g} {8 * dx:g} z"
        drawn.append(f'<path d="M{x:g} {y:g} {back}" fill="{palette.accent}"/>')
    lines = arrow.text
    if level:
        above = y1 - 6 - (len(lines) - 1) * LINE
        return drawn + _text((x1 + x2) / 2, above, lines, 'text-anchor="middle"')
    return drawn + _text(x1 + 8, (y1 + y2) / 2 + 4 - (len(lines) - 1) * LINE / 2, lines, "")


def _zoom(outer: Box, inner: Box, palette: Palette) -> str:
    low, high = outer.y + outer.height, inner.y
    sides = f"M{outer.x:g} {low:g} L{inner.x:g} {high:g}"
    sides += f" M{outer.x + outer.width:g} {low:g} L{inner.x + inner.width:g} {high:g}"
    return f'<path d="{sides}" stroke="{palette.line}" stroke-dasharray="3 3"/>'


def drawn(source: str, palette: Palette) -> str:
    """Return the picture of a source."""
    found = parse(source)
    elements = [_zoom(outer, inner, palette) for outer, inner in found.zooms]
    for box in found.boxes:
        elements += _box(box, palette)
    for arrow in found.arrows:
        elements += _arrow(arrow, palette)
    return picture(found.width, found.height, palette, elements)
