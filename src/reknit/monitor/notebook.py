"""One line below the cell of a notebook, which is written anew again and again."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class NotebookLine:
    """The line.  It is empty in the end."""

    width = None

    def __init__(self, display: Callable[..., Any]) -> None:
        """`display` is IPython's."""
        self._display = display
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Write the line, in place of what it said before."""
        content = {"text/plain": text}
        if self._handle is None:
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def close(self) -> None:
        """Leave nothing there."""
        if self._handle is not None:
            self.show("")


def notebook_line() -> NotebookLine | None:
    """Return the line of the notebook in which this process runs, or None where it runs in none."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:  # a shell in a terminal has none
        return None
    return NotebookLine(import_module("IPython.display").display)
