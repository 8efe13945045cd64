"""A forked test process frees nothing that has threads in its parent."""

from __future__ import annotations

import gc
import os

from tests.forks import in_fork


class Owner:
    """An object in a cycle, which joins its threads when it is freed: as a process group of torch does."""

    def __init__(self, freed: list[int]) -> None:
        self.itself, self.freed = self, freed

    def __del__(self) -> None:
        self.freed.append(os.getpid())


def test_the_garbage_of_a_process_is_freed_there_and_not_in_its_child() -> None:
    freed: list[int] = []
    gc.disable()
    try:
        Owner(freed)

        def collect() -> bool:
            gc.collect()
            return freed == [os.getppid()]

        assert in_fork(collect)
    finally:
        gc.enable()
    assert freed == [os.getpid()]
    assert gc.get_freeze_count() == 0
