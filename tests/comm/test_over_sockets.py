"""The sockets of one host: who may talk to a rank, who is given up, and who is waited for."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from reknit.comm import round_errors
from reknit.comm.group import Call, Topology
from reknit.comm.meeting.addresses import socket_path
from reknit.comm.rank_messages import Heading, Hello, News, Outcome, Parcel, Reply, decode, encode
from reknit.comm.tree import over_sockets
from reknit.comm.tree.over_sockets import DROP, HEADER, NEWS, ROUND, TOKEN, WATCH
from reknit.comm.tree.tree_group import TreeGroup
from reknit.errors import CommError, DeadlineError, ReknitError, from_wire
from reknit.options import CommOptions
from tests.comm.worlds import ask, connect_rank, endings, exchange, listen_all, settled, tree_world
from tests.faults.nursery import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from reknit.comm.group import Group
    from tests.comm.conftest import Notices

MIB = 1 << 20


class Stranger:
    """A process that connects to the socket of a rank, and sends any bytes."""

    def __init__(self, group: TreeGroup, token: str | None = None) -> None:
        """Connect, and send a token: the right one, unless another is given, even an empty one."""
        where, right = group.address.split()
        self.group = group
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(socket_path(where))
        self.socket.settimeout(30)
        if token != "":
            self.send(TOKEN, (token or right).encode())
        if token is None:
            assert self.said() == (TOKEN, encode(Reply()))

    def send(self, kind: int, message: bytes = b"", number: int = 1) -> None:
        self.socket.sendall(HEADER.pack(kind, number, len(message)) + message)

    def said(self) -> tuple[int, bytes]:
        """Return the kind and the message of the next frame."""
        kind, _, nbytes = HEADER.unpack(self.read(HEADER.size))
        return kind, self.read(nbytes)

    def read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            data += self.socket.recv(nbytes - len(data)) or pytest.fail("the connection ended")
        return data

    def refusal(self, kind: int, message: bytes) -> ReknitError:
        """Return the error that answers a message."""
        self.send(kind, message)
        answered, data = self.said()
        assert answered == kind
        wanted: type[Outcome | Reply] = Outcome if kind == ROUND else Reply
        return from_wire(decode(data, wanted, MIB).error or {})

    def hello(self, rank: int = 1, *, job: str = "job", newer: int = 0, digest: str | None = None) -> bytes:
        group = self.group
        return encode(Hello(job, group.generation + newer, rank, digest or group.topology.digest))

    def report(self, sender: int = 1, number: int = 0) -> bytes:
        place = Heading("job", self.group.generation, number, "ask", "")
        return encode(place.report(sender, Parcel.of([b"x"])))

    def join(self, rank: int) -> None:
        """Become a rank below."""
        self.send(WATCH, self.hello(rank))
        assert self.said() == (WATCH, encode(Reply()))

    def is_hung_up(self) -> bool:
        """Wait for the end of the connection."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


@pytest.fixture
def ports() -> Iterator[list[TreeGroup]]:
    """Yield rank 0, and two ranks below it that have not connected: so the name of its socket is there."""
    taken = listen_all(3)
    yield taken
    for port in taken:
        port.close()


def test_a_wrong_token_is_refused_unread_and_logged_once(
    ports: list[TreeGroup], caplog: pytest.LogCaptureFixture
) -> None:
    right = ports[0].address.split()[1]
    for token in ("0" * 64, "wrong", right[:-1], right + "0", "x" * (MIB >> 4)):
        with Stranger(ports[0], token) as stranger:
            kind, data = stranger.said()
            assert kind == TOKEN
            assert "has another token" in str(decode(data, Reply, MIB).error)
            assert stranger.is_hung_up()
    with Stranger(ports[0], "") as stranger:
        stranger.send(NEWS, encode(News("job", ports[0].generation, 1, CommError("go away").to_wire())))
        assert stranger.is_hung_up()
    assert [record.message for record in caplog.records] == [
        "rank 0 refused a process of this host: wrong token"
    ]
    groups = [connect_rank(ports, rank) for rank in range(3)]
    assert endings(groups, ask) == [b""] * 3


def test_every_socket_has_a_long_token_of_its_own() -> None:
    with tree_world(7) as groups:
        tokens = {group.address.split()[1] for group in groups if group.address}
    assert len(tokens) == 3
    assert all(len(bytes.fromhex(token)) == 32 for token in tokens)


