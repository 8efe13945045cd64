from __future__ import annotations

import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.forks import in_fork
from tests.ranks import Died, RankFailed, run
from tests.shared_servers import FOLDER


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


def imported() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}


def variable_and_server() -> tuple[str, int]:
    # psutil compares times at which processes began, which move with the clock of the host.
    status = Path(f"/proc/{os.getppid()}/stat").read_text()
    return os.environ["REKNIT_TEST_WHOSE"], int(status.rpartition(")")[2].split()[1])


def hang() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


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


def test_ranks_import_only_what_they_are_told_to() -> None:
    for found in run(1, imported), run(1, imported, warm="transformers"):
        assert not {"jax", "megatron", "deepspeed", "lightning"} & found[0]
    assert "transformers" in found[0]


def test_a_rank_that_hangs_is_reported_with_its_stack() -> None:
    with pytest.raises(RankFailed, match="rank 0 ended") as error:
        run(2, hang, timeout=6.0)
    assert "in hang" in str(error.value)


def test_when_a_rank_fails_all_say_where_they_were_and_the_others_do_not_hang() -> None:
    with pytest.raises(RankFailed, match="rank 1 raised") as error:
        run(2, fail_while_another_waits)
    assert "ValueError: this rank fails" in str(error.value)
    assert re.search("rank 0 was here.*in fail_while_another_waits", str(error.value), re.DOTALL)


def test_processes_side_by_side_share_the_imports_and_keep_their_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv("REKNIT_TEST_WHOSE", "the first")
    ((whose, server),) = run(1, variable_and_server, path=tmp_path)
    assert whose == "the first"

    def another() -> bool:
        os.environ["REKNIT_TEST_WHOSE"] = "the second"
        return run(1, variable_and_server, path=tmp_path) == [("the second", server)]

    assert in_fork(another)
    assert run(1, variable_and_server, path=tmp_path) == [("the first", server)]
    os.kill(server, signal.SIGKILL)  # a rank server that other tests do not use
    assert run(1, variable_and_server, path=tmp_path)[0][0] == "the first"
    assert in_fork(lambda: run(1, variable_and_server, path=tmp_path)[0][1] != server)
