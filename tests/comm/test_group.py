"""Rounds and the operations built on them: the same over every backend, alone, in threads, and over gRPC."""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.comm.envelope import Envelope, decode, encode, failed, merged
from reknit.comm.group import Call, SoloGroup, barrier, turn
from reknit.errors import CommError, MismatchError, ProtocolError, ReknitError, StorageFullError
from tests.comm.collectives import agree, broadcast, gather, scatter
from tests.comm.worlds import endings, exchange, held_round

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.group import Group
    from tests.comm.worlds import Join

WAIT_S = 30.0


def echo(requests: list[bytes]) -> list[bytes]:
    return [request * 2 for request in requests]


@pytest.mark.parametrize("join", ["threads", "tree-1", "tree-2", "tree-16"], indirect=True)
@pytest.mark.parametrize("size", [1, 2, 5, 18, 40])
def test_every_helper_gives_every_rank_what_it_promises(join: Join, size: int) -> None:
    def run(group: Group) -> tuple[object, ...]:
        own = b"%d" % group.rank
        first = group.rank == 0
        barrier(group, "barrier", WAIT_S)
        agree(group, "agree", None, WAIT_S)
        return (
            held_round(group, "round", lambda: own, echo, WAIT_S),
            gather(group, "gather", own, WAIT_S),
            scatter(group, "scatter", [b"to %d" % rank for rank in range(size)] if first else None, WAIT_S),
            broadcast(group, "broadcast", b"all" if first else None, WAIT_S),
        )

    everyone = [b"%d" % rank for rank in range(size)]
    assert endings(join(size), run) == [
        (b"%d" % rank * 2, everyone if rank == 0 else None, b"to %d" % rank, b"all") for rank in range(size)
    ]


def test_a_process_that_is_alone_needs_no_backend() -> None:
    group = SoloGroup()
    assert held_round(group, "round", lambda: b"ab", echo, WAIT_S) == b"abab"
    assert gather(group, "gather", b"x", WAIT_S) == [b"x"]
    assert scatter(group, "scatter", [b"y"], WAIT_S) == b"y"
    assert broadcast(group, "broadcast", b"", WAIT_S) == b""
    barrier(group, "barrier", WAIT_S)
    with pytest.raises(MismatchError):
        agree(group, "agree", MismatchError("no"), WAIT_S)
    group.close()


@pytest.mark.parametrize("join", ["threads", "tree-1", "tree-2", "tree-16"], indirect=True)
@pytest.mark.parametrize("size", [1, 2, 7])
def test_requests_that_are_merged_reach_rank_0_as_one(join: Join, size: int) -> None:
    decided: list[list[bytes]] = []

    def run(group: Group) -> bytes:
        def decide(requests: list[bytes]) -> list[bytes]:
            decided.append(requests)
            return [b"for %d" % rank for rank in range(size)]

        return held_round(group, "plan", lambda: b"%d" % group.rank, decide, WAIT_S, merge=b" ".join)

    assert endings(join(size), run) == [b"for %d" % rank for rank in range(size)]
    ((request,),) = decided
    assert sorted(request.split()) == [b"%d" % rank for rank in range(size)]


@pytest.mark.parametrize("bug", [MismatchError("unlike"), KeyError("name")], ids=repr)
@pytest.mark.parametrize("join", ["threads", "tree-1", "tree-2"], indirect=True)
def test_a_merge_that_fails_reaches_every_rank(join: Join, bug: Exception) -> None:
    def run(group: Group) -> bytes:
        def refuse(_: Sequence[bytes]) -> bytes:
            raise bug

        return held_round(group, "plan", lambda: b"", echo, WAIT_S, merge=refuse)

    groups = join(5)
    errors = endings(groups, run)
    if isinstance(bug, KeyError):
        assert bug in [error and error.__cause__ for error in errors], "where it happened it is the cause"
        assert all(type(error) is ReknitError and "KeyError: 'name'" in str(error) for error in errors)
    else:
        assert all(type(error) is MismatchError and "unlike" in error.message for error in errors)
    assert endings(groups, lambda group: barrier(group, "again", WAIT_S)) == [None] * 5


