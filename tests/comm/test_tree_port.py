"""Ranks that share no store: they listen, others carry their addresses, and they connect in any order."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reknit.comm.group import Topology
from reknit.comm.rank_messages import Reply, encode
from reknit.comm.tree.tree_group import TreeGroup
from reknit.errors import CommError, DeadlineError, GroupClosedError, ProtocolError, UsageError
from reknit.options import CommOptions
from reknit.testing.world import run_ranks
from tests.comm import worlds
from tests.comm.collectives import gather
from tests.comm.worlds import GENERATION, Resources, ask, connect_rank, endings, listen_all, tree_world
from tests.resources import threads
from tests.running.examples import examples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reknit.errors import ReknitError

    _Handler = grpc.GenericRpcHandler[bytes, bytes]
else:
    _Handler = grpc.GenericRpcHandler  # generic in the stubs only


both = pytest.mark.usefixtures("transport")


@pytest.fixture
def ports() -> Iterator[list[TreeGroup]]:
    """Yield the ports of ranks 0, 1, 3 (below rank 1) and 2."""
    taken = listen_all(4)
    yield taken
    for port in taken:
        port.close()


def stray_port(
    rank: int = 1,
    size: int = 4,
    *,
    fan_out: int = 2,
    job: str = "job",
    generation: int = GENERATION,
    hosts: Sequence[int] | None = None,
    connect_timeout_s: float = 30,
) -> TreeGroup:
    """Return a port of a rank that does not have to belong to the others."""
    options = CommOptions(bind="127.0.0.1" if hosts else worlds.BIND, connect_timeout_s=connect_timeout_s)
    topology = Topology([0] * size if hosts is None else hosts, fan_out)
    return TreeGroup(rank, topology, job=job, generation=generation, options=options)


class Ear:
    """A listener that records the end of a group."""

    def __init__(self, group: TreeGroup) -> None:
        self.errors: list[ReknitError] = []
        self.reported = threading.Event()
        group.on_broken(self)

    def __call__(self, error: ReknitError) -> None:
        self.errors.append(error)
        self.reported.set()

    def wait(self) -> str:
        """Return the first message."""
        assert self.reported.wait(30)
        return self.errors[0].message


@contextmanager
def silent_host() -> Iterator[str]:
    """Yield the address of a host that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


_earlier: set[threading.Thread] = set()
"""The threads of groups that tests of other files have left in this process."""


@pytest.fixture(autouse=True)
def earlier() -> None:
    _earlier.update(threads("reknit-broken"))


def no_one_listens_for_the_end() -> bool:
    """Return whether every wait for the end of a group is over within a while."""
    for _ in range(600):
        if not threads("reknit-broken") - _earlier:
            return True
        time.sleep(0.05)
    return False


@settings(max_examples=examples(10), suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(1, 3))
def test_ranks_connect_in_any_order_and_hold_rounds(data: st.DataObject, fan_out: int) -> None:
    size = data.draw(st.integers(1, 8))
    order = data.draw(st.permutations(range(size)))
    ports = listen_all(size, fan_out)
    try:
        joined = {rank: connect_rank(ports, rank) for rank in order}
        groups = [joined[rank] for rank in range(size)]
        assert [(group.rank, group.size) for group in groups] == [(rank, size) for rank in range(size)]
        gathered = run_ranks(size, lambda group: gather(group, "x", b"%d" % group.rank, 30), groups=groups)
        assert gathered[0] == [b"%d" % rank for rank in range(size)]
    finally:
        for port in ports:
            port.close()


@both
def test_a_rank_below_can_be_in_a_round_before_the_rank_above_it_has_connected(
    ports: list[TreeGroup],
) -> None:
    answers: list[bytes] = []
    leaf = connect_rank(ports, 3)
    early = threading.Thread(target=lambda: answers.append(ask(leaf, "ask", b"early")))
    early.start()
    time.sleep(0.2)
    assert answers == []
    others = [connect_rank(ports, rank) for rank in (2, 1, 0)]
    for group in others[:2]:
        threading.Thread(target=ask, args=(group,)).start()
    ask(others[2])
    early.join()
    assert answers == [b"early"]


