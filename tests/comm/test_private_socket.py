"""Ranks of one host meet at a socket that no other user reaches; the effects of others are bounded."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reknit.comm import serving
from reknit.comm.group import Call, Topology, barrier
from reknit.comm.meeting import rendezvous
from reknit.comm.meeting.addresses import PrivateSocket, check_owner
from reknit.comm.tree import tree_group as tree
from reknit.comm.tree.thread_group import thread_groups
from reknit.comm.tree.tree_group import TreeGroup
from reknit.engine.background.lanes import side_group
from reknit.errors import AgentError, CommError, DeadlineError, UsageError
from reknit.options import CommOptions
from reknit.system import start_thread
from reknit.testing.world import run_ranks
from tests.as_nobody import NOBODY, as_nobody, needs_another_user
from tests.comm.memory_store import MemoryStore
from tests.comm.test_strangers import PREFACE
from tests.comm.worlds import GENERATION, ask, connect_rank, endings, listen_all, settled, tree_world

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.comm.group import Group

OPTIONS = CommOptions(fan_out=2, connect_timeout_s=30)
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Let sockets be in a folder of the test, with a short name, that is empty again at its end."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)  # so that others are not kept out by this folder
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


def joined(size: int, store: Any = None, options: CommOptions = OPTIONS) -> list[TreeGroup]:
    shared = store or MemoryStore()

    def join(group: Group) -> TreeGroup:
        return TreeGroup.join(shared, group.rank, size, job="job", options=options)

    return run_ranks(size, join, groups=thread_groups(size), timeout_s=40)


def sockets(groups: list[TreeGroup]) -> list[str]:
    return [group.address.split()[0] for group in groups if group.address]


def test_ranks_of_one_host_meet_at_sockets_whose_names_are_gone_when_all_have_come(temporary: Path) -> None:
    groups = joined(7)
    assert [where.startswith(f"unix:{temporary}/") for where in sockets(groups)] == [True] * 3
    assert endings(groups, ask) == [b""] * 7
    assert settled(lambda: set(temporary.iterdir())) == set()  # while the group lives
    # The groups of agents and promoters, whose addresses go through this one, listen as it does.
    sides = endings(groups, lambda group: side_group(group, "side", OPTIONS, 30))
    assert [group.host for group in sides] == ["unix"] * 3 + [None] * 4
    assert endings(sides, ask) == [b""] * 7
    for group in (*sides, *groups):
        group.close()


def test_a_group_that_never_formed_leaves_no_name() -> None:
    for port in listen_all(3):
        port.close()


@needs_another_user
def test_another_user_who_knows_address_and_token_cannot_connect() -> None:
    ports = listen_all(2)
    path = ports[0].address.split()[0].removeprefix("unix:")
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700

    def knock() -> None:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(path)

    assert as_nobody(knock).errno == errno.EACCES
    knock()  # and it is there
    groups = [connect_rank(ports, rank) for rank in range(2)]
    assert endings(groups, ask) == [b""] * 2
    for group in groups:
        group.close()


@needs_another_user
def test_a_socket_that_another_user_has_put_in_the_place_of_a_rank_is_not_used(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    ports = listen_all(2)
    with pytest.raises(CommError, match="not private to this user"):
        ports[1].connect_parent(f"unix:{tmp_path}/ranks token")
    for port in ports:
        port.close()


def test_a_socket_in_a_folder_that_others_enter_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(CommError, match="not private to this user"):
        check_owner(f"unix:{tmp_path}/ranks")
    tmp_path.chmod(0o700)
    check_owner(f"unix:{tmp_path}/ranks")
    check_owner("127.0.0.1:1")


@pytest.mark.parametrize("why", ["other files", "a chosen address", "unknown"])
def test_ranks_that_may_not_reach_such_a_socket_connect_by_address(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["0 1", "0 2"]) if why == "other files" else iter(["", ""])
    if why != "a chosen address":
        monkeypatch.setattr(rendezvous, "reach", lambda: next(answers))
    options = CommOptions(bind="127.0.0.1" if why == "a chosen address" else None, connect_timeout_s=30)
    groups = joined(2, options=options)
    assert sockets(groups)[0].startswith("127.0.0.1:")
    for group in groups:
        group.close()


@pytest.mark.parametrize("name", ["with space", "100%41", "long" * 30])
def test_a_folder_for_temporary_files_whose_name_is_no_address_is_not_used(
    temporary: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / name))
    ports = listen_all(2)
    assert ports[0].address.startswith("unix:/tmp/reknit-")
    groups = [connect_rank(ports, rank) for rank in range(2)]
    assert endings(groups, ask) == [b""] * 2
    for group in groups:
        group.close()
    (temporary / name).rmdir()


def test_a_folder_for_temporary_files_that_cannot_be_written_is_done_without(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    ports = listen_all(2)
    assert ports[0].address.startswith("unix:/tmp/reknit-")
    for port in ports:
        port.close()

    def full(prefix: str, dir: str) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", dir)

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(CommError, match="No space left on device: '/dev/shm'") as caught:
        listen_all(2)
    assert "CommOptions.bind" in str(caught.value.remedy)


def test_a_socket_for_ranks_of_several_hosts_or_with_certificates_is_a_usage_error() -> None:
    options = CommOptions(bind="unix")
    with pytest.raises(UsageError, match="these are on 2"):
        TreeGroup(0, Topology([0, 1], 2), job="job", generation=7, options=options)
    from reknit.options import Tls

    with pytest.raises(UsageError, match="bind='unix'"):
        CommOptions(bind="unix", tls=Tls(ca="a", certificate="b", key="c"))


class OpenStore(MemoryStore):
    is_open = True


def test_who_connects_without_certificates_by_an_open_store_is_warned_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tree.warn_of_plain.cache_clear()
    for options in (OPTIONS, CommOptions(bind="127.0.0.1"), CommOptions(bind="127.0.0.1")):
        for group in joined(2, OpenStore(), options):
            group.close()
        for group in joined(2, MemoryStore(), options):
            group.close()
    warnings = [record.getMessage() for record in caplog.records if "certificates" in record.getMessage()]
    assert len(warnings) == 1
    assert "CommOptions.tls" in warnings[0]
    tree.warn_of_plain.cache_clear()


# Ranks that wait for a rank that has ended.


class Broken(MemoryStore):
    """A store that fails where rank 0 publishes its address."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error: BaseException | None = error

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("/address/0") and self.error is not None:
            error, self.error = self.error, None
            raise error
        super().set(key, value)


