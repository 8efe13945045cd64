"""The answers of a NameNode, read byte by byte."""

from __future__ import annotations

import pytest

from reknit.errors import StorageUnavailableError
from reknit.stores.hdfs.config import Cluster
from reknit.stores.hdfs.requests import DataNode, RpcRequests, bytes_field, number_field, text_field

NODE = bytes_field(
    1, text_field(1, "10.0.0.3") + text_field(2, "data3") + text_field(3, "uuid") + number_field(4, 9866)
)
BLOCK = bytes_field(1, text_field(1, "pool")) + number_field(2, 0) + bytes_field(3, NODE) + number_field(4, 0)
ANSWER = bytes_field(1, number_field(1, 5) + number_field(3, 1) + bytes_field(4, BLOCK) + number_field(5, 0))


def nodes(answer: bytes, monkeypatch: pytest.MonkeyPatch, *, by_name: bool = False) -> list[DataNode]:
    """Return the DataNodes in an answer."""
    monkeypatch.setattr(RpcRequests, "_call", lambda *_: answer)
    cluster = Cluster((("namenode", 8020),), False, "me", datanodes_by_name=by_name)
    return RpcRequests(cluster, 1.0).nodes_of("/x", "hdfs://namenode/x")


def test_a_datanode_is_known_by_what_the_namenode_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for by_name, host in ((False, "10.0.0.3"), (True, "data3")):
        (node,) = nodes(ANSWER, monkeypatch, by_name=by_name)
        assert (node.key, node.address, node.encoded) == ("uuid", (host, 9866), NODE)


def test_a_file_without_a_block_has_no_datanodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nodes(b"", monkeypatch) == []
    assert nodes(bytes_field(1, number_field(1, 5)), monkeypatch) == []


def test_an_answer_that_is_cut_off_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for length in range(1, len(ANSWER)):
        with pytest.raises(StorageUnavailableError, match="not a message of Hadoop's RPC"):
            nodes(ANSWER[:length], monkeypatch)


def test_a_datanode_without_an_address_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    nameless = text_field(1, "10.0.0.3") + text_field(3, "uuid")
    for node in (b"", bytes_field(1, b""), bytes_field(1, nameless)):
        with pytest.raises(StorageUnavailableError, match="names no DataNode"):
            nodes(bytes_field(1, bytes_field(4, bytes_field(3, node))), monkeypatch)
