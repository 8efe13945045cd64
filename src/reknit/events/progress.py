"""Progress of a load or a save that takes long, shown on rank 0: in a terminal, a notebook or the log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from reknit.errors import ShortageError
from reknit.events.outlet import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from reknit.events.phase import ActionProgress, Recorder

    Start = Callable[[str, Callable[[], None]], object]
    """`system.start_thread`: runs a function in a thread of the given name."""


_log = logging.getLogger("reknit")


class Display(Protocol):
    """A place where progress is shown."""

    @property
    def width(self) -> int | None:
        """The most characters that it can show, None for any number."""

    def show(self, text: str) -> None:
        """Show a text, after or in place of the last one."""

    def close(self) -> None:
        """End with a clean display."""


class TerminalLine:
    """The line of the cursor.  It is erased before it is drawn again, and in the end."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @property
    def width(self) -> int:
        """The most characters that it can show; after the last column a terminal would begin a new line."""
        return self._console.width - 1

    def show(self, text: str) -> None:
        """Draw the line."""
        from rich.text import Text

        with self._console:  # all in one write
            self.close()
            self._console.print(Text(text, no_wrap=True, overflow="crop"), end="")

    def close(self) -> None:
        """Erase the line, and leave the cursor at its start."""
        from rich.control import Control
        from rich.segment import ControlType

        self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


class NotebookLine:
    """A line below the cell of a notebook.  It is empty in the end."""

    width = None

    def __init__(self, display: Callable[..., Any]) -> None:
        """Take the function `display` of IPython."""
        self._display = display
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Write the line, in place of the last text."""
        content = {"text/plain": text}
        if self._handle is None:
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def close(self) -> None:
        """Empty the line."""
        if self._handle is not None:
            self.show("")


class LogDisplay:
    """Lines of the logger ``reknit``, which stay."""

    width = None

    def show(self, text: str) -> None:
        """Log a line."""
        _log.info("%s", text)

    def close(self) -> None:
        """Do nothing."""


def terminal_line(stream: TextIO | None) -> TerminalLine | None:
    """Return the line of a stream; None unless it is a terminal that can erase, and rich is installed."""
    try:
        if stream is None or stream.closed or not stream.isatty():
            return None
        from rich.console import Console
    except (ImportError, AttributeError, ValueError, OSError):  # programs set streams with `write` alone
        return None

    class QuietConsole(Console):
        def on_broken_pipe(self) -> None:
            """Raise the error again: rich would end the program, and redirect its standard output."""
            raise

    console = QuietConsole(file=stream)
    return None if console.is_dumb_terminal or not console.is_terminal else TerminalLine(console)


def notebook_line() -> NotebookLine | None:
    """Return the line of the notebook in which this process runs, or None outside notebooks."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:  # a shell in a terminal has no kernel
        return None
    return NotebookLine(import_module("IPython.display").display)


STALLED_S = 10.0
"""After so many seconds without a byte, the text says so in place of a speed."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TO = {"save": "to", "load": "from"}


def describe(action: str, path: str, done: ActionProgress, speed: float | None, width: int | None) -> str:
    """Return the line, such as ``load from ck/step_5: 41 % (3.2 of 7.8 GiB), 1.9 GiB/s, about 2 s left``.

    `speed` is in bytes per second, or None.  If the line is longer than `width`, the path is cut from the
    left, and then the line from the right.
    """
    rest = _rest(done, speed)
    title = f"{action} {_TO.get(action, 'of')} "
    path = "".join(c if c.isprintable() else "?" for c in path)
    line = f"{title}{path}: {rest}"
    if width is None or len(line) <= width:
        return line
    room = width - len(f"{title}...: {rest}")
    return f"{title}...{path[-room:] if room > 0 else ''}: {rest}"[:width]


def _rest(done: ActionProgress, speed: float | None) -> str:
    moved, expected, idle_s, doing = done
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


class Intervals(NamedTuple):
    """Seconds before the first text, and between texts on a terminal and in a log."""

    quiet_s: float = 2.0
    line_s: float = 0.25
    log_s: float = 10.0


INTERVALS = Intervals()
_PACE_S = 10.0
"""The speed is that of the last so many seconds, or since the last text if that is longer ago."""

_LAST_S = 2.0
"""The longest that the end of a block waits for the thread that shows progress."""


@contextmanager
def progress(
    recorder: Recorder, start: Start, *, wanted: bool = True, intervals: Intervals | None = None
) -> Iterator[None]:
    """Show the progress of the action of `recorder` while the block runs, if it takes long.

    Nothing is shown unless it is `wanted`, and on ranks other than 0.  After the block, however it ends, the
    terminal is as it was before.
    """
    if not wanted or recorder.rank != 0:
        yield
        return
    over, shown, showing = threading.Event(), threading.Event(), threading.Lock()
    quiet_s, *_ = given = intervals or INTERVALS

    def show() -> None:
        if over.wait(quiet_s) or not showing.acquire(blocking=False):
            return
        try:
            _show(recorder, over, given)
        finally:
            shown.set()

    try:
        start("reknit-progress", show)
    except ShortageError:  # not a reason to fail: other ranks would wait for this one
        yield
        return
    try:
        yield
    finally:
        over.set()
        if not showing.acquire(blocking=False):
            # Write nothing after the call has returned, unless the terminal itself blocks (Ctrl-S).
            shown.wait(_LAST_S)


def _show(recorder: Recorder, over: threading.Event, intervals: Intervals) -> None:
    """Show progress until `over` is set."""
    pace = _Pace()
    try:
        line: Display | None = terminal_line(sys.stderr) or notebook_line()
        display: Display = line or LogDisplay()
        if line is None and not _log.isEnabledFor(logging.INFO):
            return
        while True:
            done = recorder.progress()
            speed = pace.of(done.moved)
            display.show(describe(recorder.action, recorder.path, done, speed, display.width))
            if over.wait(intervals.log_s if line is None else intervals.line_s):
                break
        display.close()
    except Exception as error:
        # The terminal is gone or lacks these characters, but the load or save must go on.
        _log.debug("progress is not shown any more: %s", reason_of(error))


class _Pace:
    """Bytes per second, in the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def of(self, moved: int) -> float | None:
        """Return the speed, given the number of bytes moved until now; None at first."""
        at = time.monotonic()
        while len(self._seen) > 1 and self._seen[1][0] <= at - _PACE_S:
            self._seen.popleft()
        self._seen.append((at, moved))
        (first_at, first), *_ = self._seen
        return (moved - first) / (at - first_at) if at > first_at else None
