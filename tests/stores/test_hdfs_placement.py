"""New files avoid DataNodes that failed, although the NameNode still offers them.

Tests with faults come last, since the effects on the NameNode and the DataNodes last for a while.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("hdfs_native", reason="HDFS needs hdfs-native")

import reknit
from reknit.errors import StorageError, StorageUnavailableError
from reknit.options import MIB
from reknit.stores.hdfs import upload as hdfs_placing
from reknit.stores.hdfs.requests import DataNode, RpcRequests
from reknit.stores.hdfs.store import HdfsStorage, open_hdfs
from reknit.stores.hdfs.upload import BlockPlacement
from reknit.testing.storage_suite import listed, pattern, read
from tests.running.examples import at_night
from tests.stores.hdfs_probes import everything, place, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.stores.hdfs_probes import Cluster

OPTIONS = "part_mib=1&block_mib=1&timeout_s=5"
VICTIM = "datanode2"


@pytest.fixture
def silent(cluster: Cluster) -> Iterator[int]:
    """Yield the port of a DataNode that accepts connections and sends nothing."""
    cluster.send(VICTIM, signal.SIGSTOP)
    yield port_of(cluster, VICTIM)
    cluster.send(VICTIM, signal.SIGCONT)


def port_of(cluster: Cluster, node: str) -> int:
    """Return the port at which a DataNode receives blocks."""
    name = "dfs.datanode.address="
    (reported,) = (word for word in cluster.server["nodes"][node] if word.startswith(name))
    return int(reported.rpartition(":")[2])


def store(cluster: Cluster, request: pytest.FixtureRequest, more: str) -> HdfsStorage:
    return open_hdfs(f"{cluster.server['endpoint']}/{abs(hash(request.node.name))}?{OPTIONS}&{more}")


def rpc(storage: HdfsStorage) -> RpcRequests:
    assert isinstance(storage.requests, RpcRequests)
    return storage.requests


def ports(nodes: list[DataNode]) -> list[int]:
    return [node.address[1] for node in nodes]


def nodes_of(storage: HdfsStorage, path: str) -> list[DataNode]:
    """Return the DataNodes of a file's last block."""
    return rpc(storage).nodes_of(place(storage, path), storage.url)


def at_once(write: Callable[[int], None], number: int) -> None:
    """Write files at the same time, since HDFS often takes half a second for one."""
    with ThreadPoolExecutor(number) as pool:
        list(pool.map(write, range(number)))


def avoid(storage: HdfsStorage) -> DataNode:
    """Make one DataNode of three avoided, which may still run, and return it."""
    storage.put("old", b"1", if_absent=True)
    node = nodes_of(storage, "old")[0]
    storage.placement.avoid([node], storage.url)
    assert storage.placement.avoided == [node]
    return node


