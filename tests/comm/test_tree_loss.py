"""A wire that loses a packet: data that the kernel has arrives later, unless its sender is gone by then."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest

from reknit.comm import round_errors
from reknit.comm.group import Call
from reknit.comm.tree import over_grpc
from tests.comm.worlds import ask, endings, exchange, listen_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.comm.group import Group
    from reknit.comm.tree.tree_group import TreeGroup

pytestmark = pytest.mark.usefixtures("over_grpc")

_RESET = struct.pack("ii", 1, 0)


class Wire:
    """A connection to `port` whose way back is late by `late_s`, and loses all when its sender resets it."""

    def __init__(self, port: int) -> None:
        self.late_s = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._to = ("127.0.0.1", port)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                below, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(below,), daemon=True).start()

    def _carry(self, below: socket.socket) -> None:
        with below, contextlib.suppress(OSError), socket.create_connection(self._to) as above:
            up = threading.Thread(target=self._up, args=(below, above), daemon=True)
            up.start()
            with contextlib.suppress(OSError):
                while data := above.recv(1 << 16):
                    below.sendall(data + self._delayed(above))
            below.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            below.shutdown(socket.SHUT_RD)
            up.join()

    def _up(self, below: socket.socket, above: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := below.recv(1 << 16):
                above.sendall(data)
        with contextlib.suppress(OSError):
            above.shutdown(socket.SHUT_WR)

    def _delayed(self, above: socket.socket) -> bytes:
        """Wait for lost data to be sent again; return the data that came meanwhile, which waits behind it."""
        data, end = b"", time.monotonic() + self.late_s
        while (left_s := end - time.monotonic()) > 0:
            if select.select([above], [], [], left_s)[0]:
                more = above.recv(1 << 16)
                if not more:
                    raise ConnectionResetError("nobody is there to send it again")
                data += more
        return data


@pytest.fixture
def ports() -> Iterator[list[TreeGroup]]:
    taken = listen_all(3)
    yield taken
    for port in taken:
        port.close()


@pytest.fixture
def wire(ports: list[TreeGroup]) -> Iterator[Wire]:
    where = ports[0].address.split()[0]
    made = Wire(int(where.rpartition(":")[2]))
    yield made
    made.close()


@pytest.fixture
def groups(ports: list[TreeGroup], wire: Wire) -> list[TreeGroup]:
    """Rank 0, and two ranks below it, behind a proxy."""
    where, token = ports[0].address.split()
    there = f"{where.rpartition(':')[0]}:{wire.port} {token}"
    for port, above in zip(ports, ("", there, there), strict=True):
        port.connect_parent(above)
    return ports


def test_an_answer_that_has_to_be_sent_again_arrives_though_its_sender_closes_at_once(
    groups: list[TreeGroup], wire: Wire
) -> None:
    def last(group: Group) -> bytes:
        answer = ask(group, request=b"%d" % group.rank)
        group.close()
        return answer

    assert endings(groups, ask) == [b"", b"", b""]
    wire.late_s = 0.4
    assert endings(groups, last) == [b"0", b"1", b"2"]


def test_a_rank_that_does_not_hear_is_waited_for_no_longer_than_a_moment(
    groups: list[TreeGroup], wire: Wire
) -> None:
    assert endings(groups, ask) == [b"", b"", b""]
    wire.late_s = 60.0
    begin = time.monotonic()
    groups[0].close()
    assert round_errors.GRACE_S <= time.monotonic() - begin < 10


def open_calls(port: TreeGroup, wanted: int) -> int:
    """Return the number of calls that wait at a port, once it is as wanted, or after a while."""
    assert isinstance(port.server, over_grpc.Server)
    for _ in range(600):
        if port.server.num_open == wanted:
            break
        time.sleep(0.05)
    return port.server.num_open


@pytest.mark.parametrize("ending", ["one closes", "one is lost", "all are lost"])
def test_ranks_that_left_or_are_gone_are_not_waited_for(
    ports: list[TreeGroup], groups: list[TreeGroup], ending: str
) -> None:
    assert open_calls(ports[0], 4) == 4, "each of two ranks watches, and stays"
    if ending == "one closes":
        groups[2].close()
    else:
        for port in ports[2:] if ending == "one is lost" else ports[1:]:
            assert isinstance(port.uplink, over_grpc.Uplink)
            port.uplink.channel.close()
    assert groups[0].rounds.until_broken()
    assert open_calls(ports[0], 0) == 0, "all other ranks have received it"


def test_a_rank_that_is_owed_an_answer_has_not_heard_all(
    ports: list[TreeGroup], groups: list[TreeGroup]
) -> None:
    deciding, decide = threading.Event(), threading.Event()

    def slow(requests: list[bytes]) -> list[bytes]:
        deciding.set()
        assert decide.wait(30)
        return requests

    def hold(group: Group) -> bytes:
        with contextlib.suppress(ValueError):  # of gRPC, on the rank whose connection is taken away
            return exchange(group, Call("last", b"", 30), slow)
        return b""

    ended: list[object] = []
    rounds = threading.Thread(target=lambda: ended.extend(endings(groups, hold)))
    rounds.start()
    try:
        assert deciding.wait(30)
        uplink = ports[2].uplink
        assert isinstance(uplink, over_grpc.Uplink)
        uplink.channel.close()
        ports[1].rounds.until_broken()
        assert open_calls(ports[0], 2) == 2, "rank 1 has noticed that rank 2 is gone, and waits in its round"
    finally:
        decide.set()
        rounds.join(60)
    assert len(ended) == 3
    assert open_calls(ports[0], 0) == 0


def test_a_connection_may_be_closed_twice(ports: list[TreeGroup], groups: list[TreeGroup]) -> None:
    uplink = ports[1].uplink
    assert uplink is not None
    uplink.close()
    uplink.close()
    groups[1].close()
    assert groups[1].broken
