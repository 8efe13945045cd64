"""The promises of `Group.gather` and `Group.give`, kept by ranks in threads, by sockets and by real gRPC."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from reknit.comm.group import Call, Topology
from reknit.errors import CommError, DeadlineError, GroupClosedError, ProtocolError, ReknitError
from reknit.types.small import spelled
from tests.comm.worlds import ask, endings, exchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.comm.group import Group
    from tests.comm.worlds import Join


def together(groups: Sequence[Group], name: str = "again") -> bool:
    """Return whether all ranks can still hold a round."""
    requests = [b"%d" % group.rank for group in groups]
    return endings(groups, lambda group: ask(group, name, b"%d" % group.rank)) == requests


def test_decide_gets_the_requests_by_rank_and_runs_once_in_the_thread_of_rank_0(join: Join) -> None:
    calls: list[tuple[str, list[bytes]]] = []

    def run(group: Group) -> bytes:
        def decide(requests: list[bytes]) -> list[bytes]:
            calls.append((threading.current_thread().name, requests))
            return [b"to " + request for request in requests]

        return exchange(group, Call("plan", b"%d" % group.rank, 30), decide)

    assert endings(join(6), run) == [b"to %d" % rank for rank in range(6)]
    assert calls == [("rank 0", [b"%d" % rank for rank in range(6)])]


def test_every_rank_knows_the_same_tree_and_generation_and_may_wait_for_ever(join: Join) -> None:
    groups = join(5)
    assert {group.topology.digest for group in groups} == {groups[0].topology.digest}
    assert len({group.generation for group in groups}) == 1
    assert groups[0].topology.size == 5
    assert endings(groups, lambda group: ask(group, timeout_s=float("inf"))) == [b""] * 5


@pytest.mark.parametrize("join", ["threads", "tree-16"], indirect=True)
def test_a_name_that_differs_is_told_without_waiting_for_ranks_that_never_come(join: Join) -> None:
    groups = join(4)
    present = groups[:3]
    errors = endings(present, lambda group: ask(group, "commit" if group.rank == 1 else "plan", timeout_s=60))
    assert [type(error) for error in errors] == [ProtocolError] * 3
    assert all("rank 3 did not come" in error.message for error in errors)


@pytest.mark.parametrize("join", ["tree-2"], indirect=True)
def test_a_tree_names_absent_ranks_to_all_that_can_be_told(join: Join) -> None:
    topology, absent = Topology.flat(7, 2), {1, 6}
    silent = {rank for head in absent for rank in topology.subtree(head)}
    present = [group for group in join(7) if group.rank not in absent]
    errors = endings(present, lambda group: ask(group, "plan", timeout_s=0.2))
    for group, error in zip(present, errors, strict=True):
        assert type(error) is DeadlineError
        if group.rank not in silent:
            named = f"{spelled(silent)} did not come to round 0 ('plan') within 0.2 s"
        else:  # nothing comes from below an absent rank
            above = group.rank
            while above not in absent:
                above = topology.parent(above) or 0
            named = f"rank {above} did not answer round 0 ('plan') within 0.2 s"
        assert error.message == named


def test_a_rank_that_comes_too_late_hears_the_same_error_and_is_in_step_again(join: Join) -> None:
    groups = join(3)
    errors = endings(groups[:2], lambda group: ask(group, "plan", timeout_s=0.2))
    with pytest.raises(DeadlineError, match="rank 2 did not come to round 0"):
        ask(groups[2], "plan")
    assert [type(error) for error in errors] == [DeadlineError] * 2
    assert together(groups)


def test_a_decision_that_takes_too_long_is_a_deadline_error_for_the_ranks_that_wait(join: Join) -> None:
    release = threading.Event()

    def run(group: Group) -> bytes:
        def decide(requests: list[bytes]) -> list[bytes]:
            assert release.wait(30)
            return requests

        try:
            return exchange(group, Call("plan", b"", 0.2), decide)
        except DeadlineError:
            # The report that a rank stopped waiting is on its way while rank 0 decides.
            threading.Timer(0.5, release.set).start()
            raise

    errors = endings(join(3), run)
    assert [type(error) for error in errors[1:]] == [DeadlineError] * 2
    assert isinstance(errors[0], CommError), "rank 0 must not take the others for informed"


@pytest.mark.parametrize("member", [0, 1])
def test_when_a_member_closes_the_others_fail_at_once_now_and_later(join: Join, member: int) -> None:
    groups = join(5)

    def run(group: Group) -> bytes:
        if group.rank == member:
            time.sleep(0.1)
            group.close()
            return b"left"
        return ask(group, timeout_s=1000)

    for rank, ending in enumerate(endings(groups, run)):
        assert ending == b"left" if rank == member else isinstance(ending, GroupClosedError)
        assert rank == member or f"rank {member}" in ending.message
    for group in groups:
        with pytest.raises(CommError):
            ask(group, timeout_s=1000)


@pytest.mark.parametrize("member", [0, 1])
def test_closing_a_group_from_another_thread_ends_the_wait_of_its_own_rank(join: Join, member: int) -> None:
    groups = join(5)
    present = [group for group in groups if group.rank != 3]
    timer = threading.Timer(0.1, groups[member].close)
    timer.start()
    errors = endings(present, lambda group: ask(group, timeout_s=1000))
    timer.join()
    assert len(errors) == 4
    assert {type(error) for error in errors} <= {CommError, GroupClosedError}
    assert all(f"rank {member}" in error.message for error in errors)


@pytest.mark.parametrize("join", ["threads", "tree-1", "tree-2"], indirect=True)
def test_closing_after_a_last_round_takes_no_answer_away(join: Join) -> None:
    groups = join(9)

    def run(group: Group) -> bytes:
        answer = ask(group, "last", b"%d" % group.rank)
        group.close()
        group.close()
        return answer

    assert endings(groups, run) == [b"%d" % rank for rank in range(9)]


def test_two_threads_in_one_group_are_refused_and_do_no_harm(join: Join) -> None:
    groups = join(2)
    entered, intruded = threading.Event(), threading.Event()

    def run(group: Group) -> bytes:
        if group.rank == 1:
            assert intruded.wait(30)
        else:
            threading.Timer(0.3, entered.set).start()
        return ask(group, "plan", b"x")

    def intrude() -> None:
        assert entered.wait(30)
        with pytest.raises(ProtocolError, match="two threads of rank 0"):
            ask(groups[0])
        intruded.set()

    thread = threading.Thread(target=intrude)
    thread.start()
    assert endings(groups, run) == [b"x"] * 2
    thread.join()
    assert intruded.is_set()


def test_errors_are_separate_objects_on_every_rank(join: Join) -> None:
    def run(group: Group) -> None:
        try:
            ask(group, f"name {group.rank}")
        except ReknitError as error:
            error.sign(rank=group.rank)
            raise

    assert [error.rank for error in endings(join(3), run)] == [0, 1, 2]
