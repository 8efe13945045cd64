"""Checks in a process that is forked now."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 60


def in_fork(check: Callable[[], bool]) -> bool:
    """Return the result of `check` in a process that is forked now.

    A process that raises, dies, or hangs is an `AssertionError` with the reason.
    """
    with tempfile.TemporaryDirectory(prefix="reknit-fork-") as folder:
        reason = Path(folder, "reason")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forks where there are threads
            pid = os.fork()
        if not pid:
            signal.alarm(WAIT_S)
            try:
                os._exit(0 if check() else 1)
            except BaseException:
                reason.write_text(traceback.format_exc())
            finally:
                os._exit(2)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code not in (0, 1):
            text = reason.read_text() if reason.exists() else ""
            raise AssertionError(f"the forked process ended with code {code}\n{text}")
        return code == 0
