"""One rank's part in rounds with messages that are lost, repeated, late, unordered, or of strangers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reknit.comm import round_errors
from reknit.comm.group import Call, Topology
from reknit.comm.rank_messages import Heading, Parcel
from reknit.comm.tree.machine import Decide, Notify, Refuse, RoundDone, RoundMachine, SendOutcome, SendReport
from reknit.errors import CommError, DeadlineError, MismatchError, ProtocolError, ReknitError, from_wire
from reknit.types.small import spelled
from tests.comm.loop import Loop
from tests.running.examples import examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.comm.rank_messages import Outcome, Report
    from reknit.comm.tree.machine import Effect

LATEST_S = 30.0 + 3 * round_errors.GRACE_S

topologies = st.builds(Topology, st.lists(st.integers(0, 4), min_size=1, max_size=14), st.integers(1, 3))
picks = st.lists(st.integers(0, 1 << 16), max_size=120)


def new_machine(rank: int = 0, size: int = 3, fan_out: int = 2, max_nbytes: int = 1 << 20) -> RoundMachine:
    topology = Topology.flat(size, fan_out)
    return RoundMachine(rank, topology, job="job", generation=7, max_nbytes=max_nbytes)


def place(number: int = 0, name: str = "plan", subject: str = "", job: str = "job", run: int = 7) -> Heading:
    return Heading(job, run, number, name, subject)


def whole(sender: int, number: int = 0, name: str = "plan", payload: bytes = b"x") -> Report:
    return place(number, name).report(sender, Parcel.of([payload]))


def call(name: str = "plan", request: bytes = b"own", timeout_s: float = 30.0) -> Call:
    return Call(name, request, timeout_s)


def sent(effects: list[Effect]) -> Report:
    """Return the only report among `effects`."""
    (report,) = [effect.report for effect in effects if isinstance(effect, SendReport)]
    return report


def reported(effects: list[Effect]) -> dict[int, Outcome]:
    return {effect.child: effect.outcome for effect in effects if isinstance(effect, SendOutcome)}


def raised(outcome: Outcome | Report) -> ReknitError:
    assert outcome.error is not None
    return from_wire(outcome.error)


def refusal(effects: list[Effect]) -> ReknitError:
    (refused,) = effects
    assert isinstance(refused, Refuse)
    return refused.error


def ended(effects: list[Effect]) -> Outcome:
    (outcome,) = [effect.outcome for effect in effects if isinstance(effect, RoundDone)]
    return outcome


def join_texts(requests: Sequence[bytes]) -> bytes:
    assert len(requests) > 1, "a request alone is not merged"
    return b" ".join(requests)


# Whole trees.


@given(topologies, st.lists(picks, min_size=1, max_size=3))
def test_every_rank_gets_its_answer_in_whatever_order_messages_arrive(
    topology: Topology, orders: list[list[int]]
) -> None:
    loop = Loop(topology, lambda requests: [b"to " + request for request in requests])
    for order in orders:
        loop.enter_all()
        loop.run(order)
    numbers = [b"%d" % rank for rank in range(topology.size)]
    assert loop.decisions == [numbers] * len(orders)
    assert loop.endings == {rank: [b"to %d" % rank] * len(orders) for rank in range(topology.size)}
    assert loop.now == 0.0, "nobody had to wait for a deadline"


@given(topologies, st.booleans(), st.data())
def test_only_ranks_above_one_that_does_not_open_a_call_say_whom_they_wait_for_and_once(
    topology: Topology, opens: bool, data: st.DataObject
) -> None:
    absent = data.draw(st.integers(0, topology.size - 1))
    loop = Loop(topology)
    loop.enter_all(but=[absent], timeout_s=30, opens=opens)
    loop.run()
    above, rank = set(), topology.parent(absent)
    while rank is not None and opens:
        above.add(rank)
        rank = topology.parent(rank)
    assert {time for time, _ in loop.notices} <= {round_errors.NOTICE_S}
    assert sorted(int(text.split()[1]) for _, text in loop.notices) == sorted(above)


def test_a_notice_names_the_absent_ranks_and_whether_those_below_them_may_be_the_cause() -> None:
    loop = Loop(Topology.flat(7, 2))
    loop.enter_all("save", but=[4, 5], opens=True)
    loop.run()
    said = sorted(text.partition(":")[0] for _, text in loop.notices)
    assert said == [
        "rank 0 has waited 5 s for ranks 1-2 or some of the 4 ranks below, whose logs then say which, "
        "in 'save'",
        "rank 1 has waited 5 s for rank 4 in 'save'",
        "rank 2 has waited 5 s for rank 5 in 'save'",
    ]
    assert all("every rank has to make this call" in text for _, text in loop.notices)


@given(topologies, st.lists(st.tuples(st.booleans(), picks), min_size=1, max_size=4), st.data())
def test_messages_that_arrive_again_at_any_time_change_nothing(
    topology: Topology, rounds: list[tuple[bool, list[int]]], data: st.DataObject
) -> None:
    loop = Loop(topology)
    for _, order in rounds:
        loop.enter_all()
        for pick in order:
            if loop.arrived and pick % 3 == 0:
                loop.deliver(loop.arrived[pick % len(loop.arrived)])
            else:
                loop.step(pick)
        loop.run()
    assert loop.endings == {rank: [b"%d" % rank] * len(rounds) for rank in range(topology.size)}
    for delivery in data.draw(st.permutations(loop.arrived)):
        loop.deliver(delivery)
    loop.run()
    assert all(len(endings) == len(rounds) for endings in loop.endings.values())


@given(topologies, picks, st.data())
def test_the_requests_of_a_subtree_become_one_on_the_way_up(
    topology: Topology, order: list[int], data: st.DataObject
) -> None:
    size = topology.size
    loop = Loop(topology, lambda requests: [b"%d %d" % (rank, len(requests)) for rank in range(size)])
    for rank in data.draw(st.permutations(range(size))):
        loop.enter(rank, Call("plan", b"%d" % rank, 30.0, merge=join_texts))
    loop.run(order)

    def expected(rank: int) -> list[bytes]:
        return [b"%d" % rank, *(text for child in topology.children(rank) for text in expected(child))]

    assert loop.decisions == [[b" ".join(expected(0))]]
    assert loop.endings == {rank: [b"%d 1" % rank] for rank in range(size)}


@given(topologies, picks, st.data())
def test_ranks_in_different_places_all_hear_who_is_where(
    topology: Topology, order: list[int], data: st.DataObject
) -> None:
    loop = Loop(topology)
    kinds = st.sampled_from([("plan", ""), ("commit", "save a"), ("commit", "save b")])
    where = {rank: data.draw(kinds) for rank in range(topology.size)}
    for rank, (name, subject) in where.items():
        loop.enter(rank, Call(name, b"", 30.0, subject))
    loop.run(order)
    places = {place(0, *kind).place: [r for r in where if where[r] == kind] for kind in set(where.values())}
    for (ending,) in loop.endings.values():
        if len(places) == 1:
            assert ending == b""
            continue
        assert type(ending) is ProtocolError
        for spot, ranks in places.items():
            assert f"{spelled(ranks)} in {spot}" in ending.message
    loop.enter_all("again")
    loop.run()
    assert [endings[1:] for endings in loop.endings.values()] == [[b"%d" % rank] for rank in where]


@given(topologies, picks, st.data())
def test_every_rank_that_came_hears_in_time_who_did_not(
    topology: Topology, order: list[int], data: st.DataObject
) -> None:
    assume(topology.size > 1)
    ranks = st.integers(0, topology.size - 1)
    absent = data.draw(st.sets(ranks, min_size=1, max_size=topology.size - 1))
    silent = {rank for head in absent for rank in topology.subtree(head)}
    loop = Loop(topology)
    loop.enter_all(but=absent)
    loop.run(order)
    for rank in set(range(topology.size)) - absent:
        (ending,) = loop.endings[rank]
        assert type(ending) is DeadlineError
        assert loop.ended_at[rank] <= LATEST_S
        if rank not in silent:
            assert ending.message == f"{spelled(silent)} did not come to round 0 ('plan') within 30 s"
        else:
            above = rank
            while above not in absent:
                above = topology.parent(above) or 0
            assert ending.message == f"rank {above} did not answer round 0 ('plan') within 30 s"
    for rank in absent:
        loop.enter(rank, call())
    loop.run()
    loop.enter_all("again")
    loop.run()
    for rank, (first, second) in loop.endings.items():
        assert isinstance(first, CommError), "a rank that comes too late fails too"
        assert second == b"%d" % rank, "and all are in step again"


@settings(max_examples=examples(300))
@given(topologies, picks, st.integers(0, 60), st.data())
def test_when_a_rank_dies_at_any_step_all_others_end_in_time_and_stay_broken(
    topology: Topology, order: list[int], steps: int, data: st.DataObject
) -> None:
    victim = data.draw(st.integers(0, topology.size - 1))
    loop = Loop(topology)
    loop.enter_all()
    for pick in order[:steps]:
        loop.step(pick)
    loop.kill(victim)
    loop.run(order[steps:])
    loop.enter_all("later")
    loop.run()
    answered = loop.decisions != []
    for rank in set(range(topology.size)) - {victim}:
        first, second = loop.endings[rank]
        assert isinstance(first, CommError) or (answered and first == b"%d" % rank)
        assert isinstance(second, CommError)
        assert f"rank {victim} is gone" in second.message
        assert loop.machines[rank].broken is not None
        assert loop.ended_at[rank] <= LATEST_S
        assert loop.machines[rank].next_at == math.inf


@settings(max_examples=examples(300))
@given(topologies, picks, st.integers(0, 60), st.data())
def test_when_a_rank_stops_waiting_at_any_step_all_end_and_are_in_step_again(
    topology: Topology, order: list[int], steps: int, data: st.DataObject
) -> None:
    leaver = data.draw(st.integers(0, topology.size - 1))
    loop = Loop(topology)
    loop.enter_all()
    for pick in order[:steps]:
        loop.step(pick)
    loop.carry_out(leaver, loop.machines[leaver].leave(KeyboardInterrupt(), loop.now))
    loop.run(order[steps:])
    ((mine,), others) = loop.endings[leaver], [e for r, (e,) in loop.endings.items() if r != leaver]
    failed = [error for error in others if isinstance(error, ReknitError)]
    reason = "rank 0 failed to decide" if leaver == 0 else f"rank {leaver} left round 0 ('plan')"
    assert all(reason in error.message for error in failed)
    if isinstance(mine, ReknitError):
        assert reason in mine.message
        if not loop.decisions:
            assert len(failed) == topology.size - 1
    else:
        assert not failed, "it left after its answer"
    assert loop.ended_at.keys() == set(range(topology.size))
    loop.enter_all("again")
    loop.run()
    assert all(loop.endings[rank][1] == b"%d" % rank for rank in range(topology.size))


@given(topologies, picks, st.integers(0, 60), st.data())
def test_when_a_rank_closes_before_all_came_every_rank_hears_that_it_did(
    topology: Topology, order: list[int], steps: int, data: st.DataObject
) -> None:
    leaver = data.draw(st.integers(0, topology.size - 1))
    loop = Loop(topology)
    loop.enter_all(but=[leaver])
    for pick in order[:steps]:
        if loop.under_way:
            loop.step(pick)
    loop.carry_out(leaver, loop.machines[leaver].break_off(round_errors.closed(leaver), loop.now))
    loop.run(order[steps:])
    for rank in set(range(topology.size)) - {leaver}:
        (ending,) = loop.endings[rank]
        assert isinstance(ending, ReknitError)
        assert ending.message == f"rank {leaver} closed the group"


@given(topologies, picks, st.data())
def test_messages_that_are_lost_fail_a_round_in_time_and_no_later_one(
    topology: Topology, order: list[int], data: st.DataObject
) -> None:
    loop = Loop(topology)
    loop.enter_all()
    for pick in order:
        if loop.under_way and pick % 4 == 0:
            del loop.under_way[pick % len(loop.under_way)]
        else:
            loop.step(pick)
    loop.run()
    if loop.machines[0].next_at == math.inf and not loop.endings[0]:
        loop.carry_out(0, loop.machines[0].leave(KeyboardInterrupt(), loop.now))  # `decided` was lost
        loop.run()
    assert all(len(endings) == 1 for endings in loop.endings.values())
    assert all(at <= LATEST_S for at in loop.ended_at.values())
    loop.enter_all("again")
    loop.run()
    assert all(loop.endings[rank][1] == b"%d" % rank for rank in range(topology.size))


# One machine, message by message.


def test_a_report_that_repeats_one_under_way_is_refused_and_changes_nothing() -> None:
    machine = new_machine()
    machine.receive_report(whole(1, payload=b"first"), 0)
    assert (
        "rank 1 took part in it before"
        in refusal(machine.receive_report(whole(1, payload=b"second"), 0)).message
    )
    machine.receive_report(whole(2), 0)
    assert machine.enter(call(), 0) == [Decide(0, [b"own", b"first", b"x"])]


def test_a_report_that_does_not_belong_here_is_refused_and_changes_nothing() -> None:
    machine = new_machine(size=4)
    machine.enter(call(timeout_s=5), 0)
    for report, reason in (
        (place(job="other").report(1, Parcel.of([b""])), "belongs to job 'other'"),
        (place(run=6).report(1, Parcel.of([b""])), "an older run of job 'job' than rank 0: generation 6"),
        (place(run=8).report(1, Parcel.of([b""])), "a newer run of job 'job' than rank 0: generation 8"),
        (whole(0), "does not report to"),
        (whole(3), "does not report to"),  # a grandchild
        (whole(7), "does not report to"),  # nobody
        (place().report(1, Parcel.of([b""] * 3)), "does not fit"),
        (place().report(1, Parcel([], [])), "does not fit"),
    ):
        error = refusal(machine.receive_report(report, 0))
        assert type(error) is ProtocolError
        assert reason in error.message
    assert "ranks 1-3 did not come" in raised(ended(machine.tick(1000))).message


def test_requests_that_refer_to_nothing_fail_the_round() -> None:
    machine = new_machine(size=2)
    machine.enter(call(), 0)
    effects = machine.receive_report(place().report(1, Parcel([b"x"], [1])), 0)
    assert type(raised(ended(effects))) is ProtocolError


def test_an_outcome_that_does_not_belong_here_changes_nothing() -> None:
    machine = new_machine(rank=1, size=2)
    answer = Parcel.of([b"answer"])
    assert machine.receive_outcome(place().outcome(answer), 0) == []
    machine.enter(call(), 0)
    for other in (place(1), place(job="other"), place(run=6)):
        assert machine.receive_outcome(other.outcome(answer), 0) == []
    assert ended(machine.receive_outcome(place().outcome(answer), 0)).answers == answer
    assert machine.receive_outcome(place().outcome(answer), 0) == []


def test_answers_that_do_not_fit_fail_the_round() -> None:
    for outcome in (place().outcome(Parcel.of([b""] * 2)), place(name="commit").outcome(Parcel.of([b""]))):
        machine = new_machine(rank=1, size=2)
        machine.enter(call(), 0)
        assert type(raised(ended(machine.receive_outcome(outcome, 0)))) is ProtocolError


def test_a_child_that_is_a_round_ahead_fails_this_round_and_is_waited_for_in_its_own() -> None:
    machine = new_machine(size=2)
    machine.receive_report(whole(1, 1, "commit"), 0)
    message = raised(ended(machine.enter(call(), 0))).message
    assert "rank 1 is in round 1 ('commit') already, rank 0 in round 0 ('plan')" in message
    assert machine.enter(call("commit"), 0) == [Decide(1, [b"own", b"x"])]
    outcomes = reported(machine.decided(1, [b"", b"for 1"], 0))
    assert outcomes[1].answers.payloads(1) == [b"for 1"]


def test_a_rank_that_stops_waiting_while_rank_0_decides_is_an_objection_however_deep_it_is() -> None:
    for by_word in (True, False):
        root, middle, inner = (new_machine(rank=rank, size=4, fan_out=1) for rank in range(3))
        for machine in (root, middle, inner):
            machine.enter(call(), 0)
        up = sent(inner.receive_report(whole(3), 0))
        requests = [b"own", b"own", b"own", b"x"]
        assert root.receive_report(sent(middle.receive_report(up, 0)), 0) == [Decide(0, requests)]
        if by_word:
            effects = inner.receive_report(place().report(3, error=round_errors.gave_up(place(), 3)), 1)
        else:
            effects = inner.child_left(3, 0, 1)
        assert inner.child_left(3, 0, 1) == [], "it is reported once"
        assert root.receive_report(sent(middle.receive_report(sent(effects), 1)), 1) == []
        ending = root.decided(0, requests, 1)
        assert "rank 3 left round 0" in raised(ended(ending)).message
        assert "rank 3 left round 0" in raised(reported(ending)[1]).message


def test_an_error_below_is_reported_above_without_waiting_for_the_others() -> None:
    machine = new_machine(rank=1, size=5)
    machine.enter(call(), 0)
    effects = machine.receive_report(place().report(3, error=CommError("too large")), 0)
    assert raised(sent(effects)).message == "too large"


def test_places_and_missing_ranks_below_are_added_to_those_here() -> None:
    machine = new_machine(size=7)
    machine.enter(call(), 0)
    below = place().report(1, places={"'plan'": [1], "'commit'": [3]}, missing=[4])
    assert machine.receive_report(below, 1) == []
    assert machine.next_at == 1 + round_errors.SETTLE_S
    message = raised(ended(machine.tick(machine.next_at))).message
    assert "ranks 0-1 in 'plan'; rank 3 in 'commit'; ranks 2, 4-6 did not come" in message


def test_a_broken_machine_fails_this_and_every_later_round_with_its_first_error() -> None:
    machine = new_machine(rank=1, size=5)
    machine.receive_report(whole(3), 0)
    effects = machine.break_off(round_errors.disconnected(4), 0, origin=4)
    assert [effect.rank for effect in effects if isinstance(effect, Notify)] == [0, 3]
    assert "rank 4 is gone" in raised(reported(effects)[3]).message
    assert machine.break_off(round_errors.closed(0), 0) == []
    for _ in range(2):
        assert "rank 4 is gone" in raised(ended(machine.enter(call(), 0))).message
    (late,) = reported(machine.receive_report(whole(3, 5), 0)).values()
    assert "rank 4 is gone" in raised(late).message


def test_a_rank_that_closes_takes_no_answer_from_those_below_the_ranks_above_it() -> None:
    machine = new_machine(rank=1, size=4)
    machine.receive_report(whole(3), 0)
    machine.enter(call(), 0)
    # Rank 0 decided, answered, and left; the report that it left may overtake the answer.
    effects = machine.break_off(round_errors.closed(0), 5, origin=0)
    assert effects == [Notify(3, effects[0].error)] if isinstance(effects[0], Notify) else False
    assert machine.next_at > 30, "the news says nothing about the answer"
    outcomes = reported(machine.receive_outcome(place().outcome(Parcel.of([b"1", b"3"])), 6))
    assert outcomes[3].answers.payloads(1) == [b"3"]


def test_a_child_that_comes_to_a_round_whose_end_is_awaited_hears_that_end_though_the_group_broke() -> None:
    machine = new_machine(rank=1, size=5)
    machine.enter(call(), 0)
    machine.receive_report(place().report(3, error=MismatchError("mine")), 0)
    machine.break_off(round_errors.closed(0), 0, origin=0)
    assert machine.receive_report(whole(4), 1) == []
    outcomes = reported(machine.receive_outcome(place().outcome(error=MismatchError("mine")), 1))
    assert [raised(outcomes[child]).message for child in (3, 4)] == ["mine", "mine"]


def test_an_outcome_before_this_rank_has_reported_is_none() -> None:
    machine = new_machine(rank=1, size=5)
    machine.enter(call(), 0)
    assert machine.receive_outcome(place().outcome(Parcel.of([b""] * 3)), 0) == []
    assert machine.receive_outcome(place().outcome(error=CommError("too soon")), 0) == []


def test_what_is_being_decided_ends_with_the_decision_though_a_rank_is_gone_meanwhile() -> None:
    machine = new_machine(rank=0, size=3)
    machine.enter(call(), 0)
    machine.receive_report(whole(1), 0)
    machine.receive_report(whole(2), 0)
    effects = machine.break_off(round_errors.disconnected(1), 1, origin=1)
    assert [type(effect) for effect in effects] == [Notify]
    outcomes = reported(machine.decided(0, [b"0", b"1", b"2"], 2))
    assert "rank 1 is gone" in raised(outcomes[2]).message


def test_a_decision_after_the_end_of_its_round_is_no_end_of_another() -> None:
    machine = new_machine(size=1)
    assert machine.enter(call(), 0) == [Decide(0, [b"own"])]
    assert machine.next_at == math.inf, "rank 0 takes as long to decide as it takes"
    machine.leave(KeyboardInterrupt(), 0)
    assert machine.decided(0, [b"late"], 0) == []
    machine.enter(call(), 0)
    assert machine.decided(0, [b"late"], 0) == []
    assert ended(machine.decided(1, [b"now"], 0)).answers.payloads(1) == [b"now"]


def test_a_decision_that_fails_or_has_too_many_or_too_few_answers_fails_the_round_for_all() -> None:
    machine = new_machine(size=2)
    ends: list[Sequence[bytes] | ReknitError] = [MismatchError("no"), [b""] * 3, [b""]]
    for number, answers in enumerate(ends):
        machine.enter(call(), 0)
        machine.receive_report(whole(1, number), 0)
        effects = machine.decided(number, answers, 0)
        assert type(raised(ended(effects))) is type(raised(reported(effects)[1]))
        assert type(raised(ended(effects))) is (ProtocolError if number else MismatchError)


def test_a_merge_that_fails_fails_the_round_for_all() -> None:
    for error, kind, text in (
        (MismatchError("unlike"), MismatchError, "unlike"),
        (KeyError("name"), CommError, "KeyError"),
    ):

        def refuse(_: Sequence[bytes], error: Exception = error) -> bytes:
            raise error

        machine, merging = new_machine(rank=1, size=4), Call("plan", b"", 30.0, merge=refuse)
        machine.receive_report(whole(3), 0)
        report = sent(machine.enter(merging, 0))
        assert type(raised(report)) is kind
        assert text in raised(report).message
        root = new_machine()
        root.receive_report(whole(1), 0)
        root.receive_report(whole(2), 0)
        assert type(raised(ended(root.enter(merging, 0)))) is kind


def test_a_child_that_merges_where_its_parent_does_not_fails_the_round() -> None:
    machine = new_machine(size=4)
    machine.receive_report(whole(1), 0)
    machine.receive_report(whole(2), 0)
    assert type(raised(ended(machine.enter(call(), 0)))) is ProtocolError


def test_requests_and_answers_above_the_limit_fail_the_round_instead_of_being_sent() -> None:
    leaf = new_machine(rank=1, size=2, max_nbytes=1000)
    report = sent(leaf.enter(call(request=bytes(1001)), 0))
    assert "the requests of rank 1" in raised(report).message
    assert "max_message_nbytes (1000)" in raised(report).message
    root = new_machine(size=2, max_nbytes=1000)
    root.enter(call(), 0)
    root.receive_report(whole(1), 0)
    effects = root.decided(0, [b"", bytes(1001)], 0)
    assert "the answers of 'plan' for rank 1" in raised(reported(effects)[1]).message
    assert ended(effects).error is not None
    root.enter(call(), 0)
    root.receive_report(whole(1, 1), 0)
    assert ended(root.decided(1, [bytes(5000), b""], 0)).error is None, "its own answer goes nowhere"


def test_the_deeper_a_rank_the_sooner_it_reports_and_the_longer_it_waits() -> None:
    size, fan_out = 40, 1
    machines = [new_machine(rank, size, fan_out) for rank in range(size)]
    for machine in machines:
        machine.enter(call(timeout_s=10), 0)
    due = [machine.next_at for machine in machines[:-1]]
    assert due == sorted(due, reverse=True)
    assert 10 <= due[-1] < due[0] <= 10 + round_errors.GRACE_S
    for machine in machines[:-1]:
        machine.tick(machine.next_at)
    due_below = [machine.next_at for machine in machines[1:]]
    assert due_below == sorted(due_below)
    assert due_below[-1] <= 10 + 2 * round_errors.GRACE_S
    machine = new_machine()
    machine.enter(call(timeout_s=math.inf), 0)
    assert machine.next_at < 2 * round_errors.FOREVER_S


@given(st.integers(0, 1), st.binary(max_size=60))
def test_noise_in_reports_and_outcomes_ends_in_a_typed_error_or_nothing(rank: int, noise: bytes) -> None:
    machine = new_machine(rank, size=2)
    machine.enter(call(), 0)
    which = [len(noise), *noise[:3]]
    heading = place(number=noise[0] if noise else 0)
    if rank == 0:
        machine.receive_report(heading.report(1, Parcel([noise], which)), 0)
    else:
        machine.receive_outcome(heading.outcome(Parcel([noise], which)), 0)


def test_a_round_to_which_rank_0_came_alone_says_that_all_ranks_have_to_call() -> None:
    for present, alone in (([0], True), ([0, 1], False), ([1], False)):
        error = round_errors.failed_round(place(), {"'plan'": present}, [2, 3], 30)
        assert ("not rank 0 alone as with torch.save" in str(error.remedy)) == alone


def test_a_round_with_a_place_for_every_rank_failed_with_a_message_that_stays_short() -> None:
    places = {f"'{rank}'": [rank] for rank in range(1000)}
    message = round_errors.failed_round(place(), places, [], 30).message
    assert "rank 0 in '0'; rank 1 in '1'" in message
    assert message.endswith("; and 992 places more")