@pytest.mark.parametrize("error", [CommError("the disk is gone"), RuntimeError("a bug")])
def test_a_rank_that_fails_after_all_have_met_is_heard_of_at_once_by_those_below(error: Exception) -> None:
    store, begun = Broken(error), time.monotonic()

    def join(group: Group) -> BaseException:
        with pytest.raises((CommError, RuntimeError)) as caught:
            TreeGroup.join(store, group.rank, 3, job="job", options=OPTIONS)
        return caught.value

    errors = run_ranks(3, join, groups=thread_groups(3), timeout_s=40)
    assert [str(error) in str(each) for each in errors] == [True] * 3
    assert not any(isinstance(each, DeadlineError) for each in errors)
    assert time.monotonic() - begun < OPTIONS.connect_timeout_s / 2


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_rank_whose_socket_nobody_serves_any_more_is_gone_at_once(how: str, tmp_path: Path) -> None:
    ports = listen_all(2)
    address = ports[0].address
    if how == "killed":  # the name stays
        tmp_path.chmod(0o700)
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / "ranks"))
        address = f"unix:{tmp_path}/ranks token"
    ports[0].close()
    begun = time.monotonic()
    with pytest.raises(CommError, match=r"rank 0 is gone: .*no process listens") as caught:
        ports[1].connect_parent(address)
    assert not isinstance(caught.value, DeadlineError)
    assert time.monotonic() - begun < OPTIONS.connect_timeout_s / 2
    ports[1].close()


@pytest.mark.usefixtures("over_grpc")
def test_a_rank_at_an_address_that_refuses_connections_is_gone_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_REFUSED_S", 0.3)
    ports = listen_all(2, connect_timeout_s=60)
    ports[0].close()
    with pytest.raises(CommError, match=r"rank 0 is gone: .*no process listens"):
        connect_rank(ports, 1)
    ports[1].close()


# Connections of strangers.


def strangers(port: TreeGroup, number: int) -> Iterator[socket.socket]:
    """Yield connections to a port by somebody who has no token."""
    host, _, listening = port.address.split()[0].rpartition(":")
    for _ in range(number):
        yield socket.create_connection((host, int(listening)), timeout=30)


def first_bytes(stranger: socket.socket) -> bytes:
    """Return the first bytes of a server, none when it hangs up."""
    try:
        return stranger.recv(1 << 16)
    except ConnectionResetError:
        return b""


