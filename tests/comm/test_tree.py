"""What only gRPC brings: joining, tokens, sizes, stray calls, and the end of connections."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from reknit.comm.base import barrier, broadcast, gather
from reknit.comm.rendezvous import FolderStore
from reknit.comm.tree import TreeGroup
from reknit.errors import CommError, DeadlineError, ProtocolError, UsageError
from reknit.options import CommOptions
from reknit.testing.world import MemoryStore, run_ranks
from tests.comm.worlds import ask, endings, resources, settled, tree_world

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.base import Group

HERE = "127.0.0.1"
MIB = 1 << 20


def test_ranks_join_through_a_shared_folder_and_deeper_than_one_level(tmp_path: Path) -> None:
    with tree_world(13, 3, FolderStore(tmp_path)) as groups:
        assert run_ranks(13, lambda group: gather(group, "names", b"%d" % group.rank, 30), groups=groups)[
            0
        ] == [b"%d" % rank for rank in range(13)]


@pytest.mark.parametrize("payload", [bytes(3 * MIB), os.urandom(3 * MIB)], ids=["zeros", "noise"])
def test_megabytes_travel_up_and_down(payload: bytes) -> None:
    with tree_world(4) as groups:
        gathered = run_ranks(4, lambda group: gather(group, "up", payload, 30), groups=groups)
        assert gathered[0] == [payload] * 4
        assert (
            run_ranks(4, lambda group: broadcast(group, "down", payload, 30), groups=groups) == [payload] * 4
        )


@pytest.mark.parametrize("culprit", [1, 4])
def test_a_request_that_is_too_large_fails_on_all_ranks_and_says_where(culprit: int) -> None:
    with tree_world(5, max_message_nbytes=10_000) as groups:
        errors = endings(groups, lambda group: ask(group, request=bytes(20_000 * (group.rank == culprit))))
        assert [type(error) for error in errors] == [CommError] * 5
        for error in errors:
            assert f"rank {culprit} and the ranks below it" in error.message
            assert "max_message_nbytes (10000)" in error.message
        assert endings(groups, ask) == [b""] * 5


def test_requests_that_are_too_large_only_together_fail_on_all_ranks() -> None:
    with tree_world(5, max_message_nbytes=10_000) as groups:
        errors = endings(groups, lambda group: ask(group, request=os.urandom(4_000)))
        assert [type(error) for error in errors] == [CommError] * 5
        assert all("rank 1 and the ranks below it" in error.message for error in errors)


def test_answers_that_are_too_large_fail_on_all_ranks() -> None:
    with tree_world(5, max_message_nbytes=10_000) as groups:
        errors = endings(groups, lambda group: group.exchange("x", b"", lambda _: [bytes(20_000)] * 5, 30))
        assert [type(error) for error in errors] == [CommError] * 5
        assert all("answers of 'x' for rank 1 and the ranks below it" in error.message for error in errors)
        assert endings(groups, ask) == [b""] * 5


def test_ranks_with_different_limits_fail_with_a_remedy_instead_of_hanging() -> None:
    store = MemoryStore()
    narrow, wide = (CommOptions(bind=HERE, max_message_nbytes=nbytes) for nbytes in (2_000, MIB))
    root = TreeGroup.join(store, 0, 2, job="job", options=narrow)
    leaf = TreeGroup.join(store, 1, 2, job="job", options=wide)
    above, below = endings([root, leaf], lambda group: ask(group, request=os.urandom(50_000), timeout_s=1))
    assert type(below) is CommError
    assert "same CommOptions.max_message_nbytes" in str(below.remedy)
    assert isinstance(above, CommError)
    for group in (leaf, root):
        group.close()


@pytest.mark.parametrize("left", ["nobody", "somebody else", "an older format"])
def test_addresses_left_by_an_earlier_run_are_overcome(left: str) -> None:
    store = MemoryStore()
    if left == "nobody":
        with tree_world(4, store=store):
            pass
    stranger = TreeGroup.listen(0, 4, job="job", options=CommOptions(fan_out=2, bind=HERE))
    if left != "nobody":
        token = " stale" if left == "somebody else" else ""
        for rank in (0, 1):
            store.set(f"reknit/job/address/{rank}", (stranger.address.split()[0] + token).encode())
    results: dict[int, TreeGroup] = {}

    def join(rank: int) -> None:
        results[rank] = TreeGroup.join(
            store, rank, 4, job="job", options=CommOptions(fan_out=2, bind=HERE, connect_timeout_s=30)
        )

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (3, 2, 1, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    groups = [results[rank] for rank in range(4)]
    assert endings(groups, ask) == [b""] * 4
    for group in groups:
        group.close()
    stranger.close()


def test_two_jobs_share_a_store_without_meeting() -> None:
    store = MemoryStore()
    with tree_world(3, store=store, job="a") as first, tree_world(3, store=store, job="b") as second:
        run_ranks(3, lambda group: barrier(group, "x", 30), groups=first)
        run_ranks(3, lambda group: barrier(group, "y", 30), groups=second)


def test_a_rank_whose_rank_above_never_starts_says_so() -> None:
    with pytest.raises(DeadlineError, match="address/0"):
        TreeGroup.join(MemoryStore(), 1, 2, job="job", options=CommOptions(connect_timeout_s=0.1))


def test_a_rank_that_cannot_reach_the_rank_above_names_it_and_its_address() -> None:
    store = MemoryStore()
    store.set("reknit/job/address/0", b"127.0.0.1:1 secret")
    with pytest.raises(
        DeadlineError, match=r"rank 0 at 127.0.0.1:1 could not be reached within 0.3 s"
    ) as caught:
        TreeGroup.join(store, 1, 2, job="job", options=CommOptions(connect_timeout_s=0.3))
    assert "CommOptions.bind" in str(caught.value.remedy)
    assert "secret" not in str(caught.value)


def test_a_rank_whose_rank_above_could_not_join_hears_that_it_closed() -> None:
    store, quick = MemoryStore(), CommOptions(fan_out=1, bind=HERE, connect_timeout_s=1)
    errors: list[BaseException] = []

    def join() -> None:
        try:
            TreeGroup.join(store, 1, 3, job="job", options=quick)
        except DeadlineError as error:
            errors.append(error)

    middle = threading.Thread(target=join)
    middle.start()
    leaf = TreeGroup.join(store, 2, 3, job="job", options=quick)
    with pytest.raises(CommError, match="rank 1 closed the group"):
        ask(leaf)
    middle.join()
    leaf.close()
    assert "address/0" in str(errors[0])


def test_ranks_that_were_started_with_different_sizes_do_not_join() -> None:
    store = MemoryStore()
    root = TreeGroup.join(store, 0, 2, job="job", options=CommOptions(bind=HERE))
    with pytest.raises(ProtocolError, match="rank 1 joins job 'job' with size 3"):
        TreeGroup.join(store, 1, 3, job="job", options=CommOptions(bind=HERE))
    root.close()


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_group_is_refused(rank: int, size: int) -> None:
    with pytest.raises(UsageError, match="rank must be within"):
        TreeGroup.join(MemoryStore(), rank, size, job="job", options=CommOptions())


def test_a_second_process_with_a_taken_rank_is_refused_and_the_first_goes_on() -> None:
    store = MemoryStore()
    with tree_world(2, store=store) as groups:
        assert endings(groups, ask) == [b"", b""]
        with pytest.raises(ProtocolError, match="another process is rank 1 already"):
            TreeGroup.join(store, 1, 2, job="job", options=CommOptions(fan_out=2, bind=HERE))
        assert endings(groups, ask) == [b"", b""]


def test_a_closed_group_says_so_when_it_is_used_again() -> None:
    with tree_world(2) as groups:
        groups[1].close()
        with pytest.raises(CommError, match="rank 1 closed the group"):
            ask(groups[1])


def test_five_hundred_rounds_leave_the_number_of_threads_and_files_as_it_was() -> None:
    with tree_world(4) as groups:

        def rounds(group: Group) -> None:
            for number in range(250):
                ask(group, f"round {number}", b"%d" % number)

        run_ranks(4, rounds, groups=groups)
        before = resources()
        run_ranks(4, rounds, groups=groups)
        after = resources()
    assert after[0] < before[0] + 20, "each server may still add a few threads, up to its bound"
    assert after[1] <= before[1] + 1


def test_closed_groups_leave_no_thread_and_no_file_open() -> None:
    with tree_world(4) as groups:  # gRPC opens some files for good when it is first used
        endings(groups, ask)
    before = resources()
    for _ in range(5):
        with tree_world(5) as groups:
            assert endings(groups, ask) == [b""] * 5
    after = settled(before)
    assert after[0] <= before[0]
    assert after[1] <= before[1]


def test_a_rank_that_closes_alone_leaves_no_connection_open() -> None:
    with tree_world(2) as groups:
        endings(groups, ask)
    store, options = MemoryStore(), CommOptions(bind=HERE)
    root = TreeGroup.join(store, 0, 2, job="job", options=options)
    before = resources()[1]
    leaf = TreeGroup.join(store, 1, 2, job="job", options=options)
    assert endings([root, leaf], ask) == [b"", b""]
    leaf.close()
    assert settled((sys.maxsize, before))[1] <= before
    root.close()


def test_grpc_is_not_imported_before_a_tree_is_needed() -> None:
    script = (
        "import sys, reknit.comm.base, reknit.comm.threads, reknit.comm.rendezvous, reknit.testing.world\n"
        "assert not {'grpc', 'torch'} & set(sys.modules)\n"
        "import reknit.comm.tree\n"
        "assert 'grpc' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)