@pytest.mark.parametrize("join", ["threads", "tree-2"], indirect=True)
@pytest.mark.parametrize("helper", ["round", "gather", "scatter", "broadcast", "agree"])
def test_ranks_that_are_about_different_saves_hear_who_is_where(join: Join, helper: str) -> None:
    def run(group: Group) -> object:
        about = "save a" if group.rank != 3 else "save b"
        calls: dict[str, Callable[[], object]] = {
            "round": lambda: held_round(group, "commit", lambda: b"", echo, WAIT_S, subject=about),
            "gather": lambda: gather(group, "commit", b"", WAIT_S, subject=about),
            "scatter": lambda: scatter(group, "commit", [b""] * 5, WAIT_S, subject=about),
            "broadcast": lambda: broadcast(group, "commit", b"", WAIT_S, subject=about),
            "agree": lambda: agree(group, "commit", None, WAIT_S, subject=about),
        }
        return calls[helper]()

    for error in endings(join(5), run):
        assert type(error) is ProtocolError
        assert "ranks 0-2, 4 in 'commit' of save a; rank 3 in 'commit' of save b" in error.message


@given(st.sets(st.integers(0, 40)), st.integers(1, 41), st.data())
def test_errors_that_are_merged_step_by_step_say_what_they_would_say_at_once(
    failing: set[int], size: int, data: st.DataObject
) -> None:
    envelopes = [
        failed(MismatchError(f"bad {rank}"), rank, "check") if rank in failing else Envelope(b"%d " % rank)
        for rank in range(size)
    ]
    at_once = merged(envelopes, b"".join)
    while len(envelopes) > 1:
        low = data.draw(st.integers(0, len(envelopes) - 2))
        high = data.draw(st.integers(low + 2, len(envelopes)))
        envelopes[low:high] = [decode(encode(merged(envelopes[low:high], b"".join)))]
    assert envelopes[0].payload == at_once.payload
    assert str(envelopes[0].failure()) == str(at_once.failure())
    assert len(encode(envelopes[0])) < 600


def test_a_process_that_is_alone_is_of_the_generation_given_or_of_the_moment() -> None:
    assert SoloGroup(5).generation == 5
    group = SoloGroup()
    before = time.time()
    assert int(before * 1000) <= group.generation <= group.generation <= int(time.time() * 1000)
    assert group.topology.size == 1


def test_every_rank_knows_the_same_tree_and_generation(join: Join) -> None:
    groups = join(5)
    assert {group.topology.digest for group in groups} == {groups[0].topology.digest}
    assert len({group.generation for group in groups}) == 1
    assert groups[0].topology.size == 5


def test_when_one_rank_cannot_make_its_request_all_raise_its_error(join: Join) -> None:
    def run(group: Group) -> bytes:
        def produce() -> bytes:
            if group.rank == 2:
                raise StorageFullError("no room", remedy="make room", path="/disk")
            return b""

        return held_round(group, "write", produce, echo, WAIT_S)

    for error in endings(join(4), run):
        assert type(error) is StorageFullError
        assert (error.rank, error.phase, error.path, error.remedy) == (2, "write", "/disk", "make room")


def test_where_an_error_began_it_is_told_once_with_what_brought_it_about() -> None:
    def agree_not(error: StorageFullError) -> str:
        with pytest.raises(StorageFullError) as caught:
            agree(SoloGroup(), "write", error, WAIT_S)
        return "".join(traceback.format_exception(caught.value))

    assert agree_not(StorageFullError("no room")).count("no room") == 1
    failure = StorageFullError("no room")
    failure.__cause__ = OSError("the disk is full")
    reported = agree_not(failure)
    assert (reported.count("no room"), reported.count("the disk is full")) == (1, 1)


def test_when_several_ranks_fail_the_first_error_says_who_failed_too(join: Join) -> None:
    def run(group: Group) -> None:
        failure = MismatchError(f"bad {group.rank}") if group.rank in (1, 3, 4) else None
        agree(group, "check", failure, WAIT_S)

    for error in endings(join(5), run):
        assert type(error) is MismatchError
        assert error.rank == 1
        assert error.message == "bad 1; also failed: rank 3 (MismatchError), 4 (MismatchError)"


def test_when_very_many_ranks_fail_the_message_stays_short(join: Join) -> None:
    errors = endings(join(20), lambda group: agree(group, "check", MismatchError("bad"), WAIT_S))
    assert all(error.message.endswith("and 11 more") for error in errors)


def test_when_rank_0_cannot_decide_all_raise_its_error(join: Join) -> None:
    def refuse(_: list[bytes]) -> list[bytes]:
        raise MismatchError("these do not fit")

    for error in endings(join(3), lambda group: held_round(group, "plan", lambda: b"", refuse, WAIT_S)):
        assert type(error) is MismatchError
        assert (error.message, error.rank, error.phase) == ("these do not fit", 0, "plan")


