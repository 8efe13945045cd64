from __future__ import annotations

import os
import re
import resource
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Died, RankFailed, run


def add_up(number: int) -> Any:
    tensor = torch.tensor([number + dist.get_rank()])
    dist.all_reduce(tensor)
    return tensor, dist.get_rank(), os.environ["OMP_NUM_THREADS"]


def fail_while_another_waits() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("this rank fails")
    time.sleep(60)


def die_quietly() -> int:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def crash() -> None:
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)  # in a barrier it could fail before the end of the other is seen


def test_every_rank_answers_in_its_place() -> None:
    answers = [(tensor.tolist(), *others) for tensor, *others in run(3, add_up, 10)]
    assert answers == [([33], rank, "1") for rank in range(3)]


def test_a_rank_that_may_die_answers_with_how_it_ended() -> None:
    assert run(2, die_quietly, some_die=True) == [0, Died(-signal.SIGKILL)]


def test_a_rank_that_crashes_is_reported_with_its_stack() -> None:
    with pytest.raises(RankFailed, match="rank 1 ended with code -11") as error:
        run(2, crash)
    assert "in crash" in str(error.value)
    assert "core" in str(error.value)


def test_when_a_rank_fails_all_say_where_they_were_and_the_others_do_not_hang() -> None:
    with pytest.raises(RankFailed, match="rank 1 raised") as error:
        run(2, fail_while_another_waits)
    assert "ValueError: this rank fails" in str(error.value)
    assert re.search("rank 0 was here.*in fail_while_another_waits", str(error.value), re.DOTALL)
