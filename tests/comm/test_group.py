"""Turns and the operations built on them, over ranks in threads; `test_backends.py` has the backends."""

from __future__ import annotations

import gc
import time
import traceback
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.comm.group import Call, Envelope, SoloGroup, barrier, decode, encode, failed, merged, turn
from reknit.comm.tree.thread_group import thread_groups
from reknit.errors import CommError, MismatchError, ProtocolError, ReknitError, StorageFullError
from tests.comm.collectives import agree, broadcast, gather, scatter
from tests.comm.worlds import ask, endings, exchange, held_round

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.group import Group

WAIT_S = 30.0


def echo(requests: list[bytes]) -> list[bytes]:
    return [request * 2 for request in requests]


def in_step(groups: Sequence[Group]) -> bool:
    """Return whether all ranks can hold a round."""
    return endings(groups, lambda group: barrier(group, "again", WAIT_S)) == [None] * len(groups)


@pytest.mark.parametrize("size", [1, 2, 18, 40])
def test_every_helper_gives_every_rank_what_it_promises(size: int) -> None:
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
    assert endings(thread_groups(size), run) == [
        (b"%d" % rank * 2, everyone if rank == 0 else None, b"to %d" % rank, b"all") for rank in range(size)
    ]


def test_a_process_that_is_alone_needs_no_backend_and_packs_no_values() -> None:
    group = SoloGroup()
    assert held_round(group, "round", lambda: b"ab", echo, WAIT_S) == b"abab"
    assert gather(group, "gather", b"x", WAIT_S) == [b"x"]
    assert scatter(group, "scatter", [b"y"], WAIT_S) == b"y"
    assert broadcast(group, "broadcast", b"", WAIT_S) == b""
    barrier(group, "barrier", WAIT_S)
    with pytest.raises(MismatchError):
        agree(group, "agree", MismatchError("no"), WAIT_S)
    request, answer = object(), object()
    with turn(group, "plan", WAIT_S) as its_turn:
        assert its_turn.gather(request) == [request]
        assert its_turn.give([answer], object) is answer
    group.close()


def test_groups_know_their_rank_size_tree_and_generation() -> None:
    assert [(group.rank, group.size) for group in thread_groups(3)] == [(0, 3), (1, 3), (2, 3)]
    assert SoloGroup(5).generation == 5
    before, group = time.time(), SoloGroup()
    assert int(before * 1000) <= group.generation <= group.generation <= int(time.time() * 1000)
    assert group.topology.size == 1


def test_requests_that_are_merged_reach_rank_0_as_one() -> None:
    for size in (1, 2, 7, 40):
        decided: list[list[bytes]] = []

        def run(group: Group, size: int = size, decided: list[list[bytes]] = decided) -> bytes:
            def decide(requests: list[bytes]) -> list[bytes]:
                decided.append(requests)
                return [b"for %d" % rank for rank in range(size)]

            return held_round(group, "plan", lambda: b"%d" % group.rank, decide, WAIT_S, merge=b" ".join)

        assert endings(thread_groups(size), run) == [b"for %d" % rank for rank in range(size)]
        ((request,),) = decided
        assert sorted(request.split()) == sorted(b"%d" % rank for rank in range(size))


@pytest.mark.parametrize("where", ["request", "merge", "after the request", "decision"])
def test_an_error_a_bug_or_an_interrupt_of_one_rank_ends_the_round_of_all(where: str) -> None:
    culprit = 0 if where in ("merge", "decision") else 1
    for error in (MismatchError("unlike"), KeyError("name"), KeyboardInterrupt()):

        def run(group: Group, error: BaseException = error) -> bytes:
            def come_to(place: str) -> None:
                if place == where and group.rank == culprit:
                    raise error

            def merge(parts: Sequence[bytes]) -> bytes:
                come_to("merge")
                return b"".join(parts)

            with turn(group, "plan", WAIT_S, merge=merge if where == "merge" else None) as its_turn:
                come_to("request")
                requests = its_turn.gather(b"")
                come_to("after the request")
                if requests is not None:
                    come_to("decision")
                return its_turn.give(None if requests is None else [b""] * 3, bytes)

        if where == "merge" and isinstance(error, KeyboardInterrupt):
            continue  # it comes to the thread that waits, not into the merge
        groups = thread_groups(3)
        ends = endings(groups, run)
        own = ends.pop(culprit)
        if isinstance(error, KeyboardInterrupt):
            assert own is error
        else:
            ends.append(own)
            assert isinstance(error, ReknitError) or own.__cause__ is error
        for raised in ends:
            assert type(raised) is (MismatchError if isinstance(error, ReknitError) else ReknitError)
            assert ("unlike" if isinstance(error, ReknitError) else type(error).__name__) in raised.message
            assert where == "merge" or (raised.rank, raised.phase) == (culprit, "plan")
        assert in_step(groups)


def test_when_one_rank_cannot_make_its_request_all_raise_its_error() -> None:
    failure = StorageFullError("no room", remedy="make room", path="/disk")

    def run(group: Group) -> None:
        agree(group, "write", failure if group.rank == 2 else None, WAIT_S)

    def unmerged(group: Group) -> bytes:
        def produce() -> bytes:
            if group.rank == 2:
                raise failure
            return b""

        return held_round(group, "write", produce, echo, WAIT_S)

    for error in [*endings(thread_groups(4), run), *endings(thread_groups(4), unmerged)]:
        assert type(error) is StorageFullError
        assert (error.rank, error.phase, error.path, error.remedy) == (2, "write", "/disk", "make room")


