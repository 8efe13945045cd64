"""Saves to an HDFS whose nodes are killed, or go silent, and come back: whole, or failed in time."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("hdfs_native", reason="HDFS needs hdfs-native")

import reknit
from reknit.errors import StorageUnavailableError
from reknit.options import MIB
from reknit.storage.registry import register
from reknit.storage.wrappers.retrying import RetryingStorage, RetryPolicy
from reknit.stores.hdfs.store import HdfsStorage, open_hdfs
from reknit.testing.storage_suite import listed, pattern, read
from tests.running.examples import is_night
from tests.stores.hdfs_probes import everything, place, write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.options import Durability
    from reknit.storage.base import Storage
    from tests.stores.hdfs_probes import Cluster

OPTIONS = "part_mib=1&block_mib=1&timeout_s=3&tries=6&replication=2"
PATIENCE = RetryPolicy(deadline_s=60, longest_s=1)


@pytest.fixture
def storage(cluster: Cluster, request: pytest.FixtureRequest) -> HdfsStorage:
    return open_hdfs(f"{cluster.server['endpoint']}/{abs(hash(request.node.name))}?{OPTIONS}")


def again(url: str, durability: Durability) -> Storage:
    """Open the store of a URL of HDFS, with retries while it cannot be reached."""
    return RetryingStorage(open_hdfs(f"hdfs{url[url.index(':') :]}", durability), PATIENCE)


register("hdfs-again", again)


@contextmanager
def after(seconds: float, *actions: object) -> Iterator[None]:
    """Do things while the block runs."""

    def work() -> None:
        time.sleep(seconds)
        for action in actions:
            assert callable(action)
            action()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_sub_files_are_written_again_when_a_datanode_is_killed(
    cluster: Cluster, storage: HdfsStorage
) -> None:
    data = pattern(12 * MIB)
    try:
        kill = lambda: cluster.send("datanode0", signal.SIGKILL)  # noqa: E731
        writer = write(storage, "x", data, {3: kill})
        assert len(writer.upload.created) > 12
        assert read(storage, "x", 0, len(data)) == data
        assert everything(cluster.server, place(storage)) == ["x"]
    finally:
        cluster.launch("datanode0")
        cluster.wait()


def test_a_datanode_that_goes_silent_holds_up_neither_a_save_nor_a_load(
    cluster: Cluster, storage: HdfsStorage
) -> None:
    data = pattern(8 * MIB)
    try:
        silence = lambda: cluster.send("datanode1", signal.SIGSTOP)  # noqa: E731
        write(RetryingStorage(storage, PATIENCE), "x", data, {3: silence})
        loaded = read(RetryingStorage(open_hdfs(f"{storage.url}?{OPTIONS}"), PATIENCE), "x", 0, len(data))
        assert loaded == data
        assert everything(cluster.server, place(storage)) == ["x"]
    finally:
        cluster.send("datanode1", signal.SIGCONT)
        cluster.wait()


def test_a_namenode_that_goes_silent_fails_a_save_in_time_and_nothing_is_seen(
    cluster: Cluster, storage: HdfsStorage
) -> None:
    storage.put("old", b"1", if_absent=True)
    writer = storage.create("x", MIB)
    writer.write(0, memoryview(pattern(MIB)))
    writer.upload.finish()
    cluster.send("namenode", signal.SIGSTOP)
    try:
        with pytest.raises(StorageUnavailableError, match="within 3 s"):
            writer.finish()
        with pytest.raises(StorageUnavailableError, match="within 3 s"):
            storage.get("old", limit=1)
    finally:
        cluster.send("namenode", signal.SIGCONT)
    assert storage.get("old", limit=1) == b"1"
    # The rename may have been carried out although its answer was late; then the file is whole.
    assert listed(storage) in ({"old": 1}, {"old": 1, "x": MIB})
    writer.finish()
    assert read(storage, "x", 0, MIB) == pattern(MIB)


def test_a_save_and_a_load_live_through_a_restart_of_the_namenode(
    cluster: Cluster, storage: HdfsStorage
) -> None:
    url = f"hdfs-again{storage.url.removeprefix('hdfs')}/run?{OPTIONS}"
    state = {"w": np.frombuffer(pattern(16 * MIB), np.uint8)}
    kill = lambda: cluster.send("namenode", signal.SIGKILL)  # noqa: E731
    start = lambda: cluster.launch("namenode")  # noqa: E731
    with after(0.3, kill, start):
        reknit.save(url, state, overwrite=True)
    target = {"w": np.zeros(16 * MIB, np.uint8)}
    with after(0.0, kill, start) if is_night() else nullcontext():
        reknit.load(url, target)
    assert np.array_equal(target["w"], state["w"])
    cluster.wait()
