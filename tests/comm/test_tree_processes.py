"""Ranks in real processes that die, hang up, or are interrupted: the others get a typed error, soon."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from reknit.comm.group import Topology, barrier
from reknit.comm.meeting.rendezvous import FolderStore
from reknit.comm.tree.tree_group import TreeGroup
from reknit.errors import ReknitError
from reknit.options import CommOptions
from tests.running.examples import at_night, is_night

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path
    from types import FrameType

SIZE = 5
LONG_S = 600.0
WAIT_S = 100.0
both = pytest.mark.parametrize("bind", ["unix", *["127.0.0.1"] * is_night()])
"""Over sockets, and at night over gRPC too."""


def be_rank(folder: str, rank: int, fan_out: int, bind: str, test: Connection) -> None:
    """Run one rank: receive orders, and send their outcomes."""
    options = CommOptions(fan_out=fan_out, bind=bind, connect_timeout_s=60)
    if folder:
        group = TreeGroup.join(FolderStore(folder), rank, SIZE, job="job", options=options)
    else:
        topology = Topology([0] * SIZE, fan_out)
        group = TreeGroup(rank, topology, job="job", generation=7, options=options)
        test.send(("listens", group.address))
        group.connect_parent(test.recv()[0])
    test.send(("joined", ""))
    for verb, *arguments in iter(test.recv, ["leave"]):
        if verb == "close":
            group.close()
        elif verb == "listen for the end":
            group.on_broken(lambda error: test.send(("broken", error.message)))
        elif verb == "fork":
            if os.fork() == 0:
                test.poll(WAIT_S)  # until the test has ended the rank's connection
                os._exit(0)
            test.send(("forked", ""))
        else:
            if verb == "interrupted round":
                threading.Thread(target=interrupt, args=({"_next"},), daemon=True).start()
            test.send(("begins", ""))
            test.send(ending_of(group, *arguments))
            if verb == "last round":
                break


def ending_of(group: TreeGroup, name: str, timeout_s: float) -> tuple[str, str]:
    try:
        barrier(group, name, timeout_s)
    except ReknitError as error:
        return type(error).__name__, error.message
    except KeyboardInterrupt:
        return "KeyboardInterrupt", ""
    return "ok", ""


def interrupt(functions: set[str]) -> None:
    """Send Ctrl-C once the main thread waits in one of these functions."""
    found: set[str] = set()
    while not ("wait" in found and found & functions):
        time.sleep(0.01)
        frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
        found = set()
        while frame is not None:
            found.add(frame.f_code.co_name)
            frame = frame.f_back
    time.sleep(0.1)  # Ctrl-C on the way into Condition.wait, rather than inside, would leave its lock open
    os.kill(os.getpid(), signal.SIGINT)


class Rank:
    """A rank in a process of its own, which joins through a folder, or by an address that it is sent."""

    def __init__(self, folder: Path | None, rank: int, fan_out: int, bind: str = "unix") -> None:
        self.rank = rank
        context = multiprocessing.get_context("forkserver")
        ends = [f"reknit.comm.tree.{name}" for name in ("tree_group", "over_grpc")]
        context.set_forkserver_preload([*ends, __name__])
        self.connection, theirs = context.Pipe()
        arguments = (str(folder or ""), rank, fan_out, bind, theirs)
        self.process = context.Process(target=be_rank, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, name: str, timeout_s: float, verb: str = "round") -> None:
        """Let the rank enter a round; in an interrupted one it gets Ctrl-C as soon as it waits."""
        self.send(verb, name, timeout_s)
        assert self.ending() == ("begins", "")

    def send(self, *words: Any) -> None:
        self.connection.send(list(words))

    def ending(self) -> tuple[str, str]:
        assert self.connection.poll(WAIT_S)
        kind, message = self.connection.recv()
        return kind, message

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def ended(self) -> int | None:
        """Wait for the end of the process, and return its exit status."""
        self.process.join(WAIT_S)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def carry_addresses(ranks: list[Rank], fan_out: int) -> None:
    """Send every rank the address of the rank above it, as launchers of ranks without a common store do."""
    addresses = [rank.ending()[1] for rank in ranks]
    for rank in reversed(ranks):
        above = Topology([0] * SIZE, fan_out).parent(rank.rank)
        rank.send("" if above is None else addresses[above])


@contextmanager
def world(folder: Path | None, fan_out: int, bind: str = "unix") -> Iterator[list[Rank]]:
    """Start the ranks, which share no store when there is no folder, and hold a first round."""
    ranks = [Rank(folder, rank, fan_out, bind) for rank in range(SIZE)]
    try:
        if folder is None:
            carry_addresses(ranks, fan_out)
        for rank in ranks:
            assert rank.ending() == ("joined", "")
        for rank in ranks:
            rank.begin("warm", 60)
        assert [rank.ending() for rank in ranks] == [("ok", "")] * SIZE
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize(("victim", "bind"), [(0, "unix"), *[(1, "127.0.0.1")] * is_night()])
def test_when_a_rank_in_a_round_is_killed_the_others_hear_it_long_before_the_deadline(
    tmp_path: Path, victim: int, bind: str
) -> None:
    with world(tmp_path, 2, bind) as ranks:
        absent = 3  # keeps the round from ending
        for rank in ranks:
            if rank.rank != absent:
                rank.begin("commit", LONG_S)
        ranks[victim].signal(signal.SIGKILL)
        for rank in [*(rank for rank in ranks if rank.rank not in (victim, absent)), ranks[absent]]:
            if rank.rank == absent:
                rank.begin("commit", LONG_S)
            kind, message = rank.ending()
            assert kind == "CommError"
            assert f"rank {victim} " in message


def test_when_a_rank_on_its_way_to_a_round_is_killed_the_others_hear_it_too(tmp_path: Path) -> None:
    victim = 1
    with world(tmp_path, 2) as ranks:
        others = [rank for rank in ranks if rank.rank != victim]
        for rank in others:
            rank.begin("commit", LONG_S)
        ranks[victim].signal(signal.SIGKILL)
        for rank in others:
            kind, message = rank.ending()
            assert kind == "CommError"
            assert f"rank {victim} is gone" in message


def test_a_rank_that_is_killed_is_missed_though_a_process_that_it_forked_lives_on(tmp_path: Path) -> None:
    victim = 1
    with world(tmp_path, 2) as ranks:
        ranks[victim].send("fork")
        assert ranks[victim].ending() == ("forked", "")
        others = [rank for rank in ranks if rank.rank != victim]
        for rank in others:
            rank.begin("commit", LONG_S)
        ranks[victim].signal(signal.SIGKILL)
        for rank in others:
            kind, message = rank.ending()
            assert kind == "CommError"
            assert f"rank {victim} is gone" in message


def test_a_rank_that_is_stopped_is_named_when_the_deadline_is_over(tmp_path: Path) -> None:
    with world(tmp_path, 16) as ranks:
        ranks[2].signal(signal.SIGSTOP)
        others = [rank for rank in ranks if rank.rank != 2]
        for rank in others:
            rank.begin("commit", 2)
        for rank in others:
            kind, message = rank.ending()
            assert kind == "DeadlineError"
            assert "rank 2 did not come to round 1 ('commit') within 2 s" in message


@both
def test_a_rank_that_is_interrupted_tells_the_others_and_is_in_step_again(tmp_path: Path, bind: str) -> None:
    with world(tmp_path, 2, bind) as ranks:
        for victim in (0, 1):
            for rank in ranks:
                if rank.rank not in (victim, 3):
                    rank.begin("commit", LONG_S)
            ranks[victim].begin("commit", LONG_S, "interrupted round")
            assert ranks[victim].ending() == ("KeyboardInterrupt", "")
            ranks[3].begin("commit", LONG_S)
            for rank in ranks:
                if rank.rank != victim:
                    kind, message = rank.ending()
                    assert kind == "CommError"
                    assert f"rank {victim} " in message
            for rank in ranks:
                rank.begin("again", 60)
            assert [rank.ending() for rank in ranks] == [("ok", "")] * SIZE


def test_a_script_that_ends_without_closing_its_group_ends_and_the_others_hear_it(tmp_path: Path) -> None:
    leaver = 1
    with world(tmp_path, 2) as ranks:
        others = [rank for rank in ranks if rank.rank != leaver]
        for rank in others:
            rank.begin("commit", LONG_S)
        ranks[leaver].send("leave")
        assert ranks[leaver].ended() == 0
        for rank in others:
            kind, message = rank.ending()
            assert kind == "GroupClosedError"
            assert f"rank {leaver} " in message


def test_scripts_that_end_right_after_their_last_round_all_get_its_answer(
    tmp_path: Path, transport: str
) -> None:
    with world(tmp_path, 1, transport) as ranks:
        for rank in ranks:
            rank.begin("last", LONG_S, "last round")
        assert [rank.ending() for rank in ranks] == [("ok", "")] * SIZE
        assert [rank.ended() for rank in ranks] == [0] * SIZE


def test_ranks_that_share_no_store_hear_at_once_that_one_was_killed() -> None:
    victim = 4
    with world(None, 2, "127.0.0.1") as ranks:
        others = [rank for rank in ranks if rank.rank != victim]
        for rank in others:
            rank.send("listen for the end")
            rank.begin("heard", 60)
        ranks[victim].begin("heard", 60)
        assert [rank.ending() for rank in ranks] == [("ok", "")] * SIZE
        ranks[victim].signal(signal.SIGKILL)
        for rank in others:
            kind, message = rank.ending()
            assert kind == "broken"
            assert f"rank {victim} is gone" in message


def test_a_rank_that_closes_its_group_is_heard_of_by_the_others_and_not_by_itself() -> None:
    leaver = 1
    with world(None, 2) as ranks:
        for rank in ranks:
            rank.send("listen for the end")
            rank.begin("heard", 60)
        assert [rank.ending() for rank in ranks] == [("ok", "")] * SIZE
        ranks[leaver].send("close")
        ranks[leaver].send("leave")
        assert ranks[leaver].ended() == 0
        for rank in ranks:
            if rank.rank != leaver:
                assert rank.ending() == ("broken", f"rank {leaver} closed the group")
                rank.send("leave")
                assert rank.ended() == 0
            with pytest.raises(EOFError):  # the failure was reported at most once
                rank.connection.recv()


@both
def test_a_rank_above_that_is_stopped_while_others_join_is_waited_for(bind: str) -> None:
    ranks = [Rank(None, rank, 2, bind) for rank in range(SIZE)]
    try:
        addresses = [rank.ending()[1] for rank in ranks]
        ranks[0].signal(signal.SIGSTOP)
        for below, above in ((3, 1), (4, 1), (2, 0), (1, 0)):
            ranks[below].send(addresses[above])
        assert [ranks[below].ending() for below in (3, 4)] == [("joined", "")] * 2
        ranks[0].signal(signal.SIGCONT)
        ranks[0].send("")
        assert [rank.ending() for rank in ranks[:3]] == [("joined", "")] * 3
        for rank in ranks:
            rank.begin("all", 60)
        assert [rank.ending() for rank in ranks] == [("ok", "")] * SIZE
    finally:
        for rank in ranks:
            rank.kill()


@at_night("test_connect.py has a job that was killed and starts again in the same place")
def test_a_job_that_is_started_again_is_not_confused_by_the_addresses_of_its_first_run(
    tmp_path: Path,
) -> None:
    with world(tmp_path, 2):
        pass
    with world(tmp_path, 2) as ranks:
        for rank in ranks:
            rank.begin("all", 60)
        assert [rank.ending() for rank in ranks] == [("ok", "")] * SIZE