@pytest.mark.parametrize("helper", ["round", "gather", "scatter", "broadcast", "agree"])
def test_ranks_that_are_about_different_saves_hear_who_is_where(helper: str) -> None:
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

    for error in endings(thread_groups(5), run):
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


def test_when_several_ranks_fail_the_first_error_says_who_failed_too_and_stays_short() -> None:
    for size, said in (
        (5, "bad 1; also failed: rank 3 (MismatchError), 4 (MismatchError)"),
        (30, "and 11 more"),
    ):

        def run(group: Group, size: int = size) -> None:
            fails = group.rank in (1, 3, 4) if size == 5 else group.rank < 20
            agree(group, "check", MismatchError(f"bad {group.rank}") if fails else None, WAIT_S)

        for error in endings(thread_groups(size), run):
            assert type(error) is MismatchError
            assert error.rank == (1 if size == 5 else 0)
            assert error.message.endswith(said)


def test_a_decision_with_too_few_or_too_many_answers_fails_everywhere() -> None:
    for number in (0, 2, 4):

        def run(group: Group, number: int = number) -> bytes:
            return held_round(group, "plan", lambda: b"", lambda _: [b""] * number, WAIT_S)

        for error in endings(thread_groups(3), run):
            assert type(error) is ReknitError
            assert f"{number} answers for 3 ranks" in error.message


def test_what_is_no_part_of_a_round_fails_everywhere_instead_of_hanging() -> None:
    def asks(group: Group) -> bytes:
        if group.rank == 1:
            return exchange(group, Call("plan", b"\xc1", WAIT_S), echo)
        return held_round(group, "plan", lambda: b"", echo, WAIT_S)

    def answers(group: Group) -> bytes:
        if group.rank == 0:
            return exchange(group, Call("plan", b"", WAIT_S), lambda requests: [b"\xc1"] * len(requests))
        return held_round(group, "plan", lambda: b"", echo, WAIT_S)

    error, refusal, other = endings(thread_groups(3), asks)
    assert [type(error), type(other)] == [ProtocolError] * 2
    assert b"ProtocolError" in refusal
    assert type(endings(thread_groups(2), answers)[1]) is ProtocolError


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


def test_values_arrive_on_rank_0_are_merged_and_come_back_as_what_they_are() -> None:
    def run(group: Group) -> tuple[Named, int]:
        with turn(group, "plan", WAIT_S) as its_turn:
            named = its_turn.gather(Named("mine", [group.rank]))
            assert (named is None) == (group.rank > 0)
            answer = its_turn.give(named and [Named(f"of {each.ranks}", []) for each in named], Named)
        with turn(group, "highest", WAIT_S, merge=max) as its_turn:
            highest = its_turn.gather(10 * group.rank)
            assert highest in ([20], None)
            return answer, its_turn.give_all(None if highest is None else highest[0], int)

    assert endings(thread_groups(3), run) == [(Named(f"of [{rank}]", []), 20) for rank in range(3)]


def test_a_request_of_another_type_fails_on_every_rank() -> None:
    def run(group: Group) -> None:
        with turn(group, "plan", WAIT_S) as its_turn:
            its_turn.gather(Named("mine", []) if group.rank != 1 else "other")
            its_turn.arrive()

    for error in endings(thread_groups(3), run):
        assert type(error) is ProtocolError
        assert "a rank sent another message than a Named" in error.message


def test_a_body_that_ends_before_its_answer_fails_on_every_rank() -> None:
    def run(group: Group) -> None:
        with turn(group, "plan", WAIT_S) as its_turn:
            its_turn.gather(b"")
            if group.rank > 0:
                its_turn.arrive()

    for size in (1, 3):
        groups = thread_groups(size)
        assert all("round 'plan' ended without an answer" in str(error) for error in endings(groups, run))
        assert in_step(groups)


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


@pytest.mark.parametrize("after", ["gather", "give"])
def test_ctrl_c_as_a_round_begins_or_ends_keeps_no_rank_waiting(after: str) -> None:
    for rank in (0, 2):

        def run(group: Group, rank: int = rank) -> None:
            own: Any = Interrupted(group, after) if group.rank == rank else group
            with turn(own, "plan", WAIT_S) as its_turn:
                its_turn.gather(b"")
                its_turn.arrive()

        groups = thread_groups(3)
        ends = endings(groups, run)
        assert type(ends.pop(rank)) is KeyboardInterrupt
        assert [type(error) for error in ends] == [CommError if after == "gather" else type(None)] * 2
        assert in_step(groups)


def test_a_rank_whose_group_is_closed_raises_that_with_rank_and_phase_or_its_own_error() -> None:
    groups = thread_groups(2)
    groups[0].close()
    with pytest.raises(CommError) as caught:
        barrier(groups[1], "commit", WAIT_S)
    assert (caught.value.rank, caught.value.phase) == (1, "commit")
    with pytest.raises(MismatchError, match="mine") as own:
        agree(groups[1], "commit", MismatchError("mine"), WAIT_S)
    assert isinstance(own.value.__cause__, CommError)


def rounds_in_memory() -> list[object]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found).__name__ == "_Round"]


def test_rounds_that_ended_well_or_badly_are_forgotten() -> None:
    earlier = rounds_in_memory()
    groups = thread_groups(3)
    for _ in range(20):
        assert endings(groups, lambda group: ask(group, request=b"x")) == [b"x"] * 3
        kinds = [type(error) for error in endings(groups, lambda group: ask(group, f"on {group.rank}"))]
        assert kinds == [ProtocolError] * 3
    assert [found for found in rounds_in_memory() if found not in earlier] == []
