"""Functions as another user of this host: they run in a child process that has become nobody."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from tests.forks import fork

if TYPE_CHECKING:
    from collections.abc import Callable

NOBODY = 65534

needs_another_user = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user"
)


def as_nobody(fn: Callable[[], Any]) -> Any:
    """Return the result of `fn`, or the `OSError` that it raises, in a process of another user.

    The process is forked from one with threads, so `fn` may only make system calls.
    """
    reads, writes = os.pipe()
    child = fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                answer = fn()
            except OSError as error:
                answer = error
            os.write(writes, pickle.dumps(answer))
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        answer = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    return answer
