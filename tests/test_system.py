"""Calls that an operating system refuses: reknit does without them, or names them in an error."""

from __future__ import annotations

import gc
import os
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from reknit import system
from reknit.errors import ShortageError
from reknit.system import without_collections
from tests import ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
THRESHOLD = gc.get_threshold()


def test_memory_is_asked_for_and_not_taken() -> None:
    system.require_memory(MIB)
    for nbytes in (1 << 62, 1 << 80):
        with pytest.raises(ShortageError, match="too little memory"):
            system.require_memory(nbytes)


def without_streams() -> None:
    for fd in (0, 1, 2):
        os.close(fd)
    low = os.open("/", os.O_RDONLY)
    assert low == 0
    high = system.aside(low)
    assert high > 2
    assert not os.get_inheritable(high)
    assert system.aside(high) == high
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(low)
    ends = system.socket_pair()
    assert min(end.fileno() for end in ends) > 2
    ends[0].send(b"x")
    assert ends[1].recv(9) == b"x"
    assert [system.output_of_child(fd) for fd in (1, 2, high)] == [subprocess.DEVNULL] * 2 + [None]


def test_no_descriptor_has_the_number_of_a_standard_stream() -> None:
    ranks.run(1, without_streams, joined=False)


@pytest.fixture
def collector() -> Iterator[None]:
    yield
    gc.set_threshold(*THRESHOLD)


@pytest.mark.usefixtures("collector")
def test_collections_pause_until_the_last_block_ends_also_by_an_error() -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(without_collections())
    second.enter_context(without_collections())
    first.close()
    assert gc.get_threshold()[0] == 0  # blocks of two threads may overlap
    second.close()
    assert gc.get_threshold() == THRESHOLD
    with pytest.raises(ValueError, match="in between"), without_collections(), without_collections():
        raise ValueError("in between")
    assert gc.get_threshold() == THRESHOLD


@pytest.mark.usefixtures("collector")
def test_a_collector_that_did_not_run_does_not_run_afterwards() -> None:
    gc.set_threshold(0)
    with without_collections():
        pass
    assert gc.get_threshold()[0] == 0
