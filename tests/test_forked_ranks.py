"""A process that is forked from a rank is not a rank itself: it is refused at once, or acts alone."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

import reknit
from tests.forks import fork
from tests.ranks import run


def fork_and_save(root: str, joined: bool) -> list[str]:
    """Let a forked process save with its parent's ranks, and then alone; return both results."""
    state = {"model": {"w": np.arange(3.0)}}
    if joined:
        reknit.save(f"{root}/all", state)
    said = Path(root) / f"said-{dist.get_rank()}"
    child = fork()
    if child == 0:
        try:
            for how in ({}, {"group": reknit.alone()}):
                try:
                    reknit.save(f"{root}/{dist.get_rank()}", state, **how)  # type: ignore[arg-type]
                    line = "saved"
                except reknit.ReknitError as error:
                    line = f"{type(error).__name__}: {error.message}"
                with said.open("a") as file:
                    file.write(line + "\n")
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    reknit.save(f"{root}/after", state)
    return said.read_text().split("\n")[:-1]


@pytest.mark.parametrize("joined", [False, True])
def test_a_process_forked_from_a_rank_is_refused_as_that_rank_and_may_save_alone(
    tmp_path: Path, joined: bool
) -> None:
    for rank, lines in enumerate(run(2, fork_and_save, str(tmp_path), joined)):
        assert lines == [
            f"UsageError: this process was forked from rank {rank}, and is not a rank of its group",
            "saved",
        ]
        assert reknit.verify(tmp_path / str(rank)).ok
    assert reknit.verify(tmp_path / "after").ok


def fork_often(root: str, times: int) -> list[int]:
    """Fork some processes that count their threads, and return their exit statuses."""
    reknit.save(f"{root}/step", {"model": {"w": np.arange(3.0)}})
    ends = []
    for _ in range(times):
        child = fork()
        if child == 0:
            os._exit(len(os.listdir("/proc/self/task")) - 1)
        ends.append(os.waitpid(child, 0)[1])
    return ends


@pytest.mark.parametrize("world", [1, 2])
def test_a_forked_process_has_one_thread_and_ends_as_it_wishes(tmp_path: Path, world: int) -> None:
    # gRPC's own handlers would start threads in it again, which use memory of a server that runs in rank 0.
    assert run(world, fork_often, str(tmp_path), 3) == [[0] * 3] * world