@both
@pytest.mark.parametrize("ending", ["closes", "is lost"])
def test_a_rank_that_ends_before_the_rank_above_it_connected_is_heard_of_at_the_top(
    ports: list[TreeGroup], ending: str
) -> None:
    root, ear = connect_rank(ports, 0), Ear(connect_rank(ports, 2))
    leaf = connect_rank(ports, 3)
    middle = Ear(ports[1])
    if ending == "closes":
        leaf.close()
        message = "rank 3 closed the group"
    else:
        # Only its connection ends, as if the process had no time for a last message.
        uplink = ports[3].uplink
        assert uplink is not None
        uplink.close()
        message = "rank 3 is gone"
    assert message in middle.wait()
    connect_rank(ports, 1)
    assert message in ear.wait()
    with pytest.raises(CommError, match=message):
        ask(root)


@both
@pytest.mark.parametrize("closer", [0, 1])
def test_ranks_hear_once_that_another_closed_and_the_one_that_closed_hears_nothing(
    ports: list[TreeGroup], closer: int
) -> None:
    groups = [connect_rank(ports, rank) for rank in range(4)]
    ears = [Ear(group) for group in groups]
    seconds = [Ear(group) for group in groups]
    groups[closer].close()
    for rank, ear in enumerate([*ears, *seconds]):
        if rank % 4 != closer:
            assert ear.wait() == f"rank {closer} closed the group"
    for group in groups:
        group.close()
    assert no_one_listens_for_the_end()
    assert [len(ear.errors) for ear in [*ears, *seconds]] == [int(rank % 4 != closer) for rank in range(8)]


@both
def test_whoever_hears_of_a_round_that_broke_has_heard_of_the_group_before(ports: list[TreeGroup]) -> None:
    groups = [connect_rank(ports, rank) for rank in range(4)]
    order: list[str] = []

    def record(error: ReknitError) -> None:
        time.sleep(0.2)
        order.append("group")

    groups[1].on_broken(record)
    threading.Timer(0.1, groups[0].close).start()
    with pytest.raises(GroupClosedError):
        ask(groups[1])
    order.append("round")
    assert order == ["group", "round"]


def test_whoever_asks_late_about_a_broken_group_hears_it_at_once(ports: list[TreeGroup]) -> None:
    groups = [connect_rank(ports, rank) for rank in range(4)]
    first = Ear(groups[1])
    groups[2].close()
    assert "rank 2" in first.wait()
    groups[1].close()
    late, never = Ear(groups[1]), Ear(groups[2])
    assert "rank 2 closed the group" in late.wait()
    assert no_one_listens_for_the_end()
    assert never.errors == []


def test_what_hears_of_the_end_may_close_the_group_and_sign_the_error(ports: list[TreeGroup]) -> None:
    groups = [connect_rank(ports, rank) for rank in range(4)]
    closed = threading.Event()

    def close(error: ReknitError) -> None:
        error.sign(path="mine")
        groups[0].close()
        closed.set()

    groups[0].on_broken(close)
    other = Ear(groups[0])
    groups[3].close()
    assert closed.wait(30)
    other.wait()
    assert other.errors[0].path is None


@both
def test_an_address_with_a_wrong_token_is_refused_at_once_and_not_told(ports: list[TreeGroup]) -> None:
    address = ports[0].address.split()[0]
    patient = stray_port(connect_timeout_s=20)
    with pytest.raises(CommError, match=f"rank 0 at {address} does not accept the token") as caught:
        patient.connect_parent(f"{address} wrong")
    assert not isinstance(caught.value, DeadlineError)
    assert caught.value.remedy is not None
    with pytest.raises(CommError) as caught:
        patient.connect_parent(f"{address} {ports[1].address.split()[1]}")
    assert ports[1].address.split()[1] not in str(caught.value)
    patient.connect_parent(ports[0].address)
    patient.close()


@pytest.mark.usefixtures("over_grpc")
def test_an_address_at_which_no_one_listens_any_more_is_given_up_at_the_deadline() -> None:
    ports = listen_all(2, connect_timeout_s=0.3)
    ports[0].close()
    address, token = ports[0].address.split()
    with pytest.raises(
        DeadlineError, match=f"rank 0 at {address} could not be reached within 0.3 s"
    ) as caught:
        connect_rank(ports, 1)
    assert token not in str(caught.value)
    ports[1].close()


@contextmanager
def half_a_server(watch: Callable[[bytes, grpc.ServicerContext], bytes]) -> Iterator[str]:
    """Yield the address of a server that greets everyone, and then does as `watch` does."""

    class Half(_Handler):
        def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
            greets = call.method == "/reknit.Tree/hello"
            return grpc.unary_unary_rpc_method_handler(
                (lambda data, context: encode(Reply())) if greets else watch
            )

    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[Half()])
        number = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{number} token"
        server.stop(None).wait()