def test_files_of_all_kinds_go_past_a_node_that_is_avoided(
    cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    storage = store(cluster, request, "replication=1")
    node = avoid(storage)

    def put(number: int) -> None:
        assert storage.put(f"put {number}", b"small", if_absent=True)
        assert node not in nodes_of(storage, f"put {number}")

    def commit(number: int) -> None:
        storage.put(f"marker {number}", b"", if_absent=True)
        assert storage.commit(f"commit {number}", b"small", pending=f"marker {number}", if_absent=True)
        assert node not in nodes_of(storage, f"commit {number}")
        assert storage.get(f"commit {number}", limit=5) == b"small"

    at_once(put, 6)
    at_once(commit, 6)
    data = pattern(4 * MIB + 1)
    write(storage, "large", data)
    assert read(storage, "large", 0, len(data)) == data


def test_empty_files_are_written_while_a_node_is_avoided(
    cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    storage = store(cluster, request, "replication=1&tries=1")
    avoid(storage)
    assert storage.put("empty", b"", if_absent=True)
    storage.create("none", 0).finish()
    assert listed(storage) == {"old": 1, "empty": 0, "none": 0}


def test_a_whole_state_is_saved_and_loaded_while_a_node_is_avoided(
    cluster: Cluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = store(cluster, request, "replication=1")
    node = avoid(storage)
    monkeypatch.setattr(BlockPlacement, "avoided", property(lambda _: [node]))
    state, target = {"w": np.arange(1 << 19)}, {"w": np.zeros(1 << 19, np.int64)}
    url = f"{storage.url}/step?{OPTIONS}&replication=1&retry_s=0"
    reknit.save(url, state)
    reknit.load(url, target)
    assert np.array_equal(target["w"], state["w"])


def test_a_path_that_looks_like_what_the_namenode_says_does_not_mislead(
    cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    storage = store(cluster, request, "replication=1")
    node = avoid(storage)

    def put(number: int) -> None:
        name = f"{number} owned by me but is accessed by you/x"
        assert storage.put(name, b"small", if_absent=True)
        assert node not in nodes_of(storage, name)

    at_once(put, 6)


def test_where_no_other_nodes_are_left_those_have_to_do(
    cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    storage = store(cluster, request, "replication=3")
    nodes: list[DataNode] = []
    for number in range(60):  # on a busy machine one of the nodes may be left out at first
        storage.put(f"old{number}", b"1", if_absent=True)
        if len(nodes := nodes_of(storage, f"old{number}")) == 3:
            break
        time.sleep(0.5)
    assert sorted(ports(nodes)) == sorted(port_of(cluster, f"datanode{i}") for i in range(3))
    storage.placement.avoid(nodes, storage.url)
    begun = f"{place(storage)}/begun"
    writer = storage.client.begin(begun)
    with pytest.raises(StorageUnavailableError, match=r"3 node\(s\) are excluded"):
        rpc(storage).place(begun, nodes, storage.url)
    storage.client.feed(begun, writer, b"1")
    storage.client.end(begun, writer)
    data = pattern(3 * MIB)
    write(storage, "x", data)
    assert read(storage, "x", 0, len(data)) == data


@at_night("a node that hangs up on nonsense is there")
def test_nodes_that_answer_are_not_avoided_whatever_failed(
    cluster: Cluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdfs_placing, "_PATIENCE_S", 30.0)
    storage = store(cluster, request, "replication=3&timeout_s=5&tries=1")
    writer = storage.client.begin(path := f"{place(storage)}/x")
    storage.client.feed(path, writer, b"1")
    cluster.send("namenode", signal.SIGSTOP)
    timer = threading.Timer(8, cluster.send, ("namenode", signal.SIGCONT))
    timer.start()
    try:
        with pytest.raises(StorageUnavailableError):
            storage.placement.fill(path, writer, [], new=False)
    finally:
        timer.join()
    storage.placement.find_silent(path)
    assert storage.placement.avoided == []


def test_a_node_gets_files_again_after_a_while(
    cluster: Cluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = store(cluster, request, "replication=1")
    node = avoid(storage)
    monkeypatch.setattr(hdfs_placing, "_AVOIDED_S", 0.0)
    storage.placement.avoid([node], storage.url)
    assert storage.placement.avoided == []


def test_a_file_that_nobody_writes_is_not_placed_and_none_is_made(
    cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    storage = store(cluster, request, "replication=1")
    storage.put("old", b"1", if_absent=True)
    for name in ("old", "missing"):
        with pytest.raises(StorageError, match="does not say who writes it"):
            rpc(storage).place(place(storage, name), [], storage.url)
    assert storage.get("old", limit=1) == b"1"
    assert everything(cluster.server, place(storage)) == ["old"]


@pytest.mark.parametrize("way", ["concat=none", "webhdfs"])
def test_where_nobody_can_be_asked_nothing_is_avoided(
    cluster: Cluster, request: pytest.FixtureRequest, way: str
) -> None:
    more = f"webhdfs=http://{cluster.server['http']}" if way == "webhdfs" else way
    storage = store(cluster, request, more)
    storage.put("old", b"1", if_absent=True)
    storage.placement.find_silent(place(storage, "old"))
    assert storage.placement.avoided == []


@pytest.mark.parametrize(
    ("address", "there"),
    [(None, True), (("127.0.0.1", 1), False), (("a..b", 1), False), (("127.0.0.1", 1 << 69), False)],
)
def test_a_node_is_there_if_it_hangs_up_on_nonsense(address: tuple[str, int] | None, there: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            connection, _ = listener.accept()
            with connection:
                while connection.recv(4, socket.MSG_WAITALL) != bytes(4):
                    pass  # as a node with encryption does, which reads a whole number

        if address is None:
            threading.Thread(target=hang_up, daemon=True).start()
        at = address or listener.getsockname()
        assert hdfs_placing.answers(DataNode("key", at, b"")) is there


def test_a_node_that_takes_a_connection_and_says_nothing_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hdfs_placing, "_PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not hdfs_placing.answers(DataNode("key", listener.getsockname(), b""))


@at_night("test_hdfs_faults.py has a silent DataNode, and the next test one that is gone")
@pytest.mark.parametrize("replication", [1, 2])
def test_what_fails_on_a_silent_node_is_written_elsewhere_at_the_second_try(
    cluster: Cluster,
    request: pytest.FixtureRequest,
    silent: int,
    replication: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hdfs_placing, "_PATIENCE_S", 6.0)
    storage = store(cluster, request, f"replication={replication}&tries=2&concurrency=4")
    data = pattern(24 * MIB)
    with caplog.at_level(logging.WARNING, "reknit"):
        writer = write(storage, "x", data)
    assert read(storage, "x", 0, len(data)) == data
    assert ports(storage.placement.avoided) == [silent], "the others have done nothing"
    assert 24 < len(writer.upload.created) <= 24 + 4, "the blocks under way at the discovery"
    assert f"no answer from 127.0.0.1:{silent}; for 600 s new files use other DataNodes" in caplog.text


def test_a_node_that_is_gone_is_avoided_by_the_next_file(
    cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    """It is the last test, since the NameNode would not notice that the node was away, or is back."""
    storage = store(cluster, request, "replication=1&tries=2")
    gone = port_of(cluster, VICTIM)
    cluster.send(VICTIM, signal.SIGKILL)
    for number in range(40):
        try:
            storage.put(f"{number}", b"small", if_absent=True)
        except StorageUnavailableError:
            break
    assert ports(storage.placement.avoided) == [gone]
    for number in range(100, 106):
        assert storage.put(f"{number}", b"small", if_absent=True)
        (node,) = nodes_of(storage, f"{number}")
        assert node.address[1] != gone
