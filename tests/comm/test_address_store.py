"""Ranks find each other at an address, where rank 0 serves a store to processes with its token."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
import psutil
import pytest

from reknit.comm import serving
from reknit.comm import serving as tls
from reknit.comm.meeting import address_store
from reknit.comm.meeting import address_store as address_server
from reknit.comm.meeting.address_store import (
    MOST_VALUE_NBYTES,
    Point,
    RemoteStore,
    ServedStore,
    StoreRequest,
    checked_token,
)
from reknit.comm.meeting.hosts import gather_shape
from reknit.comm.rank_messages import Reply, decode, encode
from reknit.errors import CommError, DeadlineError, ProtocolError, UsageError
from reknit.options import CommOptions
from tests.faults.nursery import wait_until
from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.comm.meeting.rendezvous import Store

SECRET = "a secret of the job, of any letters: ä€\n"
PLAIN = CommOptions(connect_timeout_s=10)


@pytest.fixture
def last() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def point() -> Point:
    return Point("127.0.0.1", free_port())


@pytest.fixture
def served(point: Point, last: ExitStack) -> ServedStore:
    store = ServedStore(point, 4, SECRET, PLAIN)
    last.callback(store.close)
    return store


@pytest.fixture
def remote(point: Point, served: ServedStore, last: ExitStack) -> RemoteStore:
    store = RemoteStore(point, SECRET, PLAIN)
    last.callback(store.close)
    return store


def test_a_value_that_one_side_sets_the_other_gets(served: ServedStore, remote: RemoteStore) -> None:
    served.set("a", b"\x00one")
    remote.set("b", b"two\xff")
    remote.set("a", b"three")
    assert remote.get("a", 0) == served.get("a", 0) == b"three"
    assert served.get_many(["b", "a"], 0) == [b"two\xff", b"three"]
    assert remote.master == served.master == "127.0.0.1"


def test_a_value_that_comes_later_is_waited_for_on_both_sides(
    served: ServedStore, remote: RemoteStore
) -> None:
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(store.get, "late", 30) for store in (served, remote)]
        time.sleep(0.1)
        remote.set("late", b"now")
        assert [wait.result() for wait in waits] == [b"now", b"now"]


def test_who_waits_too_long_hears_which_key_is_missing(served: ServedStore, remote: RemoteStore) -> None:
    for store in (served, remote):
        for timeout_s in (0, 0.1):
            with pytest.raises(DeadlineError, match=f"'none' into the store at .* within {timeout_s} s"):
                store.get("none", timeout_s)
    served.set("one", b"")
    with pytest.raises(DeadlineError, match="'two'"):
        served.get_many(["one", "two"], 0.05)


def test_more_ranks_than_threads_wait_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, point: Point, last: ExitStack
) -> None:
    monkeypatch.setattr(address_server, "_MOST_WAITING", 2)
    for module in (address_server, address_store):
        monkeypatch.setattr(module, "LONGEST_WAIT_S", 60)
    served = ServedStore(point, 12, SECRET, PLAIN)
    last.callback(served.close)
    remotes = [RemoteStore(point, SECRET, PLAIN) for _ in range(12)]
    for remote in remotes:
        last.callback(remote.close)
    with ThreadPoolExecutor(12) as pool:
        waits = [pool.submit(remote.get, "late", 30) for remote in remotes]
        time.sleep(0.3)
        remotes[0].set("late", b"now")
        assert {wait.result() for wait in waits} == {b"now"}


def test_ranks_that_come_before_rank_0_wait_for_it(point: Point, last: ExitStack) -> None:
    remote = RemoteStore(point, SECRET, PLAIN)
    last.callback(remote.close)
    with ThreadPoolExecutor(1) as pool:
        setting = pool.submit(remote.set, "early", b"bird")
        time.sleep(0.4)
        served = ServedStore(point, 2, SECRET, PLAIN)
        last.callback(served.close)
        assert served.get("early", 20) == b"bird"
        setting.result()


def test_a_store_that_nobody_serves_is_said_to_be_out_of_reach(
    point: Point, last: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_store, "_REPLY_S", 0.3)
    remote = RemoteStore(point, SECRET, PLAIN)
    last.callback(remote.close)
    for act in (lambda: remote.get("key", 0), lambda: remote.set("key", b"")):
        with pytest.raises(
            CommError, match=f"rank 0 does not serve the store at 127.0.0.1:{point.port}"
        ) as e:
            act()
        assert not isinstance(e.value, DeadlineError)


def test_a_wrong_token_is_refused_at_once(served: ServedStore, point: Point, last: ExitStack) -> None:
    served.set("key", b"value")
    stranger = RemoteStore(point, SECRET + "?", PLAIN)
    last.callback(stranger.close)
    for act in (lambda: stranger.get("key", 60), lambda: stranger.set("key", b"mine")):
        with pytest.raises(CommError, match="refuses our token"):
            act()
    assert served.get("key", 0) == b"value"


def call(point: Point, method: str, data: bytes, metadata: Any) -> grpc.StatusCode:
    with tls.channel(str(point), PLAIN, []) as channel:
        try:
            channel.unary_unary(method, None, None)(data, timeout=10, metadata=metadata)
        except grpc.RpcError as error:
            code = error.code()
            assert isinstance(code, grpc.StatusCode)
            return code
    return grpc.StatusCode.OK


def test_nothing_is_read_of_a_call_without_the_token(
    served: ServedStore, point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []
    monkeypatch.setattr(serving, "decode", lambda data, *_: read.append(data))
    for metadata in (None, (("reknit-token", ""),), (("reknit-token-bin", b"\xff"),)):
        assert call(point, "/reknit.Store/set", b"data", metadata) is grpc.StatusCode.UNAUTHENTICATED
    assert not read
    assert call(point, "/reknit.Store/list", b"", None) is grpc.StatusCode.UNIMPLEMENTED


def test_bytes_that_are_no_call_are_refused(
    served: ServedStore, point: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = (("reknit-token", address_store.hashed(SECRET)),)
    with tls.channel(str(point), PLAIN, []) as channel:
        more = b"\0" + msgspec.msgpack.encode(["key", b"", 0.0, "more"])
        for data in (b"", b"\xc1", b"\0\xc1", more, b"\0" + b"\x81" * 2000):
            for method in ("set", "get"):
                answer = channel.unary_unary(f"/reknit.Store/{method}", None, None)(
                    data, timeout=10, metadata=known
                )
                reply = decode(answer, Reply, MOST_VALUE_NBYTES)
                assert reply.error is not None
                assert reply.error["type"] == ProtocolError.__name__
    monkeypatch.setattr(address_server, "LONGEST_WAIT_S", 0.1)
    for wait_s in (float("nan"), float("inf"), -1.0):
        data = encode(StoreRequest("key", wait_s=wait_s))
        assert call(point, "/reknit.Store/get", data, known) is grpc.StatusCode.OK


def test_sizes_and_numbers_are_bounded(
    served: ServedStore, remote: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.set("large", bytes(MOST_VALUE_NBYTES))
    assert len(remote.get("large", 0)) == MOST_VALUE_NBYTES
    for store in (served, remote):
        with pytest.raises(CommError, match="accepts no value of"):
            store.set("large", bytes(MOST_VALUE_NBYTES + 1))
        with pytest.raises(CommError, match="accepts no value of"):
            store.set("k" * 1025, b"")
    with pytest.raises(CommError, match="RESOURCE_EXHAUSTED"):
        remote.set("large", os.urandom(4 * MOST_VALUE_NBYTES))
    with pytest.raises(ProtocolError, match="larger than"):
        remote.set("large", bytes(4 * MOST_VALUE_NBYTES))
    monkeypatch.setattr(address_server, "_MOST_NBYTES", MOST_VALUE_NBYTES + 10)
    remote.set("small", bytes(10))
    with pytest.raises(CommError, match="accepts no value of"):
        remote.set("other", b"1")
    remote.set("large", b"")
    remote.set("other", b"1")
    for number in range(96 - 3):
        served.set(f"key {number}", b"")
    for store in (served, remote):
        with pytest.raises(CommError, match="at most 96 keys"):
            store.set("one more", b"")


def test_a_port_in_use_is_waited_for_and_then_named(point: Point, last: ExitStack) -> None:
    door = socket.create_server((point.host, point.port))
    with pytest.raises(CommError, match=f"rank 0 cannot listen on 127.0.0.1:{point.port}: Address already"):
        ServedStore(point, 2, SECRET, CommOptions(connect_timeout_s=0.2))
    threading.Timer(0.3, door.close).start()
    last.callback(ServedStore(point, 2, SECRET, PLAIN).close)


def test_an_address_of_no_interface_is_refused_at_once(point: Point) -> None:
    with pytest.raises(CommError, match=r"rank 0 cannot listen on 192\.0\.2\.200"):
        ServedStore(point, 2, SECRET, CommOptions(bind="192.0.2.200"))


def test_when_the_store_ends_its_port_is_free_and_no_thread_is_left(point: Point) -> None:
    before = threading.active_count()
    for _ in range(3):
        served, remote = ServedStore(point, 2, SECRET, PLAIN), RemoteStore(point, SECRET, PLAIN)
        remote.set("key", b"")
        remote.close()
        served.close()
        served.close()
    socket.create_server((point.host, point.port)).close()
    wait_until(lambda: threading.active_count() <= before, 30)


def listeners(port: int) -> set[str]:
    return {
        connection.laddr.ip.removeprefix("::ffff:")
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }


def test_who_names_loopback_is_served_on_loopback_alone(last: ExitStack) -> None:
    for host in ("127.0.0.1", "localhost"):
        port = free_port()
        last.callback(ServedStore(Point(host, port), 2, SECRET, PLAIN).close)
        assert listeners(port) in ({"127.0.0.1"}, {"::1"})
        remote = RemoteStore(Point(host, port), SECRET, PLAIN)
        last.callback(remote.close)
        remote.set("key", b"")


def test_a_name_that_leads_elsewhere_is_served_everywhere(
    last: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 0, 0, "", ("127.0.1.1", 0))]
    )
    last.callback(ServedStore(Point("node-7", port), 2, SECRET, PLAIN).close)
    assert listeners(port) in ({"::"}, {"0.0.0.0"})
    monkeypatch.undo()
    remote = RemoteStore(Point("127.0.0.1", port), SECRET, PLAIN)
    last.callback(remote.close)
    remote.set("key", b"")


def test_an_address_of_this_host_is_served_there_alone(last: ExitStack) -> None:
    own = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]
    if not own:
        pytest.skip("this machine has no network but loopback")
    port = free_port()
    last.callback(ServedStore(Point(own[0], port), 2, SECRET, PLAIN).close)
    assert listeners(port) == {own[0]}


def test_ranks_find_their_shape_at_an_address_of_ipv6(last: ExitStack) -> None:
    try:
        port = free_port("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    point = Point.of(f"tcp://[::1]:{port}")
    served = ServedStore(point, 3, SECRET, PLAIN)
    last.callback(served.close)
    remotes = [RemoteStore(point, SECRET, PLAIN) for _ in range(2)]
    stores: list[Store] = [served, *remotes]
    for remote in remotes:
        last.callback(remote.close)

    def gather(rank: int) -> list[int]:
        shape = gather_shape(stores[rank], rank, 3, job="job", options=PLAIN, timeout_s=20)
        hosts: list[int] = shape.topology.hosts
        return hosts

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(gather, range(3))) == [[0, 0, 0]] * 3


def test_those_who_came_hear_from_rank_0_who_did_not(point: Point, last: ExitStack) -> None:
    remote = RemoteStore(point, SECRET, PLAIN)
    last.callback(remote.close)
    is_served = threading.Event()

    def lead() -> None:
        with ServedStore(point, 3, SECRET, PLAIN) as served:
            is_served.set()
            gather_shape(served, 0, 3, job="job", options=PLAIN, timeout_s=2)

    def follow() -> None:
        assert is_served.wait(30)
        gather_shape(remote, 1, 3, job="job", options=PLAIN, timeout_s=20)

    acts: list[Callable[[], None]] = [lead, follow]
    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(act) for act in acts]:
            with pytest.raises(DeadlineError, match="rank 2 did not come to the rendezvous"):
                ended.result()


def test_an_address_names_a_host_and_a_port_and_anything_else_is_no_address() -> None:
    assert Point.of("tcp://10.0.0.1:29400") == ("10.0.0.1", 29400)
    assert Point.of("TCP://Node-7:1") == ("node-7", 1)
    assert Point.of("tcp://[::1]:65535") == ("::1", 65535)
    for wrong in (
        *("", "node", ":29400", "node:0", "node:65536", "node:port", "::1:29400"),
        *("user:word@node:29400", "node:29400/path", "node:29400?x=1", "[::1:29400"),
    ):
        with pytest.raises(UsageError, match="names no host and port"):
            Point.of(f"tcp://{wrong}")


def test_a_token_is_needed_and_has_to_be_a_secret() -> None:
    for token in (None, "", "too short"):
        with pytest.raises(UsageError, match="need a token of 16 letters or more"):
            checked_token(token)
