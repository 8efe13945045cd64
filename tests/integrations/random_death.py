"""The death of a training process at a random moment, the same for each seed."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_DELAY_S = 0.2


def death(seed: int, first: int, last: int) -> Callable[[int], None]:
    """Return a function to call with each step; it kills this process soon after a random one of them.

    The process dies by SIGKILL, up to 0.2 s after a step from `first` to `last`: in a step, in the copy of a
    save, or between them.
    """
    generator = random.Random(seed)
    step, delay_s = generator.randint(first, last), generator.uniform(0, _MOST_DELAY_S)

    def reached(number: int) -> None:
        if number == step:
            timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()

    return reached
