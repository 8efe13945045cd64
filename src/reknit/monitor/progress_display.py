"""Where is progress shown?  On the last line of a terminal, below the cell of a notebook, or in the log."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

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
