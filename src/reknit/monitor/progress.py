"""Progress of a load or a save that takes long, shown on rank 0."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from reknit.errors import ShortageError
from reknit.monitor.progress_display import LogDisplay, notebook_line, terminal_line
from reknit.monitor.progress_text import describe
from reknit.monitor.record_losses import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.monitor.phase import Recorder
    from reknit.monitor.progress_display import Display

    Start = Callable[[str, Callable[[], None]], object]
    """`engine.pipeline.start`: runs a function in a thread of the given name."""

_log = logging.getLogger("reknit")


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
            standing = recorder.standing()
            speed = pace.of(standing.moved)
            display.show(describe(recorder.action, recorder.path, standing, speed, display.width))
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