@pytest.mark.parametrize("bug", [KeyboardInterrupt(), KeyError("name")], ids=repr)
def test_a_bug_in_a_request_is_described_everywhere_and_an_interrupt_raised_unchanged_there(
    join: Join, bug: BaseException
) -> None:
    def run(group: Group) -> bytes:
        def produce() -> bytes:
            if group.rank == 1:
                raise bug
            return b""

        return held_round(group, "plan", produce, echo, WAIT_S)

    first, there, last = endings(join(3), run)
    if isinstance(bug, Exception):
        assert there is not None
        assert there.__cause__ is bug
    else:
        assert there is bug
    for error in (first, last) if there is bug else (first, there, last):
        assert type(error) is ReknitError
        assert type(bug).__name__ in error.message
        assert (error.rank, error.phase) == (1, "plan")


@pytest.mark.parametrize("bug", [KeyboardInterrupt(), KeyError("name")], ids=repr)
def test_a_bug_in_a_decision_is_described_everywhere_and_an_interrupt_raised_unchanged_on_rank_0(
    join: Join, bug: BaseException
) -> None:
    def decide(_: list[bytes]) -> list[bytes]:
        raise bug

    here, *others = endings(join(3), lambda group: held_round(group, "plan", lambda: b"", decide, WAIT_S))
    assert here is not None
    assert bug in (here, here.__cause__)
    for error in others if here is bug else (here, *others):
        assert type(error) is ReknitError
        assert type(bug).__name__ in error.message
        assert error.rank == 0


@pytest.mark.parametrize("answers", [[], [b""] * 2, [b""] * 4])
def test_a_decision_with_too_few_or_too_many_answers_fails_everywhere(
    join: Join, answers: list[bytes]
) -> None:
    errors = endings(join(3), lambda group: held_round(group, "plan", lambda: b"", lambda _: answers, WAIT_S))
    assert [type(error) for error in errors] == [ReknitError] * 3
    assert all(f"{len(answers)} answers for 3 ranks" in error.message for error in errors)


def test_a_request_that_is_no_part_of_a_round_fails_everywhere_instead_of_hanging(join: Join) -> None:
    def run(group: Group) -> bytes:
        if group.rank == 1:
            return exchange(group, Call("plan", b"\xc1", WAIT_S), echo)
        return held_round(group, "plan", lambda: b"", echo, WAIT_S)

    error, refusal, other = endings(join(3), run)
    assert [type(error), type(other)] == [ProtocolError] * 2
    assert b"ProtocolError" in refusal


def test_an_answer_that_is_no_part_of_a_round_is_a_protocol_error(join: Join) -> None:
    def run(group: Group) -> bytes:
        if group.rank == 0:
            return exchange(group, Call("plan", b"", WAIT_S), lambda requests: [b"\xc1"] * len(requests))
        return held_round(group, "plan", lambda: b"", echo, WAIT_S)

    assert type(endings(join(2), run)[1]) is ProtocolError


def test_a_group_goes_on_after_a_round_that_failed(join: Join) -> None:
    def run(group: Group) -> bytes:
        with pytest.raises(MismatchError):
            agree(group, "check", MismatchError("bad") if group.rank == 1 else None, WAIT_S)
        return held_round(group, "next", lambda: b"ab", echo, WAIT_S)

    assert endings(join(3), run) == [b"abab"] * 3


def test_a_broadcast_is_encoded_once_and_not_once_per_rank() -> None:
    kept: list[Sequence[bytes]] = []

    class Listening:
        rank, size = 0, 3

        def gather(self, call: Call) -> list[bytes]:
            return [call.request]

        def give(self, answers: Sequence[bytes]) -> bytes:
            kept.append(answers)
            return answers[0]

    group: Any = Listening()
    payload = bytes(1000)
    assert broadcast(group, "index", payload, WAIT_S) == payload
    assert kept[0][0] is kept[0][2]


class Named(msgspec.Struct):
    name: str
    ranks: list[int]


def test_values_arrive_on_rank_0_and_come_back_as_what_they_are(join: Join) -> None:
    def run(group: Group) -> Named:
        with turn(group, "plan", WAIT_S) as its_turn:
            named = its_turn.gather(Named("mine", [group.rank]))
            assert (named is None) == (group.rank > 0)
            answers = named and [Named(f"of {each.ranks}", []) for each in named]
            return its_turn.give(answers, Named)

    assert endings(join(3), run) == [Named(f"of [{rank}]", []) for rank in range(3)]


