"""The jobs of torch in which this process was forked: it is not a rank of them."""

from __future__ import annotations

import os
import sys
import weakref
from contextlib import suppress
from typing import Any

inherited: weakref.WeakSet[Any] = weakref.WeakSet()
"""The default groups of torch that the parents of this process had."""


def _after_fork() -> None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None:
        return
    with suppress(Exception):  # torch may be in any state after a fork, and the child must go on
        if distributed.is_available() and distributed.is_initialized():
            inherited.add(distributed.group.WORLD)


os.register_at_fork(after_in_child=_after_fork)
