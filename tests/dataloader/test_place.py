"""A loader without a place reads the part of its rank, in the job of torch, of JAX, or of a launcher."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from reknit.dataloader import ConsumedSamples, ReaderPlace, SourceLoader, TokenLoader, TokenSet
from reknit.errors import UsageError
from tests.ranks import run

VARIABLES = ("WORLD_SIZE", "RANK", "JAX_NUM_PROCESSES", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def source(number: int) -> Any:
    return _Source(number)


class _Source:
    """A source of one number."""

    def __init__(self, number: int) -> None:
        self.left = [number]

    def __iter__(self) -> _Source:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]


def rows() -> list[list[int]]:
    return [[number] * 4 for number in range(8)]


def read() -> tuple[list[Any], list[int], int]:
    logging.disable(logging.NOTSET)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reknit").addHandler(handler)
    numbers = list(SourceLoader(source, 5))
    tokens = [
        int(row[4])
        for batch in TokenLoader([TokenSet(name="rows", open=rows, num_partitions=4)], token_budget=8)
        for row in batch.samples.tolist()
    ]
    made = ConsumedSamples(lambda position: [[0]], batch_size=3)
    next(made)
    assert all("on_mesh" in line for line in said)
    return numbers, tokens, made.position + len(said)


def test_the_ranks_of_a_torch_job_read_the_data_once_together_and_one_says_so() -> None:
    for size in (1, 2):
        found = run(size, read)
        assert sorted(number for numbers, _, _ in found for number in numbers) == list(range(5))
        assert sorted(token for _, tokens, _ in found for token in tokens) == list(range(8))
        said = [3 if size > 1 and rank == 0 else 0 for rank in range(size)]
        assert [position for _, _, position in found] == [3 * size + lines for lines in said]


def job_of_torch(rank: int, size: int) -> tuple[str, Any]:
    yes = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: rank,
        get_world_size=lambda: size,
    )
    return "torch.distributed", yes


def job_of_jax(rank: int, size: int, client: Any = True) -> tuple[str, Any]:
    # Nothing else of JAX may be used: it would start JAX on all devices.
    state = SimpleNamespace(client=client, process_id=rank, num_processes=size)
    return "jax._src.distributed", SimpleNamespace(global_state=state)


Jobs = list[tuple[str, Any]]


def start(patch: pytest.MonkeyPatch, jobs: Jobs, variables: dict[str, str]) -> None:
    """Let modules and variables look as those of a job."""
    for name, module in jobs:
        patch.setitem(sys.modules, name, module)
    for name, value in variables.items():
        patch.setenv(name, value)


def test_the_place_is_that_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[Jobs, dict[str, str], tuple[int, int]]] = [
        ([], {}, (0, 1)),
        ([], {"WORLD_SIZE": "1", "RANK": "0"}, (0, 1)),
        ([], {"WORLD_SIZE": "4", "RANK": "3"}, (3, 4)),
        ([job_of_jax(0, 1, None)], {}, (0, 1)),
        ([job_of_jax(1, 2)], {}, (1, 2)),
        ([job_of_jax(1, 2)], {"JAX_NUM_PROCESSES": "2"}, (1, 2)),
        ([job_of_torch(1, 3)], {"WORLD_SIZE": "6", "RANK": "5"}, (1, 3)),
        ([job_of_torch(1, 2), job_of_jax(1, 2)], {}, (1, 2)),
    ]
    for jobs, variables, place in cases:
        with monkeypatch.context() as patch:
            start(patch, jobs, variables)
            assert ReaderPlace.of_job() == (*place, 0), (jobs, variables)


def test_a_place_that_is_not_certain_is_refused_and_may_be_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[Jobs, dict[str, str], str]] = [
        ([], {"WORLD_SIZE": "4"}, "started 4 processes"),
        ([], {"WORLD_SIZE": "4", "RANK": "4"}, "started 4 processes"),
        ([], {"SLURM_NTASKS": "2", "RANK": "0"}, "Slurm started 2 processes"),
        ([], {"JAX_NUM_PROCESSES": "2"}, "JAX started 2 processes"),
        ([job_of_torch(0, 2), job_of_jax(1, 2)], {}, "0 of 2 for torch.distributed and 1 of 2 for jax"),
        ([job_of_torch(0, 1), job_of_jax(1, 2)], {}, "0 of 1 for torch.distributed and 1 of 2 for jax"),
    ]
    for jobs, variables, why in cases:
        with monkeypatch.context() as patch:
            start(patch, jobs, variables)
            with pytest.raises(UsageError, match=why) as refused:
                SourceLoader(source, 4)
            assert "pass place=ReaderPlace(rank, size)" in str(refused.value)
            assert list(SourceLoader(source, 4, place=ReaderPlace())) == list(range(4))