def test_values_are_merged_as_values(join: Join) -> None:
    def run(group: Group) -> int:
        with turn(group, "highest", WAIT_S, merge=max) as its_turn:
            highest = its_turn.gather(10 * group.rank)
            assert highest in ([40], None)
            return its_turn.give_all(None if highest is None else highest[0], int)

    assert endings(join(5), run) == [40] * 5


def test_the_values_of_a_process_alone_are_not_packed() -> None:
    request, answer = object(), object()
    with turn(SoloGroup(), "plan", WAIT_S) as its_turn:
        assert its_turn.gather(request) == [request]
        assert its_turn.give([answer], object) is answer


def test_a_request_of_another_type_fails_on_every_rank(join: Join) -> None:
    def run(group: Group) -> None:
        with turn(group, "plan", WAIT_S) as its_turn:
            its_turn.gather(Named("mine", []) if group.rank != 1 else "other")
            its_turn.arrive()

    for error in endings(join(3), run):
        assert type(error) is ProtocolError
        assert "a rank sent another message than a Named" in error.message


@pytest.mark.parametrize("size", [1, 3])
def test_a_body_that_ends_before_its_answer_fails_on_every_rank(join: Join, size: int) -> None:
    def run(group: Group) -> None:
        with turn(group, "plan", WAIT_S) as its_turn:
            its_turn.gather(b"")
            if group.rank > 0:
                its_turn.arrive()

    groups = join(size)
    assert {"round 'plan' ended without an answer" in str(error) for error in endings(groups, run)} == {True}
    assert endings(groups, lambda group: barrier(group, "again", WAIT_S)) == [None] * size


@pytest.mark.parametrize("bug", [KeyboardInterrupt(), MismatchError("changed")], ids=repr)
def test_a_rank_that_fails_after_its_request_is_not_waited_for(join: Join, bug: BaseException) -> None:
    def run(group: Group) -> None:
        with turn(group, "plan", WAIT_S) as its_turn:
            its_turn.gather(b"")
            if group.rank == 1:
                raise bug
            its_turn.arrive()

    groups = join(3)
    here, there, last = endings(groups, run)
    assert type(there) is type(bug)
    for error in (here, last):
        assert type(error) is (ReknitError if there is bug else MismatchError)
        assert ("KeyboardInterrupt" if there is bug else "changed") in error.message
        assert (error.rank, error.phase) == (1, "plan")
    assert endings(groups, lambda group: barrier(group, "again", WAIT_S)) == [None] * 3


class Interrupted:
    """A group in which Ctrl-C comes right after one of its calls."""

    def __init__(self, group: Group, after: str) -> None:
        self._group, self._after = group, after

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._group, name)
        if name != self._after:
            return real

        def call(*arguments: Any) -> None:
            real(*arguments)
            raise KeyboardInterrupt

        return call


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("after", ["gather", "give"])
def test_ctrl_c_as_a_round_begins_or_ends_keeps_no_rank_waiting(join: Join, rank: int, after: str) -> None:
    def run(group: Group) -> None:
        own: Any = Interrupted(group, after) if group.rank == rank else group
        with turn(own, "plan", WAIT_S) as its_turn:
            its_turn.gather(b"")
            its_turn.arrive()

    groups = join(3)
    ends = endings(groups, run)
    assert type(ends.pop(rank)) is KeyboardInterrupt
    assert [type(error) for error in ends] == [CommError if after == "gather" else type(None)] * 2
    assert endings(groups, lambda group: barrier(group, "again", WAIT_S)) == [None] * 3


def test_an_error_of_the_backend_is_signed_with_rank_and_phase(join: Join) -> None:
    groups = join(2)
    groups[0].close()
    with pytest.raises(CommError) as caught:
        barrier(groups[1], "commit", WAIT_S)
    assert (caught.value.rank, caught.value.phase) == (1, "commit")


def test_a_rank_that_fails_alone_and_cannot_tell_the_others_raises_its_own_error(join: Join) -> None:
    groups = join(2)
    groups[0].close()
    with pytest.raises(MismatchError, match="mine") as caught:
        agree(groups[1], "commit", MismatchError("mine"), WAIT_S)
    assert isinstance(caught.value.__cause__, CommError)
