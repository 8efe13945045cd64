from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from reknit.comm.group import barrier
from reknit.comm.tree.thread_group import thread_groups
from reknit.errors import CommError, DeadlineError, MismatchError
from reknit.testing.world import run_ranks
from tests.comm.collectives import agree, gather

if TYPE_CHECKING:
    from reknit.comm.group import Group


def test_every_rank_runs_in_a_thread_of_its_own_and_results_come_by_rank() -> None:
    def run(group: Group) -> tuple[int, str]:
        barrier(group, "meet", 30)
        return group.rank, threading.current_thread().name

    assert run_ranks(5, run) == [(rank, f"rank {rank}") for rank in range(5)]


def test_an_error_that_all_ranks_raise_comes_once_with_notes_about_the_others() -> None:
    def run(group: Group) -> None:
        agree(group, "check", MismatchError("bad") if group.rank == 1 else None, 30)

    with pytest.raises(MismatchError, match="bad") as caught:
        run_ranks(3, run)
    notes = "\n".join(vars(caught.value)["__notes__"])
    assert notes.count("failed too: MismatchError") == 2
    assert all(f"rank {rank}" in notes for rank in range(3))


def test_the_error_that_came_first_is_raised_and_not_what_followed_from_it() -> None:
    def run(group: Group) -> None:
        if group.rank == 2:
            raise KeyboardInterrupt("first")
        barrier(group, "never", 1000)

    with pytest.raises(KeyboardInterrupt, match="first") as caught:
        run_ranks(3, run)
    notes = "\n".join(vars(caught.value)["__notes__"])
    assert "rank 0 failed too: GroupClosedError: rank 2 closed the group" in notes


def test_a_rank_that_returns_early_is_not_waited_for() -> None:
    with pytest.raises(CommError, match="rank 1 closed the group"):
        run_ranks(2, lambda group: barrier(group, "never", 1000) if group.rank == 0 else None)


def test_a_rank_that_does_not_end_is_an_error_with_the_stacks_of_all_threads() -> None:
    release = threading.Event()

    def stuck_somewhere(group: Group) -> None:
        if group.rank == 1:
            release.wait()

    with pytest.raises(DeadlineError, match=r"rank 1 did not end within 0.1 s") as caught:
        run_ranks(2, stuck_somewhere, timeout_s=0.1)
    release.set()
    assert "stuck_somewhere" in caught.value.message


def test_a_rank_that_failed_is_raised_rather_than_one_that_does_not_end() -> None:
    release = threading.Event()

    def run(group: Group) -> None:
        if group.rank == 0:
            raise MismatchError("cause")
        release.wait()

    with pytest.raises(MismatchError, match="cause") as caught:
        run_ranks(2, run, timeout_s=0.1)
    release.set()
    assert any("did not end" in note for note in vars(caught.value)["__notes__"])


def test_groups_that_were_given_stay_open_and_can_be_used_again() -> None:
    groups = thread_groups(3)
    for _ in range(2):
        lists = run_ranks(3, lambda group: gather(group, "again", b"x", 30), groups=groups)
        assert lists == [[b"x"] * 3, None, None]


def test_groups_that_are_too_few_are_refused() -> None:
    with pytest.raises(ValueError, match="1 groups were given for 2 ranks"):
        run_ranks(2, lambda group: None, groups=thread_groups(1))
