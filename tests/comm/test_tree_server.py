"""Who may call the server of a rank: tokens, stray calls, addresses."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from reknit.comm.message import Hello, Outcome, Parcel, Report, decode, encode
from reknit.comm.tree import TreeGroup
from reknit.errors import CommError, DeadlineError, ProtocolError, from_wire
from reknit.options import CommOptions
from reknit.testing.world import MemoryStore
from tests.comm.worlds import ask, endings, tree_world

HERE = "127.0.0.1"
MIB = 1 << 20


def call(store: MemoryStore, method: str, data: bytes, token: str | None = None, rank: int = 0) -> Outcome:
    """Call the server of `rank` as anybody could who knows its address."""
    address, right = store.get(f"reknit/job/address/{rank}", 0).decode().split()
    with grpc.insecure_channel(address) as channel:
        stub: Any = channel.unary_unary(f"/reknit.Tree/{method}", None, None)
        reply = stub(data, timeout=30, metadata=(("reknit-token", right if token is None else token),))
    return decode(reply, Outcome, MIB)


@pytest.mark.parametrize("token", ["", "0" * 64, "wrong"])
def test_a_call_with_a_wrong_token_is_refused_and_logged_once(
    token: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    with tree_world(2, store=store) as groups:
        for method in ("hello", "watch", "round", "tell"):
            with pytest.raises(grpc.RpcError) as caught:
                call(store, method, encode(Outcome(error=CommError("go away").to_wire())), token)
            failure: Any = caught.value
            assert failure.code() is grpc.StatusCode.UNAUTHENTICATED
        assert [record.message for record in caplog.records] == [
            f"rank 0 refused a call from ipv4:{HERE}: wrong token"
        ]
        assert endings(groups, ask) == [b"", b""]


def test_a_call_without_a_token_is_refused() -> None:
    store = MemoryStore()
    with (
        tree_world(2, store=store),
        grpc.insecure_channel(store.get("reknit/job/address/0", 0).decode().split()[0]) as channel,
    ):
        stub: Any = channel.unary_unary("/reknit.Tree/round", None, None)
        with pytest.raises(grpc.RpcError, match="does not know this token"):
            stub(b"", timeout=30)


def test_every_server_has_a_long_token_of_its_own() -> None:
    store, options = MemoryStore(), CommOptions(fan_out=2, bind=HERE)
    tokens = set()
    with tree_world(7, store=store):
        for rank in (0, 1, 2):
            tokens.add(store.get(f"reknit/job/address/{rank}", 0).decode().split()[1])
    for _ in range(2):
        seat = TreeGroup.listen(0, 2, job="job", options=options)
        tokens.add(seat.address.split()[1])
        seat.close()
    assert len(tokens) == 5
    assert all(len(bytes.fromhex(token)) == 32 for token in tokens)


def test_the_token_of_one_rank_does_not_open_the_server_of_another() -> None:
    store = MemoryStore()
    with tree_world(7, store=store):
        token = store.get("reknit/job/address/1", 0).decode().split()[1]
        with pytest.raises(grpc.RpcError, match="rank 0 does not know this token"):
            call(store, "round", b"", token)


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("round", b"noise"),
        ("round", encode(Report("job", 2, 0, "x", Parcel.of([b"", b""])))),
        ("round", encode(Report("other", 1, 0, "x", Parcel.of([b""])))),
        ("hello", encode(Hello("job", 1, 7, 2))),
        ("hello", encode(Hello("job", 1, 2, 3))),
        ("hello", encode(Hello("other", 1, 2, 2))),
        ("watch", encode(Hello("job", 1, 2, 2))),
        ("watch", b""),
    ],
)
def test_a_stray_call_is_refused_and_changes_nothing(method: str, data: bytes) -> None:
    store = MemoryStore()
    with tree_world(2, store=store) as groups:
        assert endings(groups, ask) == [b"", b""]
        error = call(store, method, data).error
        assert type(from_wire(error or {})) is ProtocolError
        assert endings(groups, ask) == [b"", b""]


def test_a_report_sent_again_after_its_round_is_refused_and_changes_nothing() -> None:
    store = MemoryStore()
    with tree_world(2, store=store) as groups:
        for _ in range(3):
            assert endings(groups, ask) == [b"", b""]
        for number in range(3):
            again = encode(Report("job", 1, number, "ask", Parcel.of([b"again"])))
            assert "is over" in str(call(store, "round", again).error)
        assert endings(groups, lambda group: ask(group, request=b"new")) == [b"new", b"new"]


def test_a_method_that_does_not_exist_is_refused() -> None:
    store = MemoryStore()
    with tree_world(2, store=store), pytest.raises(grpc.RpcError) as caught:
        call(store, "shutdown", b"")
    failure: Any = caught.value
    assert failure.code() is grpc.StatusCode.UNIMPLEMENTED


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    with pytest.raises(CommError, match=r"no server can listen on 203.0.113.1") as caught:
        TreeGroup.join(MemoryStore(), 0, 2, job="job", options=CommOptions(bind="203.0.113.1"))
    assert "CommOptions.bind" in str(caught.value.remedy)


def test_only_ranks_with_ranks_below_them_listen() -> None:
    store = MemoryStore()
    with tree_world(4, store=store):
        for rank in (0, 1):
            assert store.get(f"reknit/job/address/{rank}", 0).startswith(b"127.0.0.1:")
        for rank in (2, 3):
            with pytest.raises(DeadlineError):
                store.get(f"reknit/job/address/{rank}", 0)


def test_a_group_without_an_address_given_listens_where_the_host_name_leads() -> None:
    store = MemoryStore()
    root = TreeGroup.join(store, 0, 2, job="job", options=CommOptions())
    leaf = TreeGroup.join(store, 1, 2, job="job", options=CommOptions(connect_timeout_s=30))
    assert endings([root, leaf], ask) == [b"", b""]
    for group in (root, leaf):
        group.close()
