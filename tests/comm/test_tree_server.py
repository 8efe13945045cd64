"""Who may call the server of a rank: tokens, stray calls, addresses."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from reknit.comm.chunks import CHUNK_NBYTES, divided, joined
from reknit.comm.rank_messages import Heading, Hello, News, Outcome, Parcel, Reply, decode, encode
from reknit.comm.serving import TOKEN
from reknit.comm.topology import Topology
from reknit.comm.tree.thread_group import thread_groups
from reknit.comm.tree.tree_group import TreeGroup
from reknit.errors import CommError, from_wire
from reknit.options import CommOptions
from tests.comm.memory_store import MemoryStore
from tests.comm.worlds import ask, endings, listen_all, tree_world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.comm.group import Group
    from reknit.comm.rank_messages import Report
    from reknit.errors import ReknitError

HERE = "127.0.0.1"
MIB = 1 << 20


def address(group: TreeGroup) -> tuple[str, str]:
    """Return the address of the server of a rank, and its token."""
    where, token = group.address.split()
    return where, token


def call(group: TreeGroup, method: str, data: bytes, token: str | None = None) -> bytes:
    """Call the server of a rank as any process with its address could."""
    where, right = address(group)
    with grpc.insecure_channel(where) as channel:
        stub: Any = channel.unary_unary(f"/reknit.Tree/{method}", None, None)
        reply: bytes = stub(data, timeout=30, metadata=((TOKEN, right if token is None else token),))
    return reply


def refusal(group: TreeGroup, method: str, data: bytes) -> ReknitError:
    """Return the error of a call that is refused."""
    reply = call(group, method, data)
    if method == "round":
        return from_wire(decode(joined([reply], MIB), Outcome, MIB).error or {})
    return from_wire(decode(reply, Reply, MIB).error or {})


def place(group: TreeGroup, number: int = 0, job: str = "job", older: int = 0) -> Heading:
    return Heading(job, group.generation - older, number, "ask", "")


def chunk(message: Report) -> bytes:
    (only,) = divided(encode(message))
    return only


@pytest.mark.parametrize("token", ["", "0" * 64, "wrong"])
def test_a_call_with_a_wrong_token_is_refused_and_logged_once(
    token: str, caplog: pytest.LogCaptureFixture
) -> None:
    with tree_world(2) as groups:
        for method in ("hello", "watch", "round", "tell", "stay"):
            with pytest.raises(grpc.RpcError) as caught:
                call(groups[0], method, encode(Reply(CommError("go away").to_wire())), token)
            failure: Any = caught.value
            assert failure.code() is grpc.StatusCode.UNAUTHENTICATED
        assert [record.message for record in caplog.records] == [
            f"rank 0 refused a call from ipv4:{HERE}: wrong token"
        ]
        assert endings(groups, ask) == [b"", b""]


def test_what_a_stranger_sends_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr("reknit.comm.tree.server.joined", lambda chunks, _: read.extend(chunks))
    taken: list[int] = []

    def flood() -> Iterator[bytes]:
        for number in range(100):
            taken.append(number)
            yield bytes(CHUNK_NBYTES)

    with tree_world(2) as groups, grpc.insecure_channel(address(groups[0])[0]) as channel:
        stub: Any = channel.stream_stream("/reknit.Tree/round", None, None)
        with pytest.raises(grpc.RpcError, match="has another token"):
            list(stub(flood(), timeout=30, metadata=((TOKEN, "wrong"),)))
    assert read == []
    assert len(taken) < 50, "the connection took no more than its buffers hold"


def test_a_stranger_is_refused_before_it_has_sent_anything() -> None:
    refused = threading.Event()

    def nothing() -> Iterator[bytes]:
        refused.wait(20)
        yield from ()

    with tree_world(2) as groups, grpc.insecure_channel(address(groups[0])[0]) as channel:
        stub: Any = channel.stream_stream("/reknit.Tree/round", None, None)
        try:
            with pytest.raises(grpc.RpcError, match="has another token"):
                list(stub(nothing(), timeout=10, metadata=((TOKEN, "wrong"),)))
        finally:
            refused.set()


def test_the_list_of_strangers_that_were_logged_is_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reknit.comm.serving.MOST_PEERS_LOGGED", 0)
    with tree_world(2) as groups:
        with pytest.raises(grpc.RpcError):
            call(groups[0], "round", b"", "wrong")
        assert caplog.records == []


def test_a_call_without_a_token_is_refused() -> None:
    with tree_world(2) as groups, grpc.insecure_channel(address(groups[0])[0]) as channel:
        stub: Any = channel.unary_unary("/reknit.Tree/round", None, None)
        with pytest.raises(grpc.RpcError, match="has another token"):
            stub(b"", timeout=30)


def test_every_server_has_a_long_token_of_its_own() -> None:
    with tree_world(7) as groups:
        tokens = {address(groups[rank])[1] for rank in (0, 1, 2)}
    for _ in range(2):
        ports = listen_all(2)
        tokens.add(ports[0].address.split()[1])
        for port in ports:
            port.close()
    assert len(tokens) == 5
    assert all(len(bytes.fromhex(token)) == 32 for token in tokens)


def test_the_token_of_one_rank_does_not_open_the_server_of_another() -> None:
    with tree_world(7) as groups, pytest.raises(grpc.RpcError, match="rank 0 has another token"):
        call(groups[0], "round", b"", address(groups[1])[1])


STRAY: dict[str, tuple[str, Callable[[TreeGroup], bytes]]] = {
    "noise": ("round", lambda group: b"noise, not a message"),
    "nothing": ("round", lambda group: b""),
    "cut off": ("round", lambda group: chunk(place(group).report(1, Parcel.of([b"x"])))[:-1]),
    "huge": ("round", lambda group: (1 << 62).to_bytes(8, "little") + b"x"),
    "other rank": ("round", lambda group: chunk(place(group).report(2, Parcel.of([b"x"])))),
    "other job": ("round", lambda group: chunk(place(group, job="other").report(1, Parcel.of([b"x"])))),
    "older run": ("round", lambda group: chunk(place(group, older=1).report(1, Parcel.of([b"x"])))),
    "newer run": ("round", lambda group: chunk(place(group, older=-1).report(1, Parcel.of([b"x"])))),
    "hello, other tree": ("hello", lambda group: encode(Hello("job", group.generation, 1, "digest"))),
    "hello, other job": (
        "hello",
        lambda group: encode(Hello("other", group.generation, 1, group.topology.digest)),
    ),
    "hello, older run": (
        "hello",
        lambda group: encode(Hello("job", group.generation - 1, 1, group.topology.digest)),
    ),
    "watch, taken": (
        "watch",
        lambda group: encode(Hello("job", group.generation, 1, group.topology.digest)),
    ),
    "watch, other run": (
        "watch",
        lambda group: encode(Hello("job", group.generation + 1, 1, group.topology.digest)),
    ),
    "watch, nothing": ("watch", lambda group: b""),
    "tell, other run": ("tell", lambda group: encode(News("job", group.generation - 1, 1, {}))),
    "tell, nothing": ("tell", lambda group: b""),
    "stay, taken": (
        "stay",
        lambda group: encode(Hello("job", group.generation, 1, group.topology.digest)),
    ),
    "stay, no child": (
        "stay",
        lambda group: encode(Hello("job", group.generation, 0, group.topology.digest)),
    ),
    "stay, other run": (
        "stay",
        lambda group: encode(Hello("job", group.generation + 1, 1, group.topology.digest)),
    ),
}


@pytest.mark.parametrize("kind", STRAY)
def test_a_stray_call_is_refused_and_changes_nothing(kind: str) -> None:
    method, data = STRAY[kind]
    with tree_world(2) as groups:
        assert endings(groups, ask) == [b"", b""]
        assert isinstance(refusal(groups[0], method, data(groups[0])), CommError)
        assert endings(groups, ask) == [b"", b""]
        assert not groups[0].broken


def test_a_report_sent_again_after_its_round_is_refused_and_changes_nothing() -> None:
    with tree_world(2) as groups:
        for _ in range(3):
            assert endings(groups, ask) == [b"", b""]
        for number in range(3):
            again = chunk(place(groups[0], number).report(1, Parcel.of([b"again"])))
            assert "is over" in refusal(groups[0], "round", again).message
        assert endings(groups, lambda group: ask(group, request=b"new")) == [b"new", b"new"]


def test_a_method_that_does_not_exist_is_refused() -> None:
    with tree_world(2) as groups, pytest.raises(grpc.RpcError) as caught:
        call(groups[0], "shutdown", b"")
    failure: Any = caught.value
    assert failure.code() is grpc.StatusCode.UNIMPLEMENTED


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    options = CommOptions(bind="203.0.113.1")
    with pytest.raises(CommError, match=r"no server can listen on 203.0.113.1") as caught:
        TreeGroup(0, Topology.flat(2, 2), job="job", generation=7, options=options)
    assert "CommOptions.bind" in str(caught.value.remedy)


def test_only_ranks_with_ranks_below_them_listen() -> None:
    with tree_world(4) as groups:
        assert [group.host for group in groups] == [HERE, HERE, None, None]
        assert [bool(group.address) for group in groups] == [True, True, False, False]


def test_a_group_without_an_address_given_finds_one() -> None:
    store, options = MemoryStore(), CommOptions(connect_timeout_s=30)

    def join(group: Group) -> TreeGroup:
        return TreeGroup.join(store, group.rank, 2, job="job", options=options)

    groups = endings(thread_groups(2), join)
    assert endings(groups, ask) == [b"", b""]
    for group in groups:
        group.close()
