"""The machine of a rank in a process: the rank's thread, those of its server, and the connection above."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from reknit.comm import round_errors
from reknit.comm.group import Call, Topology
from reknit.comm.rank_messages import Heading, Parcel
from reknit.comm.tree.machine import RoundMachine
from reknit.comm.tree.rounds import Rounds
from reknit.errors import CommError, DeadlineError, GroupClosedError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.rank_messages import Outcome, Report
    from reknit.comm.tree.rounds import OnEnd
    from reknit.errors import ReknitError
    from tests.comm.conftest import Notices

ROUND = Heading("job", 7, 0, "plan", "")


class RankAbove:
    """A parent that keeps all messages, and answers reports with `end`."""

    def __init__(self, end: Outcome | ReknitError | None = None) -> None:
        self.end = end
        self.did: list[str] = []
        self.failures: list[Report] = []
        self.interrupts = False

    def ask(self, report: Report, timeout_s: float, on_end: OnEnd) -> None:
        if self.interrupts:
            raise KeyboardInterrupt
        self.did.append("ask")
        if self.end is not None:
            threading.Thread(target=on_end, args=(self.end,)).start()

    def send(self, report: Report) -> None:
        self.did.append("send")
        self.failures.append(report)

    def drop(self) -> None:
        self.did.append("drop")

    def notify(self, error: ReknitError) -> None:
        self.did.append(f"report that {error.message}")


def new_rounds(rank: int = 0, size: int = 3, above: RankAbove | None = None) -> Rounds:
    topology = Topology.flat(size, 2)
    machine = RoundMachine(rank, topology, job="job", generation=7, max_nbytes=1 << 20)
    rounds = Rounds(machine, topology.children(rank))
    if above is not None:
        rounds.connect(above)
    return rounds


def hold(rounds: Rounds, held: Call, decide: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
    """Hold a round, as a turn does."""
    try:
        requests = rounds.gather(held)
        return rounds.give(None if requests is None else decide(requests))
    except BaseException as error:
        rounds.abandon(held, error)
        raise


def report(sender: int, number: int = 0, error: ReknitError | None = None, *, opens: bool = False) -> Report:
    heading = Heading("job", 7, number, "plan", "")
    if error is not None:
        return heading.report(sender, error=error)
    return heading.report(sender, Parcel.of([b"x"]), opens=opens)


def call(timeout_s: float = 30.0, *, opens: bool = False) -> Call:
    return Call("plan", b"own", timeout_s, opens=opens)


def in_thread(fn: Callable[[], Any]) -> Callable[[], Any]:
    """Run `fn` in a thread; return a function that waits for its result, or for its error."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(fn())
        except (CommError, KeyboardInterrupt) as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)  # a test that fails does not wait for it
    thread.start()

    def wait() -> Any:
        thread.join(30)
        return ended[0]

    return wait


def test_a_round_that_failed_before_it_was_decided_is_not_decided() -> None:
    rounds = new_rounds()
    decided: list[object] = []
    rounds.attend(report(1))

    def decide(requests: list[bytes]) -> list[bytes]:
        decided.append(requests)
        return requests

    ending = in_thread(lambda: hold(rounds, call(), decide))
    with rounds.changed:  # both arrive before the thread of the rank wakes up
        rounds.attend(report(2))
        rounds.break_off(round_errors.disconnected(2))
    assert "rank 2 is gone" in ending().message
    assert decided == []


def test_a_child_that_is_in_its_next_round_waits_for_its_last_no_more() -> None:
    rounds = new_rounds()
    first = rounds.attend(report(1))
    waiting = in_thread(lambda: rounds.answer(first))
    second = rounds.attend(report(1, 1))
    assert waiting() is None
    assert second.outcome is None


@pytest.mark.parametrize(("children", "waiting"), [([2], "rank 2 has"), ([1, 2], "ranks 1-2 have")])
def test_a_rank_that_its_children_wait_for_says_so_once_in_its_own_log(
    children: Sequence[int], waiting: str, notices: Notices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_errors, "NOTICE_S", 0.05)
    rounds = new_rounds()
    with rounds.changed:  # so that each child has come when the first notice is due
        visits = [rounds.attend(report(child, opens=True)) for child in children]
    ends = [in_thread(lambda visit=visit: rounds.answer(visit)) for visit in visits]  # type: ignore[misc]
    assert f"{waiting} waited 0.05 s for rank 0 in 'plan': every rank has to make" in notices.next()
    late = [rounds.attend(report(child, opens=True)) for child in {1, 2} - set(children)]
    assert hold(rounds, call(opens=True), lambda requests: requests) == b"own"
    assert all(end() is not None for end in ends)
    assert all(rounds.answer(visit) is not None for visit in late)
    assert notices.rest == []


