"""Progress as one line of text that fits the width."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reknit.monitor.phase import Standing

STALLED_S = 10.0
"""After so many seconds without a byte, the text says so in place of a speed."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TO = {"save": "to", "load": "from"}


def describe(action: str, path: str, standing: Standing, speed: float | None, width: int | None) -> str:
    """Return the line, such as ``load from ck/step_5: 41 % (3.2 of 7.8 GiB), 1.9 GiB/s, about 2 s left``.

    `speed` is in bytes per second, or None.  If the line is longer than `width`, the path is cut from the
    left, and then the line from the right.
    """
    rest = _rest(standing, speed)
    title = f"{action} {_TO.get(action, 'of')} "
    path = "".join(c if c.isprintable() else "?" for c in path)
    line = f"{title}{path}: {rest}"
    if width is None or len(line) <= width:
        return line
    room = width - len(f"{title}...: {rest}")
    return f"{title}...{path[-room:] if room > 0 else ''}: {rest}"[:width]


def _rest(standing: Standing, speed: float | None) -> str:
    moved, expected, idle_s, doing = standing
    now = doing[-1] if doing else "waiting"
    if not expected:
        return f"{now}, for {_seconds(idle_s)}"
    share = min(100 * moved // expected, 100)
    text = f"{share} % ({_amounts(min(moved, expected), expected)})"
    if moved >= expected:
        return f"{text}, {now}"
    if idle_s >= STALLED_S:
        return f"{text}, no byte for {_seconds(idle_s)}"
    if speed is None or speed < 1:
        return text
    return f"{text}, {amount(speed)}/s, about {_seconds((expected - moved) / speed)} left"


def _unit(nbytes: float) -> int:
    """Return the unit for a number of bytes; a number that rounds to 1024 is 1.0 of the next unit."""
    unit = 0
    while nbytes >= 1023.95 * 1024**unit and unit < len(_UNITS) - 1:
        unit += 1
    return unit


def _number(nbytes: float, unit: int) -> str:
    return f"{nbytes / 1024**unit:.{1 if unit else 0}f}"


def amount(nbytes: float) -> str:
    """Return a number of bytes as text, such as ``1.5 GiB``."""
    unit = _unit(nbytes)
    return f"{_number(nbytes, unit)} {_UNITS[unit]}"


def _amounts(part: int, whole: int) -> str:
    unit = _unit(whole)
    return f"{_number(part, unit)} of {_number(whole, unit)} {_UNITS[unit]}"


def _seconds(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
