"""One fault at every step of every role: at worst an error in time follows."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import pytest

from reknit.testing.faulty_storage import Fault
from tests.running.examples import is_night
from tests.simulation.simulator import Crash, Cut, DiskFault, Interrupt, Restart, Stop, Weather, simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.testing.faulty_storage import FaultKind
    from tests.simulation.faults import SimFault
    from tests.simulation.simulator import Result

ROOT, INNER, LEAF = 0, 1, 2
EVERY = {ROOT: 7, INNER: 3, LEAF: 3}
"""By day a fault of a rank happens at one of so many of its steps; the root has the most."""
ROLES = pytest.mark.parametrize("rank", [ROOT, INNER, LEAF], ids=["root", "inner", "leaf"])
TIMEOUT_S = 5.0
SOON_S, LONG_S = 1.0, 60.0
"""Well within the deadline of a round, and well after it."""


def sweep(
    fault: Callable[[int], SimFault], *more: SimFault, saves: int = 2, first: int = 1, every: int = 3
) -> list[Result]:
    """Run a chain of root, inner node and leaf with a fault at `first`, and at later steps up to the end.

    At night it happens at every step, else at one of so many.
    """
    results: list[Result] = []
    while not results or results[-1].fired:
        at = first + len(results) * (1 if is_night() else every)
        results.append(
            simulate(
                7,
                ranks=3,
                fan_out=1,
                saves=saves,
                faults=(fault(at), *more),
                timeout_s=TIMEOUT_S,
                recover=at % 8 == 0,
            )
        )
        assert len(results) < 1000
    assert len(results) > 5
    return results


def overwriting(rank: int) -> int:
    """Return the step at which a rank has finished the first save, and begins a save over it."""
    return simulate(7, ranks=3, fan_out=1, timeout_s=TIMEOUT_S, recover=False).steps[0, rank]


@ROLES
@pytest.mark.parametrize("silent", [False, True])
def test_a_rank_that_dies_at_any_step_leaves_the_old_checkpoint_or_the_new(rank: int, silent: bool) -> None:
    results = sweep(
        lambda step: Crash(rank, step, silent), first=1 if silent else overwriting(rank), every=EVERY[rank]
    )
    others = {r for r in (ROOT, INNER, LEAF) if r != rank}
    for result in results[:-1]:
        assert {r for number, r in result.outcomes() if number == 1} >= others
    assert set(results[-1].outcomes().values()) == {"ok"}


@ROLES
def test_a_rank_that_stops_for_a_while_at_any_step_harms_nothing(rank: int) -> None:
    for result in sweep(lambda step: Stop(rank, step, SOON_S), first=overwriting(rank), every=EVERY[rank]):
        assert set(result.outcomes().values()) == {"ok"}


@pytest.mark.parametrize(("rank", "seconds"), [(ROOT, LONG_S), (INNER, inf), (LEAF, LONG_S)])
def test_a_rank_that_stops_for_long_at_any_step_is_an_error_in_time(rank: int, seconds: float) -> None:
    sweep(lambda step: Stop(rank, step, seconds), first=overwriting(rank), every=EVERY[rank])


@pytest.mark.parametrize(("rank", "noticed_s"), [(INNER, None), (LEAF, 0.01)], ids=["silent", "noticed"])
def test_a_connection_that_breaks_at_any_step_is_an_error_in_time(rank: int, noticed_s: float | None) -> None:
    sweep(lambda step: Cut(rank, step, noticed_s), first=overwriting(rank), every=EVERY[rank])


@ROLES
def test_an_interrupt_at_any_step_reaches_all_ranks(rank: int) -> None:
    sweep(lambda step: Interrupt(rank, step), first=overwriting(rank), every=EVERY[rank])


@ROLES
@pytest.mark.parametrize("kind", ["error", "lost"])
def test_a_disk_that_fails_at_any_operation_is_the_same_error_on_all_ranks(
    rank: int, kind: FaultKind
) -> None:
    sweep(lambda at: DiskFault(rank, Fault(kind, at)), every=3 if rank == ROOT else 2)


@ROLES
def test_a_rank_that_wakes_up_after_the_job_was_started_again_harms_nothing(rank: int) -> None:
    sweep(lambda step: Stop(rank, step, LONG_S), Restart(LONG_S - 0.02), saves=1, every=EVERY[rank])


@ROLES
def test_a_rank_that_wakes_up_within_a_save_of_the_job_started_again_harms_nothing(rank: int) -> None:
    again = Restart(SOON_S + 0.12), Weather(strayed=1.0)
    sweep(lambda step: Stop(rank, step, SOON_S), *again, first=overwriting(rank), every=EVERY[rank])
