"""Draw the diagrams of these pages: `NAME.mmd` and `NAME.boxes` become `NAME.svg` and `NAME-dark.svg`.

Sequences are in a part of Mermaid's language: participants, messages, notes over two, `loop` and `rect`.
`boxes.py` has the language of the others.  Run: python -m docs.diagrams.draw
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from docs.diagrams import boxes
from docs.diagrams.canvas import BOLD, LETTER, LINE, MARGIN, PALETTES, Palette, picture

HERE = Path(__file__).resolve().parent

# Lengths are pixels.
HEAD, HOOK, LEAST_GAP = 42, 26, 96

MESSAGE = re.compile(r"(?P<source>\w+)(?P<arrow>-->>|->>)(?P<target>\w+): (?P<text>.+)")
PARTICIPANT = re.compile(r"participant (?P<name>\w+) as (?P<text>.+)")
NOTE = re.compile(r"note over (?P<source>\w+),(?P<target>\w+): (?P<text>.+)")
FRAME = re.compile(r"(?P<kind>loop|rect) (?P<text>.+)")


@dataclass(frozen=True)
class Message:
    """An arrow from one participant to another, or to itself."""

    source: int
    target: int
    text: tuple[str, ...]
    answer: bool = False


@dataclass(frozen=True)
class Note:
    """A text over two participants."""

    source: int
    target: int
    text: tuple[str, ...]


@dataclass
class Frame:
    """A box around steps: a loop with a label, or a part of the diagram without one."""

    label: str
    steps: list[Message | Note | Frame] = field(default_factory=list)


@dataclass(frozen=True)
class Diagram:
    """The participants from left to right, and the steps from top to bottom."""

    participants: tuple[tuple[str, ...], ...]
    steps: tuple[Message | Note | Frame, ...]


def parse(source: str) -> Diagram:
    """Return the diagram that a text of the language describes."""
    first, *lines = [line.strip() for line in source.splitlines() if line.strip()]
    if first != "sequenceDiagram":
        raise ValueError(f"line 1: expected sequenceDiagram, not {first!r}")
    names: dict[str, int] = {}
    labels: list[tuple[str, ...]] = []
    open_frames = [Frame("")]
    for number, line in enumerate(lines, 2):
        if found := PARTICIPANT.fullmatch(line):
            names[found["name"]] = len(labels)
            labels.append(_lines(found["text"]))
        elif found := MESSAGE.fullmatch(line) or NOTE.fullmatch(line):
            ends, text = (names[found["source"]], names[found["target"]]), _lines(found["text"])
            answer = found.groupdict().get("arrow")
            open_frames[-1].steps.append(
                Note(*ends, text) if answer is None else Message(*ends, text, answer == "-->>")
            )
        elif found := FRAME.fullmatch(line):
            frame = Frame(f"loop: {found['text']}" if found["kind"] == "loop" else "")
            open_frames[-1].steps.append(frame)
            open_frames.append(frame)
        elif line == "end" and len(open_frames) > 1:
            open_frames.pop()
        else:
            raise ValueError(f"line {number}: {line!r} is not part of the language that draw.py reads")
    return Diagram(tuple(labels), tuple(open_frames[0].steps))


def _lines(text: str) -> tuple[str, ...]:
    return tuple(text.split("<br/>"))


def _width(text: tuple[str, ...], letter: float = LETTER) -> float:
    return letter * max(map(len, text))


def _flat(steps: tuple[Message | Note | Frame, ...] | list[Message | Note | Frame]) -> list[Message | Note]:
    """Return the messages and notes of steps and of the frames among them."""
    found: list[Message | Note] = []
    for step in steps:
        found += _flat(step.steps) if isinstance(step, Frame) else [step]
    return found


def columns(diagram: Diagram) -> tuple[list[float], float]:
    """Return where the lines of the participants stand, and the width of the drawing."""
    halves: list[float] = [_width(label, BOLD) / 2 + 8 for label in diagram.participants]
    gaps: list[float] = [max(LEAST_GAP, left + right + 16) for left, right in pairwise(halves)]
    gaps.append(halves[-1])
    for step in sorted(_flat(diagram.steps), key=lambda step: abs(step.target - step.source)):
        left, right = sorted((step.source, step.target))
        if left == right:
            gaps[left] = max(gaps[left], _width(step.text) + HOOK + 16)
        else:
            missing = _width(step.text) + 28 - sum(gaps[left:right])
            for place in range(left, right):
                gaps[place] += max(0.0, missing) / (right - left)
    xs: list[float] = [MARGIN + max(halves[0], 24)]
    for gap in gaps[:-1]:
        xs.append(round(xs[-1] + gap, 1))
    return xs, round(xs[-1] + gaps[-1] + MARGIN + 8)


class _Drawing:
    """The elements of a drawing, from top to bottom."""

    def __init__(self, diagram: Diagram, palette: Palette) -> None:
        self.diagram, self.palette = diagram, palette
        self.xs, self.width = columns(diagram)
        self.y: float = MARGIN
        self.behind: list[str] = []
        self.elements: list[str] = []

    def text(self, x: float, y: float, lines: tuple[str, ...], more: str = "") -> None:
        for place, line in enumerate(lines):
            self.elements.append(
                f'<text x="{x:g}" y="{y + place * LINE:g}" {more}>{escape(line.strip())}</text>'
            )

    def heads(self) -> None:
        """Draw a box with its name for each participant."""
        for x, label in zip(self.xs, self.diagram.participants, strict=True):
            width = _width(label, BOLD) + 16
            self.elements.append(
                f'<rect x="{x - width / 2:g}" y="{self.y:g}" width="{width:g}" height="{HEAD}" rx="5" '
                f'fill="{self.palette.head}" stroke="{self.palette.accent}"/>'
            )
            top = self.y + HEAD / 2 + 4 - (len(label) - 1) * LINE / 2
            self.text(x, top, label, 'text-anchor="middle" font-weight="600"')
        self.y += HEAD

    def step(self, step: Message | Note | Frame, depth: int) -> None:
        if isinstance(step, Frame):
            self.frame(step, depth)
        elif isinstance(step, Note):
            self.y += LINE * len(step.text) + 4
            middle = (self.xs[step.source] + self.xs[step.target]) / 2
            top = self.y - LINE * (len(step.text) - 1)
            width = _width(step.text) + 16
            self.elements.append(
                f'<rect x="{middle - width / 2:g}" y="{top - 13:g}" width="{width:g}" '
                f'height="{LINE * len(step.text) + 4}" rx="3" fill="{self.palette.frame}"/>'
            )
            self.text(middle, top, step.text, 'text-anchor="middle" font-style="italic"')
            self.y += 6
        elif step.source == step.target:
            self.itself(step)
        else:
            self.arrow(step)

    def itself(self, step: Message) -> None:
        """Draw what a participant does alone: a hook at its line, and the text beside it."""
        x, self.y = self.xs[step.source], self.y + 10
        height = max(14, LINE * len(step.text))
        self.elements.append(
            f'<path d="M{x:g} {self.y:g} h{HOOK - 10} v{height} h-{HOOK - 17}" fill="none" '
            f'stroke="{self.palette.accent}"/>'
        )
        self.head_at(x + 1, self.y + height, -1)
        self.text(x + HOOK - 4, self.y + height / 2 + 4 - (len(step.text) - 1) * LINE / 2, step.text)
        self.y += height + 4

    def arrow(self, step: Message) -> None:
        begin, end = self.xs[step.source], self.xs[step.target]
        towards = 1 if end > begin else -1
        self.y += LINE + 2
        # Between the first two lines that the arrow meets, so that none goes through the text.
        beside = self.xs[step.source + towards]
        if abs(beside - begin) < _width(step.text) + 8:
            beside = end
        self.text((begin + beside) / 2, self.y, step.text, 'text-anchor="middle"')
        self.y += LINE * (len(step.text) - 1) + 6
        dashes = ' stroke-dasharray="4 3"' if step.answer else ""
        self.elements.append(
            f'<path d="M{begin:g} {self.y:g} H{end - 8 * towards:g}" stroke="{self.palette.accent}"{dashes}/>'
        )
        self.head_at(end - towards, self.y, towards)
        self.y += 4

    def head_at(self, x: float, y: float, towards: int) -> None:
        self.elements.append(f'<path d="M{x:g} {y:g} l{-8 * towards} -4 v8 z" fill="{self.palette.accent}"/>')

    def frame(self, frame: Frame, depth: int) -> None:
        """Draw the steps of a frame, and behind them a box around all that they touch."""
        self.y += 10
        top = self.y
        inside = _flat(frame.steps)
        left = self.xs[min(min(step.source, step.target) for step in inside)] - 20 + 6 * depth
        right = left
        for step in inside:
            beside = _width(step.text) + HOOK if step.source == step.target else 14
            right = max(right, self.xs[max(step.source, step.target)] + beside + 8 - 6 * depth)
        place = len(self.behind)
        if frame.label:
            self.y += LINE
            self.text(left + 8, self.y, (frame.label,), 'font-weight="600"')
            self.y += 2
        for each in frame.steps:
            self.step(each, depth + 1)
        self.y += 8
        fill = "none" if frame.label else self.palette.frame
        stroke = f' stroke="{self.palette.line}" stroke-dasharray="2 2"' if frame.label else ""
        self.behind.insert(
            place,
            f'<rect x="{left:g}" y="{top:g}" width="{right - left:g}" height="{self.y - top:g}" rx="5" '
            f'fill="{fill}"{stroke}/>',
        )
        self.y += 2

    def svg(self) -> str:
        self.heads()
        top = self.y
        for step in self.diagram.steps:
            self.step(step, 0)
        self.y += 14
        lines = [
            f'<path d="M{x:g} {top:g} V{self.y:g}" stroke="{self.palette.line}" stroke-dasharray="1 3"/>'
            for x in self.xs
        ]
        self.heads()
        return picture(self.width, self.y + MARGIN, self.palette, [*self.behind, *lines, *self.elements])


def drawings() -> dict[Path, str]:
    """Return what each picture of this folder holds."""
    found = {}
    for suffix, palette in PALETTES.items():
        for source in sorted(HERE.glob("*.mmd")):
            drawn = _Drawing(parse(source.read_text()), palette).svg()
            found[source.with_name(f"{source.stem}{suffix}.svg")] = drawn
        for source in sorted(HERE.glob("*.boxes")):
            found[source.with_name(f"{source.stem}{suffix}.svg")] = boxes.drawn(source.read_text(), palette)
    return found


if __name__ == "__main__":
    for path, content in drawings().items():
        path.write_text(content)