def test_bytes_that_are_no_call_change_nothing(ports: list[TreeGroup]) -> None:
    leaf = connect_rank(ports, 1)
    huge, half = HEADER.pack(TOKEN, 0, 1 << 62), b"\0" * 9
    for noise in (b"", os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", huge, half):
        for _ in range(5):
            with Stranger(ports[0], "") as stranger:
                try:
                    stranger.socket.sendall(noise)
                    stranger.socket.shutdown(socket.SHUT_WR)
                except OSError:
                    continue  # so soon that not all could be sent
                assert stranger.is_hung_up()
    assert not ports[0].broken
    assert not leaf.broken
    groups = [ports[0], leaf, connect_rank(ports, 2)]
    ports[0].connect_parent("")
    assert endings(groups, ask) == [b""] * 3


def test_a_stray_call_is_refused_and_changes_nothing(ports: list[TreeGroup]) -> None:
    groups = [connect_rank(ports, rank) for rank in (0, 1)]
    with Stranger(ports[0]) as stray:
        news = encode(News("job", stray.group.generation, 1, {}))
        calls = {
            "noise": (ROUND, b"noise"),
            "nothing": (ROUND, b""),
            "a report of a rank that is there": (ROUND, stray.report()),
            "news of a rank that is there": (NEWS, news),
            "a rank that is there hangs up": (DROP, b""),
            "no kind": (77, b""),
            "other tree": (WATCH, stray.hello(2, digest="digest")),
            "other job": (WATCH, stray.hello(2, job="other")),
            "older run": (WATCH, stray.hello(2, newer=-1)),
            "newer run": (WATCH, stray.hello(2, newer=1)),
            "no child": (WATCH, stray.hello(0)),
            "taken": (WATCH, stray.hello()),
            "no hello": (WATCH, b""),
        }
        for kind, (number, data) in calls.items():
            assert isinstance(stray.refusal(number, data), CommError), kind
        stray.join(2)
        assert "rank 1" in stray.refusal(ROUND, stray.report(1)).message
        other_run = News("job", stray.group.generation - 1, 2, {})
        assert "older run" in stray.refusal(NEWS, encode(other_run)).message
        assert "larger than this rank's limit" in oversized(stray).message
        assert not any(group.broken for group in groups)
        stray.send(ROUND, stray.report(2))
        assert endings(groups, lambda group: ask(group, request=b"%d" % group.rank)) == [b"0", b"1"]
        _, data = stray.said()
        assert decode(data, Outcome, MIB).answers.payloads(1) == [b"x"]


def oversized(stray: Stranger) -> ReknitError:
    """Send a report above the limit of a rank; return its refusal."""
    server = stray.group.server
    assert isinstance(server, over_sockets.HostServer)
    (wire,) = (wire for wire in server.wires.values() if wire.child == 2)
    limit, wire.max_nbytes = wire.max_nbytes, 5000
    try:
        return stray.refusal(ROUND, bytes(700_000))
    finally:
        wire.max_nbytes = limit


def test_a_scan_costs_nothing_that_stays_and_of_those_who_say_nothing_only_some_are_let_in(
    ports: list[TreeGroup],
) -> None:
    process = psutil.Process()
    threads = process.num_threads()
    for _ in range(100):
        Stranger(ports[0], "").socket.close()
    with ExitStack() as open_ones:
        silent = [open_ones.enter_context(Stranger(ports[0], "")) for _ in range(100)]
        for one in silent[2 * 2 + over_sockets.SPARE_CONNECTIONS :]:
            assert one.is_hung_up()
        server = ports[0].server
        assert isinstance(server, over_sockets.HostServer)
        assert len(server.wires) == 2 * 2 + over_sockets.SPARE_CONNECTIONS
        assert process.num_threads() <= threads
    groups = [connect_rank(ports, rank) for rank in range(3)]
    assert endings(groups, ask) == [b""] * 3


def test_who_says_no_more_than_the_token_is_hung_up_and_a_rank_that_has_joined_is_not(
    ports: list[TreeGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_sockets, "PATIENCE_S", 0.2)
    groups = [connect_rank(ports, rank) for rank in (0, 1)]
    for token in ("", None):
        with Stranger(ports[0], token) as stranger:
            assert stranger.is_hung_up()
    groups.append(connect_rank(ports, 2))
    assert endings(groups, ask) == [b""] * 3


def test_a_rank_that_does_not_read_delays_no_other_and_the_end_only_for_a_moment(
    ports: list[TreeGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [connect_rank(ports, rank) for rank in (0, 2)]
    answer = os.urandom(5 * MIB)
    with Stranger(ports[0]) as stopped:
        stopped.join(1)
        stopped.send(ROUND, stopped.report())

        def hold(group: Group) -> bytes:
            return exchange(group, Call("ask", b"", 30), lambda requests: [answer] * len(requests))

        assert endings(groups, hold) == [answer] * 2
        monkeypatch.setattr(round_errors, "GRACE_S", 0.3)
        ports[0].close()  # it returns while the stopped rank is still connected


def test_an_outcome_that_waits_is_sent_before_a_rank_that_closes_ends(ports: list[TreeGroup]) -> None:
    groups = [connect_rank(ports, rank) for rank in (0, 2)]
    answer = os.urandom(5 * MIB)
    with Stranger(ports[0]) as slow:
        slow.join(1)
        slow.send(ROUND, slow.report())

        def hold(group: Group) -> bytes:
            return exchange(group, Call("ask", b"", 30), lambda requests: [answer] * len(requests))

        assert endings(groups, hold) == [answer] * 2
        closing = threading.Thread(target=ports[0].close)
        closing.start()
        _, outcome = slow.said()
        assert decode(outcome, Outcome, 9 * MIB).answers.payloads(1) == [answer]
        assert slow.said()[0] == WATCH, "the end of the group"
        slow.socket.close()
        closing.join(30)


@pytest.mark.parametrize("ending", ["one closes", "one is lost", "all are lost"])
def test_ranks_that_left_or_are_gone_are_not_waited_for(
    ports: list[TreeGroup], ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_errors, "GRACE_S", 3600.0)  # much longer than a test may take
    for rank in range(3):
        connect_rank(ports, rank)
    if ending == "one closes":
        ports[2].close()
    else:
        for port in ports[2:] if ending == "one is lost" else ports[1:]:
            assert port.uplink is not None
            port.uplink.close()
    assert ports[0].rounds.until_broken()
    assert joined(ports[0]) == set(), "all other ranks have received it"
    ports[0].close()


def joined(port: TreeGroup) -> set[int]:
    """Return the ranks below that are connected, once none is left, or after a while."""
    server = port.server
    assert isinstance(server, over_sockets.HostServer)
    return settled(lambda: {wire.child for wire in list(server.wires.values()) if wire.child is not None})


def test_a_rank_that_is_owed_an_answer_stays_until_it_is_there(ports: list[TreeGroup]) -> None:
    groups = [connect_rank(ports, rank) for rank in range(3)]
    deciding, decide = threading.Event(), threading.Event()

    def slow(requests: list[bytes]) -> list[bytes]:
        deciding.set()
        assert decide.wait(30)
        return requests

    ended: list[object] = []
    rounds = threading.Thread(
        target=lambda: ended.extend(
            endings(groups, lambda group: exchange(group, Call("last", b"", 30), slow))
        )
    )
    rounds.start()
    try:
        assert deciding.wait(30)
        uplink, server = ports[2].uplink, ports[0].server
        assert uplink is not None
        assert isinstance(server, over_sockets.HostServer)
        uplink.close()
        ports[1].rounds.until_broken()
        assert [wire.child for wire in server.wires.values()] == [1], "it waits in its round"
    finally:
        decide.set()
        rounds.join(60)
    assert len(ended) == 3
    assert joined(ports[0]) == set()


def test_an_outcome_arrives_though_the_group_ended_before_it_was_sent(ports: list[TreeGroup]) -> None:
    groups = [connect_rank(ports, rank) for rank in range(3)]
    server, holding, go_on = ports[0].server, threading.Event(), threading.Event()
    assert isinstance(server, over_sockets.HostServer)

    def hold_up() -> None:
        holding.set()
        go_on.wait(30)

    def decide(requests: list[bytes]) -> list[bytes]:
        server.submit(hold_up)
        assert holding.wait(30)
        return requests

    def hold(group: Group) -> bytes:
        answer = exchange(group, Call("last", b"x", 30), decide)
        if group.rank == 0:
            ports[0].rounds.break_off(round_errors.closed(0))
            go_on.set()
        return answer

    assert endings(groups, hold) == [b"x"] * 3


def test_what_a_rank_says_last_is_sent_before_it_leaves(
    ports: list[TreeGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(3):
        connect_rank(ports, rank)
    uplink, holding, go_on = ports[1].uplink, threading.Event(), threading.Event()
    assert isinstance(uplink, over_sockets.HostUplink)

    def hold_up() -> None:
        holding.set()
        go_on.wait(30)

    monkeypatch.setattr(uplink, "settle", hold_up)
    uplink.ring()
    assert holding.wait(30)
    closing = threading.Thread(target=ports[1].close)
    closing.start()
    wait_until(lambda: uplink.closing is not None, 30)
    go_on.set()
    closing.join(30)
    assert ports[0].rounds.until_broken().message == "rank 1 closed the group"


def test_a_call_that_is_dropped_is_taken_back(ports: list[TreeGroup]) -> None:
    groups = [connect_rank(ports, rank) for rank in range(3)]
    uplink = ports[1].uplink
    assert uplink is not None
    uplink.ask(Heading("job", groups[0].generation, 0, "ask", "").report(1, Parcel.of([b"x"])), 30, print)
    uplink.drop()
    for error in endings([groups[0], groups[2]], ask):
        assert "rank 1 left round 0" in error.message


def test_a_connection_may_be_closed_twice_and_what_comes_after_fails_at_once(ports: list[TreeGroup]) -> None:
    groups = [connect_rank(ports, rank) for rank in range(3)]
    uplink = ports[1].uplink
    assert uplink is not None
    uplink.close()
    uplink.close()
    ends: list[object] = []
    report = Heading("job", groups[0].generation, 0, "ask", "").report(1, Parcel.of([b"x"]))
    uplink.ask(report, 30, ends.append)
    assert [str(end) for end in ends] == ["the connection is closed"]
    assert groups[1].broken


def test_a_bug_in_one_end_costs_its_connection_and_nobody_waits(
    ports: list[TreeGroup], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [connect_rank(ports, rank) for rank in range(3)]

    def fail(*_: Any) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(ports[0].rounds, "attend", fail)
    for error in endings(groups, lambda group: ask(group, timeout_s=60)):
        assert isinstance(error, CommError)
        assert not isinstance(error, DeadlineError)
    assert "given up" in caplog.text


def test_a_rank_that_others_wait_for_says_so_in_its_own_log(
    ports: list[TreeGroup], notices: Notices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_errors, "NOTICE_S", 0.05)
    groups = [connect_rank(ports, rank) for rank in range(3)]
    call = Call("plan", b"", 30, opens=True)
    waiting = threading.Thread(target=exchange, args=(groups[1], call, list))
    waiting.start()
    assert "rank 1 has waited 0.05 s for rank 0 in 'plan': every rank has to make" in notices.next()
    monkeypatch.undo()
    assert endings([groups[0], groups[2]], lambda group: exchange(group, call, list)) == [b""] * 2
    waiting.join(30)
    assert notices.rest == []


def test_a_rank_above_that_says_nothing_is_waited_for_no_longer_than_allowed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/ranks")
        silent.listen()
        options = CommOptions(bind="unix", connect_timeout_s=0.5)
        port = TreeGroup(1, Topology([0, 0], 2), job="job", generation=7, options=options)
        with pytest.raises(DeadlineError, match=r"rank 0 at unix:.* could not be reached within 0.5 s"):
            port.connect_parent(f"unix:{tmp_path}/ranks token")
        port.close()
        patient = listen_all(2)[1]
        threading.Timer(0.2, patient.close).start()
        with pytest.raises(CommError, match="rank 1 closed the group"):
            patient.connect_parent(f"unix:{tmp_path}/ranks token")


def test_a_socket_that_cannot_be_listened_on_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def taken(*_: Any) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket.socket, "listen", taken)
    with pytest.raises(CommError, match=r"no server can listen on unix:.*in use") as caught:
        listen_all(2)
    assert "TMPDIR" in str(caught.value.remedy)
