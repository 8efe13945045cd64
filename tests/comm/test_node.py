"""What a rank of the tree makes of reports that come late, twice, early, broken off, or from a stranger."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from reknit.comm import faults
from reknit.comm.message import Outcome, Parcel, Report
from reknit.comm.node import Node, Visit
from reknit.comm.topology import Topology
from reknit.errors import CommError, DeadlineError, ProtocolError, from_wire

NO_WAIT_S = 0.0


def new_node(rank: int = 0, size: int = 3) -> Node:
    return Node(rank, Topology(size, 2), "job")


def whole(
    sender: int, number: int = 0, name: str = "plan", payload: bytes = b"x", job: str = "job"
) -> Report:
    return Report(job, sender, number, name, Parcel.of([payload]))


def told(node: Node, visit: Visit) -> Outcome:
    return node.answer(visit)


def raised(outcome: Outcome) -> Any:
    assert outcome.error is not None
    return from_wire(outcome.error)


def test_a_round_merges_the_requests_below_and_deals_the_answers_to_them() -> None:
    node = Node(1, Topology(9, 2), "job")
    left = node.attend(Report("job", 3, 0, "plan", Parcel.of([b"3", b"7", b"8"])))
    right = node.attend(whole(4, payload=b"4"))
    report = node.collect(0, "plan", b"1", NO_WAIT_S)
    assert report.whole
    assert report.requests.payloads(5) == [b"1", b"3", b"4", b"7", b"8"]
    node.finish(0, Outcome(Parcel.of([b"a1", b"a3", b"a4", b"a7", b"a8"])))
    assert told(node, left).answers.payloads(3) == [b"a3", b"a7", b"a8"]
    assert told(node, right).answers.payloads(1) == [b"a4"]


def test_a_report_that_repeats_one_under_way_is_refused_and_changes_nothing() -> None:
    node = new_node()
    node.attend(whole(1, payload=b"first"))
    with pytest.raises(ProtocolError, match="rank 1 took part in it before"):
        node.attend(whole(1, payload=b"second"))
    node.attend(whole(2))
    assert node.collect(0, "plan", b"", NO_WAIT_S).requests.payloads(3) == [b"", b"first", b"x"]


def test_a_report_of_a_round_that_is_over_is_refused_and_changes_nothing() -> None:
    node = new_node()
    for number in (0, 1):
        visits = [node.attend(whole(1, number)), node.attend(whole(2, number))]
        node.collect(number, "plan", b"", NO_WAIT_S)
        node.finish(number, Outcome(Parcel.of([b"", b"", b""])))
        assert all(told(node, visit).error is None for visit in visits)
    for number in (0, 1):
        with pytest.raises(ProtocolError, match=f"round {number} .* is over"):
            node.attend(whole(1, number, payload=b"late"))
    node.attend(whole(1, 2))
    node.attend(whole(2, 2))
    assert node.collect(2, "plan", b"", NO_WAIT_S).whole


def test_a_report_that_comes_after_its_round_failed_hears_why() -> None:
    node = new_node()
    node.finish(0, Outcome(error=DeadlineError("rank 1 did not come").to_wire()))
    with pytest.raises(DeadlineError, match="rank 1 did not come"):
        node.attend(whole(1))


@pytest.mark.parametrize(
    "report",
    [whole(1, job="other"), whole(0), whole(3), whole(7), Report("job", 1, 0, "plan", Parcel.of([b""] * 3))],
    ids=["other job", "itself", "grandchild", "nobody", "too many requests"],
)
def test_a_report_that_does_not_belong_here_is_refused(report: Report) -> None:
    node = new_node(size=4)
    with pytest.raises(ProtocolError):
        node.attend(report)
    assert node.collect(0, "plan", b"", NO_WAIT_S).missing == [1, 3, 2]


def test_a_child_that_is_a_round_ahead_fails_this_round_and_is_waited_for_in_its_own() -> None:
    node = new_node(size=2)
    visit = node.attend(whole(1, 1, "commit"))
    report = node.collect(0, "plan", b"", 30)
    message = from_wire(report.error or {}).message
    assert "rank 1 is in round 1 ('commit') already, rank 0 in round 0 ('plan')" in message
    node.finish(0, Outcome(error=report.error))
    assert node.collect(1, "commit", b"", NO_WAIT_S).whole
    node.finish(1, Outcome(Parcel.of([b"", b"for 1"])))
    assert told(node, visit).answers.payloads(1) == [b"for 1"]


def test_a_child_that_stops_waiting_before_the_end_fails_the_round_at_once() -> None:
    node = new_node()
    visit = node.attend(whole(1))
    node.leave(visit)
    report = node.collect(0, "plan", b"", 1000)
    assert "rank 1 left round 0 ('plan')" in from_wire(report.error or {}).message
    assert "rank 1 left round 0" in raised(told(node, visit)).message


def test_a_child_that_stops_waiting_while_rank_0_decides_is_an_objection() -> None:
    node = new_node()
    visits = [node.attend(whole(1)), node.attend(whole(2))]
    assert node.collect(0, "plan", b"", NO_WAIT_S).whole
    assert node.objection(0, "plan") is None
    node.leave(visits[1])
    assert "rank 2 left" in str(node.objection(0, "plan"))


def test_a_child_that_hangs_up_after_its_answer_did_nothing_wrong() -> None:
    node = new_node(size=2)
    visit = node.attend(whole(1))
    node.collect(0, "plan", b"", NO_WAIT_S)
    node.finish(0, Outcome(Parcel.of([b"", b"yes"])))
    node.leave(visit)
    assert told(node, visit).answers.payloads(1) == [b"yes"]
    node.attend(whole(1, 1))
    assert node.collect(1, "plan", b"", NO_WAIT_S).whole


def test_an_error_below_is_reported_above_without_waiting_for_the_others() -> None:
    node = new_node()
    node.attend(Report("job", 1, 0, "plan", error=CommError("too large").to_wire()))
    assert from_wire(node.collect(0, "plan", b"", 1000).error or {}).message == "too large"


def test_places_and_missing_ranks_below_are_added_to_those_here() -> None:
    node = Node(0, Topology(7, 2), "job")
    node.attend(Report("job", 1, 0, "plan", places={"plan": [1], "commit": [3]}, missing=[4]))
    report = node.collect(0, "plan", b"", 1000)
    assert report.places == {"plan": [0, 1], "commit": [3]}
    assert sorted(report.missing) == [2, 4, 5, 6]


def test_a_broken_node_fails_every_wait_and_every_later_round_with_its_first_error() -> None:
    node = new_node(size=2)
    visit = node.attend(whole(1))
    assert node.break_off(faults.gone(1))
    assert not node.break_off(faults.closed(0))
    assert "rank 1 is gone" in raised(told(node, visit)).message
    assert "rank 1 is gone" in node.until_broken().message
    for number in range(2):
        with pytest.raises(CommError, match="rank 1 is gone"):
            node.collect(number, "plan", b"", 1000)
        node.finish(number, Outcome(error=faults.gone(1).to_wire()))


def test_a_rank_that_closes_takes_no_answer_from_those_below_the_ranks_above_it() -> None:
    node = Node(1, Topology(4, 2), "job")
    visit = node.attend(whole(3))
    assert node.collect(0, "plan", b"", NO_WAIT_S).whole
    outcomes: list[Outcome] = []
    waiting = threading.Thread(target=lambda: outcomes.append(node.answer(visit)))
    waiting.start()
    node.break_off(faults.closed(0))  # rank 0 decided, answered this rank, and left
    waiting.join(0.1)
    assert outcomes == []
    node.finish(0, Outcome(Parcel.of([b"1", b"3"])))
    waiting.join()
    assert outcomes[0].answers.payloads(1) == [b"3"]


def test_a_child_attaches_once_and_only_to_the_rank_above_it() -> None:
    node = new_node(size=4)
    node.greet(1)
    node.attach(1)
    with pytest.raises(ProtocolError, match="another process is rank 1 already"):
        node.greet(1)
    with pytest.raises(ProtocolError, match="another process is rank 1 already"):
        node.attach(1)
    with pytest.raises(ProtocolError, match="rank 3 does not report to rank 0"):
        node.greet(3)
    with pytest.raises(ProtocolError, match="does not report here"):
        node.attach(3)


def test_a_child_that_took_part_in_a_round_is_not_greeted_again() -> None:
    node = new_node()
    node.attend(whole(1))
    with pytest.raises(ProtocolError, match="another process is rank 1 already"):
        node.greet(1)
