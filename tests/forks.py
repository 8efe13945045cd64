"""Processes that are forked from one that runs tests."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 60


@contextmanager
def forking() -> Iterator[None]:
    """Keep the garbage of this process from the collectors of the children that it forks in the block.

    An object of C++ that joins its threads when it is freed, such as a process group, aborts or hangs a
    child: it has no such threads.
    """
    parent = os.getpid()
    gc.collect()  # here, where the threads are
    gc.freeze()  # keeps the garbage of other threads since then
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forks where there are threads
            yield
    finally:
        if os.getpid() == parent:
            gc.unfreeze()


def fork() -> int:
    """Fork this process, as `os.fork` does; see `forking`."""
    with forking():
        return os.fork()


def in_fork(check: Callable[[], bool]) -> bool:
    """Return the result of `check` in a process that is forked now.

    A process that raises, dies, or hangs is an `AssertionError` with the reason.
    """
    with tempfile.TemporaryDirectory(prefix="reknit-fork-") as folder:
        reason = Path(folder, "reason")
        pid = fork()
        if not pid:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler in Python waits for calls of C and Rust
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
