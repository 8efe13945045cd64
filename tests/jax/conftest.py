"""The jobs that the tests of this folder share; each starts at its first use."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from tests.jax.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NEEDED = ("jax", "flax", "optax")


@pytest.fixture(scope="session")
def jobs() -> Iterator[Callable[[int, int], Job]]:
    """Return a function that returns the job of so many processes with so many devices each."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"{', '.join(absent)} not installed")
    started: dict[tuple[int, int], Job] = {}

    def job(processes: int, devices: int) -> Job:
        if (processes, devices) not in started:
            started[processes, devices] = Job(processes, devices)
        return started[processes, devices]

    yield job
    for one in started.values():
        one.end()


@pytest.fixture
def alone(jobs: Callable[[int, int], Job]) -> Job:
    """Return a job of one process with four devices."""
    return jobs(1, 4)


@pytest.fixture
def pair(jobs: Callable[[int, int], Job]) -> Job:
    """Return a job of two processes with three devices each."""
    return jobs(2, 3)