def test_a_rank_above_that_stops_after_its_greeting_is_not_waited_for_longer_than_allowed() -> None:
    release = threading.Event()

    def hang(data: bytes, context: grpc.ServicerContext) -> bytes:
        release.wait(30)
        return encode(Reply())

    port = listen_all(2, connect_timeout_s=0.5)[1]
    with half_a_server(hang) as address:
        with pytest.raises(DeadlineError, match=r"rank 0 at .* could not be reached within 0.5 s"):
            port.connect_parent(address)
        release.set()
    port.close()


def test_a_rank_that_was_greeted_and_is_then_refused_does_not_join() -> None:
    refusal = encode(Reply(ProtocolError("another process is rank 1 already").to_wire()))
    port = listen_all(2)[1]
    with (
        half_a_server(lambda data, context: refusal) as address,
        pytest.raises(ProtocolError, match="another process is rank 1 already"),
    ):
        port.connect_parent(address)
    port.close()


@both
def test_a_port_of_another_job_run_or_shape_does_not_get_in(ports: list[TreeGroup]) -> None:
    reasons: list[tuple[dict[str, Any], str]] = [
        ({"job": "other"}, "rank 1 belongs to job 'other', rank 0 to 'job'"),
        ({"generation": 6}, "rank 1 belongs to an older run of job 'job' than rank 0: generation 6"),
        ({"generation": 8}, "rank 1 belongs to a newer run of job 'job' than rank 0: generation 8"),
        ({"size": 5}, "rank 1 joins with a tree of another size"),
        ({"fan_out": 3}, "rank 1 joins with a tree of another size"),
        ({"hosts": [0, 1, 1, 2]}, "rank 1 joins with a tree of another size"),
    ]
    for how, reason in reasons:
        stray = stray_port(**how)
        with pytest.raises(ProtocolError, match=reason):
            stray.connect_parent(ports[0].address)
        stray.close()
    groups = [connect_rank(ports, rank) for rank in range(4)]
    assert endings(groups, ask) == [b""] * 4


def test_an_address_that_does_not_belong_to_the_rank_is_a_usage_error(ports: list[TreeGroup]) -> None:
    for rank, above, needed in (
        (0, "127.0.0.1:1 token", "rank 0 needs no address"),
        (3, "", "rank 3 needs the address of rank 1"),
        (3, "127.0.0.1:1", "rank 3 needs the address of rank 1"),
    ):
        with pytest.raises(UsageError, match=needed):
            ports[rank].connect_parent(above)


def test_a_port_is_connected_from_once(ports: list[TreeGroup]) -> None:
    group = connect_rank(ports, 2)
    with pytest.raises(UsageError, match="rank 2 has joined its group already"):
        connect_rank(ports, 2)
    assert group.rank == 2


def test_a_port_that_is_closed_cannot_connect(ports: list[TreeGroup]) -> None:
    for rank in (0, 1):
        ports[rank].close()
        ports[rank].close()
        with pytest.raises(CommError, match=f"rank {rank} closed the group"):
            connect_rank(ports, rank)


@pytest.mark.parametrize("silent", [True, False], ids=["one that does not answer", "one that is gone"])
def test_closing_a_port_ends_its_connect_to_a_rank_above(silent: bool) -> None:
    patient = stray_port(connect_timeout_s=10_000)
    with silent_host() as address:
        timer = threading.Timer(0.2, patient.close)
        timer.start()
        with pytest.raises(CommError, match="rank 1 closed the group"):
            patient.connect_parent(f"{address if silent else '127.0.0.1:1'} token")
        timer.join()


@both
def test_a_port_that_closes_without_connecting_is_heard_of_by_the_ranks_below(ports: list[TreeGroup]) -> None:
    leaf = connect_rank(ports, 3)
    ear = Ear(leaf)
    never = Ear(ports[1])
    ports[1].close()
    assert ear.wait() == "rank 1 closed the group"
    with pytest.raises(CommError, match="rank 1 closed the group"):
        ask(leaf)
    leaf.close()
    assert no_one_listens_for_the_end()
    assert never.errors == []


@both
def test_ports_that_close_without_connecting_leave_no_thread_and_no_file_open() -> None:
    with tree_world(4) as groups:  # gRPC opens some files for good when it is first used
        endings(groups, ask)
    before = Resources()
    for _ in range(5):
        ports = listen_all(5)
        leaf = connect_rank(ports, 4)
        assert leaf.rank == 4
        for port in ports:
            port.close()
    assert before.new_threads() == set()
    assert before.new_files() == set()
