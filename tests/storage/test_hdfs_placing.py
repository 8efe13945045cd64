"""New files are kept from DataNodes that failed, by a NameNode that goes on offering them.

Faults come last: what the NameNode and the DataNodes make of them shows for a while.
"""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("hdfs_native", reason="HDFS needs hdfs-native")

from reknit.errors import StorageUnavailableError
from reknit.options import MIB
from reknit.storage import hdfs_placing
from reknit.storage.hdfs import HdfsStorage, open_hdfs
from reknit.storage.hdfs_rpc import DataNode, RpcRequests
from reknit.testing.storage_suite import pattern, read
from tests.storage.hdfs_probes import Cluster, place

if TYPE_CHECKING:
    from collections.abc import Iterator

OPTIONS = "part_mib=1&block_mib=1&timeout_s=3"
VICTIM = "datanode2"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three DataNodes, and a NameNode that does not notice within a test that one has gone silent."""
    settings = {
        "dfs.namenode.avoid.write.stale.datanode": "false",
        "dfs.namenode.heartbeat.recheck-interval": "600000",
        "dfs.namenode.replication.considerLoad": "false",  # one that fell silent at work would look busy
    }
    found = Cluster(tmp_path_factory.mktemp("hdfs"), datanodes=3, **settings)
    try:
        found.wait()
        yield found
    finally:
        found.end()


@pytest.fixture
def silent(cluster: Cluster) -> Iterator[int]:
    """The port of a DataNode that takes connections and says nothing."""
    cluster.send(VICTIM, signal.SIGSTOP)
    yield port_of(cluster, VICTIM)
    cluster.send(VICTIM, signal.SIGCONT)


def port_of(cluster: Cluster, node: str) -> int:
    """Return the port at which a DataNode takes blocks."""
    name = "dfs.datanode.address="
    (told,) = (word for word in cluster.server["nodes"][node] if word.startswith(name))
    return int(told.rpartition(":")[2])


def store(cluster: Cluster, request: pytest.FixtureRequest, more: str) -> HdfsStorage:
    return open_hdfs(f"{cluster.server['endpoint']}/{abs(hash(request.node.name))}?{OPTIONS}&{more}")


def rpc(storage: HdfsStorage) -> RpcRequests:
    assert isinstance(storage._requests, RpcRequests)
    return storage._requests


def ports(nodes: list[DataNode]) -> list[int]:
    return [node.address[1] for node in nodes]


def write(storage: HdfsStorage, path: str, data: bytes) -> Any:
    writer = storage.create(path, len(data))
    for start in range(0, len(data), MIB):
        writer.write(start, memoryview(data)[start : start + MIB])
    writer.finish()
    return writer


def test_where_no_other_nodes_are_left_those_have_to_do(
    cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    storage = store(cluster, request, "replication=3")
    storage.put("old", b"1", if_absent=True)
    nodes = rpc(storage).nodes_of(place(storage, "old"), storage.url)
    assert sorted(ports(nodes)) == sorted(port_of(cluster, f"datanode{i}") for i in range(3))
    storage._placing._avoid(nodes)
    assert storage._placing.avoided == nodes
    data = pattern(3 * MIB)
    write(storage, "x", data)
    assert read(storage, "x", 0, len(data)) == data


def test_nodes_that_all_answer_are_all_avoided_since_one_of_them_failed(
    cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    storage = store(cluster, request, "replication=2")
    storage.put("old", b"1", if_absent=True)
    storage._placing._blame(place(storage, "old"))
    nodes = rpc(storage).nodes_of(place(storage, "old"), storage.url)
    assert set(storage._placing.avoided) == set(nodes)
    assert len(nodes) == 2
    write(storage, "x", pattern(MIB))
    (other,) = rpc(storage).nodes_of(place(storage, "x"), storage.url)
    assert other not in nodes


def test_a_node_gets_files_again_after_a_while(
    cluster: Cluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdfs_placing, "_AVOIDED_S", 0.0)
    storage = store(cluster, request, "replication=2")
    storage.put("old", b"1", if_absent=True)
    storage._placing._blame(place(storage, "old"))
    assert storage._placing.avoided == []


def test_a_file_that_is_whole_is_not_placed(cluster: Cluster, request: pytest.FixtureRequest) -> None:
    storage = store(cluster, request, "replication=1")
    storage.put("old", b"1", if_absent=True)
    with pytest.raises(Exception, match="does not say who writes it"):
        rpc(storage).place(place(storage, "old"), [], storage.url)
    assert storage.get("old", limit=1) == b"1"


def test_where_nobody_can_be_asked_nothing_is_avoided(
    cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    web = f"webhdfs=http://{cluster.server['http']}"
    for more in ("concat=none", web):
        storage = store(cluster, request, more)
        storage.put(more[:3], b"1", if_absent=True)
        storage._placing._blame(place(storage, more[:3]))
        assert storage._placing.avoided == []


@pytest.mark.parametrize("replication", [1, 2])
def test_what_fails_on_a_silent_node_is_written_elsewhere_at_the_second_try(
    cluster: Cluster,
    request: pytest.FixtureRequest,
    silent: int,
    replication: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = store(cluster, request, f"replication={replication}&tries=2&concurrency=4")
    data = pattern(24 * MIB)
    with caplog.at_level(logging.WARNING, "reknit"):
        writer = write(storage, "x", data)
    assert read(storage, "x", 0, len(data)) == data
    assert ports(storage._placing.avoided) == [silent], "the others have done nothing"
    assert 24 < writer.upload.attempts <= 24 + 4, "those that were under way when it was found out"
    assert f"no answer from 127.0.0.1:{silent}; nothing is written there for 600 s" in caplog.text


def test_a_node_that_is_gone_is_avoided_by_the_next_file(
    cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    """The last one: the NameNode would not notice that the node is back, or that it was away."""
    storage = store(cluster, request, "replication=1&tries=2")
    gone = port_of(cluster, VICTIM)
    cluster.send(VICTIM, signal.SIGKILL)
    for number in range(40):
        try:
            storage.put(f"{number}", b"small", if_absent=True)
        except StorageUnavailableError:
            break
    assert ports(storage._placing.avoided) == [gone]
    for number in range(100, 112):
        assert storage.put(f"{number}", b"small", if_absent=True)
        (node,) = rpc(storage).nodes_of(place(storage, f"{number}"), storage.url)
        assert node.address[1] != gone
