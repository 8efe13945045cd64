"""Makes this process, which is about to end, end with a failure; all exit handlers run."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from multiprocessing.process import parent_process
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_STATUS = 120
"""That of Python itself for an error while it ends, also after ``sys.exit``."""


def at_very_end(action: Callable[[], object]) -> None:
    """Call `action` when this process ends by itself, after all actions of `system.AtExit`.

    Finalizers do not run after one that changes the exit status of a process of `multiprocessing`.
    """
    Finalize(None, action, exitpriority=-2)


def end_with_failure() -> None:
    """Let this process end with `EXIT_STATUS` instead of 0; only an action of `at_very_end` calls this.

    An exception or a signal that ends the process has a status of its own, which stays.
    """
    if parent_process() is None:
        if not hasattr(sys, "last_value"):
            sys.stderr = FailsLast(sys.stderr)
        return
    # A process of `multiprocessing` calls finalizers while the exception that ends it is raised.
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and not error.code):
        raise SystemExit(EXIT_STATUS)


class FailsLast:
    """A standard error whose last flush fails, which is that of the interpreter, after all exit handlers.

    The exit status is 120 then, and nothing else differs.  Python ignores exceptions of exit handlers, and
    `os._exit` in one of them would skip the others.
    """

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = io.StringIO() if stream is None else stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush, and fail without a calling function."""
        with suppress(ValueError):  # it may be closed
            self._stream.flush()
        if sys._getframe().f_back is None:
            raise OSError("a save failed")
