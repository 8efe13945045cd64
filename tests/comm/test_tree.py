"""The parts that only trees have: joining, sizes, and the end of connections."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from reknit.comm.group import Call, Topology, barrier
from reknit.comm.meeting.rendezvous import FolderStore
from reknit.comm.serving import channel_settings
from reknit.comm.tree.thread_group import thread_groups
from reknit.comm.tree.tree_group import TreeGroup
from reknit.errors import CommError, DeadlineError, ProtocolError, UsageError
from reknit.options import CommOptions
from reknit.testing.world import run_ranks
from tests.comm.collectives import broadcast, gather
from tests.comm.memory_store import MemoryStore
from tests.comm.worlds import (
    GENERATION,
    Resources,
    ask,
    connect_rank,
    endings,
    exchange,
    held_round,
    listen_all,
    tree_world,
)
from tests.resources import open_files, threads

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.group import Group

HERE = "127.0.0.1"
MIB = 1 << 20
both = pytest.mark.usefixtures("transport")


def test_ranks_join_through_a_shared_folder_and_deeper_than_one_level(tmp_path: Path) -> None:
    with tree_world(13, 3, FolderStore(tmp_path)) as groups:
        assert run_ranks(13, lambda group: gather(group, "names", b"%d" % group.rank, 30), groups=groups)[
            0
        ] == [b"%d" % rank for rank in range(13)]


@both
def test_megabytes_travel_up_and_down() -> None:
    with tree_world(4) as groups:
        for payload in (bytes(3 * MIB), os.urandom(3 * MIB)):

            def both(group: Group, payload: bytes = payload) -> tuple[list[bytes] | None, bytes]:
                return gather(group, "up", payload, 30), broadcast(group, "down", payload, 30)

            first, *others = run_ranks(4, both, groups=groups)
            assert first == ([payload] * 4, payload)
            assert others == [(None, payload)] * 3


@both
def test_requests_or_answers_that_are_too_large_fail_on_all_ranks_and_say_where() -> None:
    with tree_world(5, max_message_nbytes=10_000) as groups:
        for culprit in (1, 4):

            def run(group: Group, culprit: int = culprit) -> bytes:
                return ask(group, request=bytes(20_000 * (group.rank == culprit)))

            errors = endings(groups, run)
            assert [type(error) for error in errors] == [CommError] * 5
            for error in errors:
                assert f"rank {culprit} and the ranks below it" in error.message
                assert "max_message_nbytes (10000)" in error.message
            assert endings(groups, ask) == [b""] * 5
        for error in endings(groups, lambda group: ask(group, request=os.urandom(4_000))):
            assert type(error) is CommError
            assert "rank 1 and the ranks below it" in error.message, "only together they are too large"
        call = Call("x", b"", 30)
        for error in endings(groups, lambda group: exchange(group, call, lambda _: [bytes(20_000)] * 5)):
            assert type(error) is CommError
            assert "answers of 'x' for rank 1 and the ranks below it" in error.message
        assert endings(groups, ask) == [b""] * 5


def test_a_report_larger_than_the_rank_above_takes_fails_on_both_with_a_remedy(transport: str) -> None:
    topology = Topology([0, 0], 2)
    narrow, wide = (
        TreeGroup(rank, topology, job="job", generation=GENERATION, options=options)
        for rank, options in enumerate(
            CommOptions(bind=transport, max_message_nbytes=nbytes) for nbytes in (2_000, MIB)
        )
    )
    groups = [narrow, wide]
    narrow.connect_parent("")
    wide.connect_parent(narrow.address)
    for error in endings(groups, lambda group: ask(group, request=os.urandom(50_000), timeout_s=600)):
        assert type(error) is CommError
        assert "larger than this rank's limit of 3024" in error.message
        assert "same CommOptions.max_message_nbytes" in str(error.remedy)
    assert endings(groups, ask) == [b"", b""]
    for group in groups:
        group.close()


@both
def test_a_message_above_what_a_connection_takes_at_once_travels_all_the_same() -> None:
    payload = os.urandom(9 * MIB)
    assert dict(channel_settings())["grpc.max_receive_message_length"] < len(payload)
    with tree_world(3, fan_out=1) as groups:
        assert endings(groups, lambda group: ask(group, request=payload)) == [payload] * 3


def test_requests_are_merged_below_and_not_carried_to_rank_0_one_by_one() -> None:
    def run(group: Group) -> bytes:
        # The parts of two ranks exceed the limit, and the merged ones do not.
        return held_round(group, "largest", lambda: os.urandom(8_000), lambda _: [b"ok"] * 7, 30, merge=max)

    with tree_world(7, max_message_nbytes=10_000) as groups:
        assert endings(groups, run) == [b"ok"] * 7


def test_a_job_meets_again_in_the_store_of_an_earlier_run() -> None:
    store = MemoryStore()
    with tree_world(4, store=store) as groups:
        assert endings(groups, ask) == [b""] * 4
        first = groups[0].generation
    with tree_world(4, store=store) as groups:
        assert endings(groups, ask) == [b""] * 4
        assert groups[0].generation >= first
        assert {group.generation for group in groups} == {groups[0].generation}


def test_the_ranks_of_one_host_are_a_tree_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKNIT_HOST", "one")
    with tree_world(5, fan_out=2, generation=41) as groups:
        assert [group.generation for group in groups] == [41] * 5
        assert {group.topology.num_hosts for group in groups} == {1}
        assert endings(groups, ask) == [b""] * 5


def test_two_jobs_share_a_store_without_meeting() -> None:
    store = MemoryStore()
    with tree_world(3, store=store, job="a") as first, tree_world(3, store=store, job="b") as second:
        run_ranks(3, lambda group: barrier(group, "x", 30), groups=first)
        run_ranks(3, lambda group: barrier(group, "y", 30), groups=second)


def test_a_rank_whose_rank_above_never_starts_says_so() -> None:
    with pytest.raises(DeadlineError):
        TreeGroup.join(MemoryStore(), 1, 2, job="job", options=CommOptions(connect_timeout_s=0.1))


def test_a_rank_that_cannot_reach_the_rank_above_names_it_and_its_address() -> None:
    options = CommOptions(bind=HERE, connect_timeout_s=0.3)
    port = TreeGroup(1, Topology.flat(2, 2), job="job", generation=GENERATION, options=options)
    with pytest.raises(
        DeadlineError, match=r"rank 0 at 127.0.0.1:1 could not be reached within 0.3 s"
    ) as caught:
        port.connect_parent("127.0.0.1:1 secret")
    assert "CommOptions.bind" in str(caught.value.remedy)
    assert "secret" not in str(caught.value)
    port.close()


def test_ranks_that_were_started_with_different_sizes_do_not_join() -> None:
    store, options = MemoryStore(), CommOptions(bind=HERE, connect_timeout_s=30)

    def join(group: Group) -> None:
        TreeGroup.join(store, group.rank, 2 + group.rank, job="job", options=options)

    for error in endings(thread_groups(2), join):
        assert type(error) is ProtocolError
        assert "size 3" in error.message


def test_a_rank_outside_the_group_is_refused() -> None:
    for rank, size in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(UsageError, match="rank must be within"):
            TreeGroup.join(MemoryStore(), rank, size, job="job", options=CommOptions())


@pytest.mark.usefixtures("over_grpc")  # the name of a socket is gone by then
def test_a_second_process_with_a_taken_rank_is_refused_and_the_first_goes_on() -> None:
    ports = listen_all(2)
    groups = [connect_rank(ports, rank) for rank in range(2)]
    assert endings(groups, ask) == [b"", b""]
    second = listen_all(2)[1]
    with pytest.raises(ProtocolError, match="another process is rank 1 already"):
        second.connect_parent(ports[0].address)
    assert endings(groups, ask) == [b"", b""]
    for port in (*ports, second):
        port.close()


@both
def test_five_hundred_rounds_leave_the_number_of_threads_and_files_as_it_was() -> None:
    with tree_world(4) as groups:

        def rounds(group: Group) -> None:
            for number in range(250):
                ask(group, f"round {number}", b"%d" % number)

        run_ranks(4, rounds, groups=groups)
        before = Resources()
        run_ranks(4, rounds, groups=groups)
        new_threads, new_files = threads() - before.threads, open_files() - before.files
    assert len(new_threads) < 20, "each server may still add a few threads, up to its bound"
    assert len(new_files) <= 1, new_files


@both
def test_closed_groups_leave_no_thread_and_no_file_open() -> None:
    with tree_world(4) as groups:  # gRPC opens some files for good when it is first used
        endings(groups, ask)
    before = Resources()
    for _ in range(5):
        with tree_world(5) as groups:
            assert endings(groups, ask) == [b""] * 5
    assert before.new_threads() == set()
    assert before.new_files() == set()


@both
def test_a_rank_that_closes_alone_leaves_no_connection_open() -> None:
    with tree_world(2) as groups:
        endings(groups, ask)
    ports = listen_all(2)
    root = connect_rank(ports, 0)
    before = Resources()
    leaf = connect_rank(ports, 1)
    assert endings([root, leaf], ask) == [b"", b""]
    leaf.close()
    assert before.new_files() == set()
    root.close()


def test_grpc_is_not_imported_for_ranks_of_one_host() -> None:
    script = (
        "import sys, reknit.comm.group, reknit.comm.tree.thread_group, reknit.comm.meeting.rendezvous\n"
        "import reknit.testing.world\n"
        "assert not {'grpc', 'torch'} & set(sys.modules)\n"
        "from reknit.comm.group import Topology\n"
        "from reknit.comm.tree.tree_group import TreeGroup\n"
        "from reknit.options import CommOptions\n"
        "for bind in ('unix', '127.0.0.1'):\n"
        "    options = CommOptions(bind=bind)\n"
        "    ranks = [TreeGroup(n, Topology([0, 0], 2), 'job', 7, options) for n in range(2)]\n"
        "    ranks[1].connect_parent(ranks[0].address)\n"
        "    assert ('grpc' in sys.modules) == (bind != 'unix') and 'torch' not in sys.modules\n"
        "    for rank in ranks: rank.close()"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)