def test_a_rank_that_waits_for_its_children_says_so_in_its_log(
    notices: Notices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_errors, "NOTICE_S", 0.05)
    rounds = new_rounds()
    own = in_thread(lambda: hold(rounds, call(opens=True), lambda requests: requests))
    assert "rank 0 has waited 0.05 s for ranks 1-2 in 'plan'" in notices.next()
    visits = [rounds.attend(report(child, opens=True)) for child in (1, 2)]
    assert own() == b"own"
    assert all(rounds.answer(visit) is not None for visit in visits)
    assert notices.rest == []


def test_ranks_wait_without_a_word_inside_a_call(notices: Notices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_errors, "NOTICE_S", 0.0)
    rounds = new_rounds()
    own = in_thread(lambda: hold(rounds, call(timeout_s=0.2), lambda requests: requests))
    visit = rounds.attend(report(1))
    assert rounds.answer(visit) is not None
    assert "rank 2 did not come" in str(own())
    assert notices.rest == []


def test_a_child_that_takes_its_report_back_is_answered_at_once_and_the_round_fails() -> None:
    rounds = new_rounds()
    first = rounds.attend(report(1))
    back = rounds.attend(report(1, error=round_errors.gave_up(ROUND, 1)))
    assert rounds.answer(back) is not None
    assert first.outcome is None
    with pytest.raises(CommError, match="rank 1 left round 0"):
        hold(rounds, call(), lambda requests: requests)
    outcome = rounds.answer(first)
    assert outcome is not None
    assert outcome.error is not None


def test_a_child_whose_call_ends_is_not_waited_for() -> None:
    rounds = new_rounds()
    visit = rounds.attend(report(1))
    waiting = in_thread(lambda: rounds.answer(visit))
    rounds.leave(visit)
    assert waiting() is None
    with pytest.raises(CommError, match="rank 1 left round 0"):
        hold(rounds, call(), lambda requests: requests)


def test_whatever_ends_the_call_above_ends_the_round() -> None:
    above = RankAbove(ROUND.outcome(Parcel.of([b"answer"])))
    assert hold(new_rounds(1, 2, above), call(), lambda requests: requests) == b"answer"
    assert above.did == ["ask", "drop"]
    nowhere = Heading("", 0, -1, "", "")
    ends: list[tuple[Outcome | ReknitError | None, type[CommError], str]] = [
        (CommError("the call broke"), CommError, "the call broke"),
        (ROUND.outcome(error=DeadlineError("late")), DeadlineError, "late"),
        (nowhere.outcome(error=ProtocolError("not you")), ProtocolError, "not you"),
        (nowhere.outcome(), ProtocolError, "something else"),
        (None, DeadlineError, r"rank 0 did not answer round 0 \('plan'\) within 0.05 s"),
    ]
    for end, kind, text in ends:
        above = RankAbove(end)
        with pytest.raises(kind, match=text):
            hold(new_rounds(1, 2, above), call(0.05 if end is None else 30.0), lambda requests: requests)
    assert above.did == ["ask", "send", "drop"]


def test_a_rank_that_is_interrupted_tells_the_rank_above_and_those_below() -> None:
    above = RankAbove()
    rounds = new_rounds(1, 4, above)
    visit = rounds.attend(report(3))
    above.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        hold(rounds, call(), lambda requests: requests)
    assert above.did == ["send", "drop"]
    assert "rank 1 left round 0" in str(above.failures[0].error)
    outcome = rounds.answer(visit)
    assert outcome is not None
    assert "rank 1 left round 0" in str(outcome.error)
    above.interrupts, above.end = False, Heading("job", 7, 1, "plan", "").outcome(Parcel.of([b"a", b"b"]))
    rounds.attend(report(3, 1))
    assert hold(rounds, call(), lambda requests: requests) == b"a", "and it is in step again"


def test_the_rank_above_hears_that_the_group_is_broken_unless_it_said_so_itself() -> None:
    above, late = RankAbove(), RankAbove()
    rounds = new_rounds(1, 4, above)
    rounds.break_off(round_errors.closed(1))
    rounds.break_off(round_errors.disconnected(3), 3)
    assert above.did == ["report that rank 1 closed the group"]
    rounds.connect(late)
    assert late.did == above.did
    with pytest.raises(GroupClosedError):
        hold(rounds, call(), lambda requests: requests)
    deaf = RankAbove()
    other = new_rounds(1, 4, deaf)
    other.break_off(round_errors.disconnected(0), 0)
    assert deaf.did == []
    assert other.broken is other.until_broken()