@pytest.mark.usefixtures("over_grpc")
def test_hundreds_of_connections_that_say_nothing_are_turned_away_but_for_some() -> None:
    ports = listen_all(3)
    with ExitStack() as open_ones:
        silent = [open_ones.enter_context(one) for one in strangers(ports[0], 400)]
        admitted = sum(first_bytes(one) != b"" for one in silent)
        assert 0 < admitted <= 2 * 2 + serving.SPARE_CONNECTIONS
    groups = [connect_rank(ports, rank) for rank in range(3)]
    assert endings(groups, ask) == [b""] * 3
    for group in groups:
        group.close()


@pytest.mark.usefixtures("over_grpc")
@pytest.mark.parametrize(
    ("said", "limit"),
    [(b"", "HANDSHAKE_MS"), (PREFACE + bytes(3) + b"\4" + bytes(5), "IDLE_MS")],
    ids=["nothing", "hello"],
)
def test_a_connection_that_says_no_more_than_hello_is_hung_up_soon(
    said: bytes, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HANDSHAKE_MS", "IDLE_MS"):
        monkeypatch.setattr(serving, name, 300 if name == limit else 1 << 30)
    ports = listen_all(2)
    for stranger in strangers(ports[0], 3):
        with stranger:
            stranger.sendall(said)
            while first_bytes(stranger):  # or it is a timeout of 30 s
                pass
    for port in ports:
        port.close()


@pytest.mark.usefixtures("over_grpc")
def test_a_rank_that_has_joined_is_never_taken_for_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HANDSHAKE_MS", 200)
    monkeypatch.setattr(serving, "IDLE_MS", 200)
    with tree_world(3) as groups:
        barrier_all(groups)
        time.sleep(1.0)
        barrier_all(groups)
        assert not any(group.broken for group in groups)


def barrier_all(groups: list[TreeGroup]) -> None:
    run_ranks(len(groups), lambda group: barrier(group, "here", 30), groups=groups)


def test_the_name_stays_while_somebody_is_yet_to_come(temporary: Path) -> None:
    ports = listen_all(3)
    connect_rank(ports, 1)
    assert len(list(temporary.iterdir())) == 1
    connect_rank(ports, 2)
    assert settled(lambda: set(temporary.iterdir())) == set()
    for port in ports:
        port.close()


def test_ranks_connect_to_a_socket_before_the_process_that_will_serve_it_takes_it_over() -> None:
    door = PrivateSocket.listen(10)
    handed = PrivateSocket(door.address, os.dup(door.socket.fileno()))
    door.close()  # as by a trainer whose agent has it
    topology = Topology([0] * 2, 2)
    below = TreeGroup(1, topology, job="job", generation=GENERATION, options=OPTIONS)
    connected = threading.Event()

    def connect() -> None:
        below.connect_parent(door.address)
        connected.set()

    thread = start_thread("connects", connect)
    options = replace(OPTIONS, bind="unix")
    above = TreeGroup(0, topology, job="job", generation=GENERATION, options=options, door=handed)
    assert above.address == door.address
    above.connect_parent("")
    assert connected.wait(LIMIT_S)
    thread.join()
    assert endings([above, below], ask) == [b""] * 2
    below.close()
    above.close()


def test_a_rank_that_never_connects_breaks_the_group_in_the_time_for_it() -> None:
    above, missing, well = listen_all(3, connect_timeout_s=0.2)
    connect_rank([above, missing, well], 0)
    connect_rank([above, missing, well], 2)
    above.await_below()
    broken = above.rounds.broken
    assert isinstance(broken, DeadlineError)
    assert broken.message == "rank 1 did not connect to rank 0 within 0.2 s"
    (error,) = endings([well], lambda group: group.gather(Call("ask", b"", LIMIT_S)) or group.give(None))
    assert "rank 1 did not connect" in str(error)
    for group in (well, missing, above):
        group.close()


def test_a_process_in_the_place_of_a_rank_that_is_gone_gives_its_neighbours_the_reason() -> None:
    ports = listen_all(3, fan_out=1)
    reason = AgentError("the agent of rank 1 has ended", rank=1)
    above = connect_rank(ports, 0)
    teller = start_thread("stands-in", lambda: ports[1].fail(ports[0].address, reason))
    below = connect_rank(ports, 2)
    teller.join(LIMIT_S)
    for group in (above, below):
        assert settled(lambda group=group: set() if group.broken else {"unbroken"}) == set()  # type: ignore[misc]
        assert group.rounds.broken is not None
        assert group.rounds.broken.message == reason.message
        group.close()
