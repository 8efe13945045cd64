from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torchrun.harness import RankFailed, run


def add_up(number: int) -> Any:
    tensor = torch.tensor([number + dist.get_rank()])
    dist.all_reduce(tensor)
    return tensor, dist.get_rank(), os.environ["OMP_NUM_THREADS"]


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("this rank fails")
    dist.barrier()


def die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def is_clean() -> bool:
    return not multiprocessing.active_children()


def test_every_rank_answers_in_its_place() -> None:
    answers = run(3, add_up, 10)
    assert [(tensor.tolist(), rank, threads) for tensor, rank, threads in answers] == [
        ([33], 0, "1"),
        ([33], 1, "1"),
        ([33], 2, "1"),
    ]
    assert is_clean()


def test_a_rank_that_raises_is_reported_and_the_others_do_not_hang() -> None:
    with pytest.raises(RankFailed, match="rank 1 raised") as error:
        run(2, fail_on, 1)
    assert "ValueError: this rank fails" in str(error.value)
    assert is_clean()


def test_a_rank_that_is_killed_is_reported() -> None:
    with pytest.raises(RankFailed, match=r"rank (0 raised|1 ended with code)"):
        run(2, die)
    assert is_clean()


def test_a_rank_that_hangs_is_reported_with_its_stack() -> None:
    with pytest.raises(RankFailed, match="rank 0 ended") as error:
        run(2, hang, timeout=1.0)
    assert "in hang" in str(error.value)
    assert is_clean()
