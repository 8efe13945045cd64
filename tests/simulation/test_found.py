"""Regression tests: situations in which the simulator once found a bug."""

from __future__ import annotations

from tests.running.examples import is_night
from tests.simulation.simulator import Interrupt, Restart, Save, Weather, simulate


def test_ctrl_c_on_rank_0_after_the_commit_does_not_tell_the_others_that_the_save_failed() -> None:
    for step in range(30, 130, 1 if is_night() else 3):
        faults = (Interrupt(rank=0, step=step),)
        simulate(7, ranks=3, fan_out=1, saves=2, faults=faults, timeout_s=5.0, recover=False)


def test_ctrl_c_after_a_commit_that_many_ranks_wait_for_is_the_same() -> None:
    simulate(
        1127,
        ranks=12,
        fan_out=2,
        hosts=(0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 0),
        saves=3,
        faults=(Interrupt(rank=0, step=69, run=1), Restart(at_s=0.19528547866522306)),
        timeout_s=1.0,
    )


def test_an_older_run_may_save_where_a_newer_one_gave_up() -> None:
    # Both runs lose messages; the newer one fails, removes its marker, and leaves nothing to protect.
    weather = Weather(delay_s=0.001, slow_s=10.0, slow=0.5, lost=0.2)
    for seed in range(1190, 1200):
        faults = (Restart(at_s=0.6738001862493735), weather)
        simulate(seed, ranks=3, saves=(Save(),) * 3, hosts=(1, 0, 0), faults=faults)
