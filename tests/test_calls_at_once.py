"""Two threads of a process that is alone save for the first time: they share what there is one of."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from reknit.calls import background_of
from reknit.comm.base import SoloGroup
from reknit.ranks import alone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

THREADS = 4


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(make: Callable[[], Any]) -> int:
    """Let threads call the same at the same time, and return how many different objects they got."""
    begin = threading.Barrier(THREADS)

    def call() -> Any:
        begin.wait()
        return make()

    with ThreadPoolExecutor(THREADS) as pool:
        calls = [pool.submit(call) for _ in range(THREADS)]
        return len({id(each.result()) for each in calls})


def test_threads_that_come_at_once_are_in_one_group() -> None:
    assert {at_once(lambda n=n: alone(1_000_000 + n)) for n in range(200)} == {1}  # type: ignore[misc]


def test_threads_that_come_at_once_have_the_same_background_saves() -> None:
    for _ in range(100):
        group = SoloGroup()
        assert at_once(lambda group=group: background_of(group, elsewhere=True)) == 1  # type: ignore[misc]
        background_of(group, elsewhere=True).close(0.0)
