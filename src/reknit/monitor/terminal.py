"""One line at the bottom of a terminal, which is drawn again and again; with rich, where it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


class TerminalLine:
    """The line where the cursor is.  It is erased before it is drawn anew, and in the end."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @property
    def width(self) -> int:
        """The most characters that it can show; in the last column a terminal would begin a new line."""
        return self._console.width - 1

    def show(self, text: str) -> None:
        """Draw the line."""
        from rich.text import Text

        with self._console:  # all in one write
            self.close()
            self._console.print(Text(text, no_wrap=True, overflow="crop"), end="")

    def close(self) -> None:
        """Erase the line, and leave the cursor at its begin."""
        from rich.control import Control
        from rich.segment import ControlType

        self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


def terminal_line(stream: TextIO | None) -> TerminalLine | None:
    """Return the line of a stream, or None where it is no terminal, a dumb one, or rich is not installed."""
    if stream is None or stream.closed or not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=stream)
    return None if console.is_dumb_terminal or not console.is_terminal else TerminalLine(console)
