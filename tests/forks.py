"""Checks in a process that is forked now."""

from __future__ import annotations

import os
import signal
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 60


def in_fork(check: Callable[[], bool]) -> bool:
    """Return the result of `check` in a process that is forked now; a process that hangs has failed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks where there are threads
        pid = os.fork()
    if not pid:
        signal.alarm(WAIT_S)
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0
