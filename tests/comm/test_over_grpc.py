"""Who may call the server of a rank: tokens, stray calls, addresses."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from reknit.comm.group import Topology
from reknit.comm.rank_messages import (
    CHUNK_NBYTES,
    Heading,
    Hello,
    News,
    Outcome,
    Parcel,
    Reply,
    decode,
    divided,
    encode,
    joined,
)
from reknit.comm.serving import TOKEN
from reknit.comm.tree.thread_group import thread_groups
from reknit.comm.tree.tree_group import TreeGroup
from reknit.errors import CommError, from_wire
from reknit.options import CommOptions
from tests.comm.memory_store import MemoryStore
from tests.comm.worlds import ask, endings, listen_all, tree_world

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.comm.group import Group
    from reknit.comm.rank_messages import Report
    from reknit.errors import ReknitError

pytestmark = pytest.mark.usefixtures("over_grpc")

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


def test_a_call_with_a_wrong_token_is_refused_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with tree_world(2) as groups:
        for token in ("", "0" * 64, "wrong"):
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
    monkeypatch.setattr("reknit.comm.tree.over_grpc.joined", lambda chunks, _: read.extend(chunks))
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


def test_every_server_has_a_long_token_of_its_own() -> None:
    with tree_world(7) as groups:
        tokens = {address(groups[rank])[1] for rank in (0, 1, 2)}
        with pytest.raises(grpc.RpcError, match="rank 0 has another token"):
            call(groups[0], "round", b"", address(groups[1])[1])
    for _ in range(2):
        ports = listen_all(2)
        tokens.add(ports[0].address.split()[1])
        for port in ports:
            port.close()
    assert len(tokens) == 5
    assert all(len(bytes.fromhex(token)) == 32 for token in tokens)


def stray_calls(group: TreeGroup) -> dict[str, tuple[str, bytes]]:
    """Return calls that do not belong to a rank, by their kinds."""

    def report(sender: int = 1, **how: Any) -> bytes:
        return chunk(place(group, **how).report(sender, Parcel.of([b"x"])))

    def hello(rank: int = 1, *, job: str = "job", newer: int = 0, digest: str | None = None) -> bytes:
        return encode(Hello(job, group.generation + newer, rank, digest or group.topology.digest))

    return {
        "noise": ("round", b"noise, not a message"),
        "nothing": ("round", b""),
        "cut off": ("round", report()[:-1]),
        "huge": ("round", (1 << 62).to_bytes(8, "little") + b"x"),
        "other rank": ("round", report(2)),
        "other job": ("round", report(job="other")),
        "older run": ("round", report(older=1)),
        "newer run": ("round", report(older=-1)),
        "hello, other tree": ("hello", hello(digest="digest")),
        "hello, other job": ("hello", hello(job="other")),
        "hello, older run": ("hello", hello(newer=-1)),
        "hello, no child": ("hello", hello(0)),
        "watch, taken": ("watch", hello()),
        "watch, other run": ("watch", hello(newer=1)),
        "watch, nothing": ("watch", b""),
        "tell, other run": ("tell", encode(News("job", group.generation - 1, 1, {}))),
        "tell, nothing": ("tell", b""),
        "stay, taken": ("stay", hello()),
        "stay, no child": ("stay", hello(0)),
        "stay, other run": ("stay", hello(newer=1)),
    }


def test_a_stray_call_is_refused_and_changes_nothing() -> None:
    with tree_world(2) as groups:
        assert endings(groups, ask) == [b"", b""]
        for kind, (method, data) in stray_calls(groups[0]).items():
            assert isinstance(refusal(groups[0], method, data), CommError), kind
            assert endings(groups, ask) == [b"", b""], kind
            assert not groups[0].broken, kind


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
