"""Clients with threads of their own in a process that was forked: refused at once, or connected anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reknit
from reknit.errors import UsageError
from reknit.storage.registry import open_storage
from tests.forks import in_fork
from tests.optional import needs
from tests.ports import free_port
from tests.storage.tiny_s3 import TinyS3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
STATE = {"model": {"weight": np.arange(100.0)}}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with TinyS3("kept") as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "x")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield "s3://bucket"


def refused(call: Callable[[], object]) -> bool:
    """Return whether a call is refused with a remedy."""
    try:
        call()
    except UsageError as error:
        return "was forked from process" in str(error) and "forkserver" in (error.remedy or "")
    return False


def test_a_process_that_is_forked_after_a_request_to_an_object_store_is_refused_at_once(bucket: str) -> None:
    reknit.save(f"{bucket}/step_1", STATE, step=1)
    storage = open_storage(f"{bucket}/step_1")
    names = [listed.path for listed in storage.list()]
    with reknit.open(f"{bucket}/step_1") as checkpoint:
        calls: list[Callable[[], object]] = [
            lambda: reknit.load(f"{bucket}/step_1", {"model": {"weight": np.zeros(100)}}),
            lambda: reknit.save(f"{bucket}/step_2", STATE, step=2),
            lambda: reknit.latest(bucket),
            lambda: checkpoint.read("model", "weight"),
            lambda: list(storage.list()),
            lambda: storage.get(names[0], limit=1 << 20),
            lambda: storage.put("x", b"x", if_absent=True),
            lambda: storage.create("y", 1),
            lambda: storage.delete(names[0]),
        ]
        assert in_fork(lambda: all([refused(call) for call in calls]))
    assert reknit.latest(bucket) == f"{bucket}/step_1"


def test_the_agent_of_a_forked_process_saves_to_an_object_store(bucket: str) -> None:
    reknit.save(f"{bucket}/step_1", STATE, step=1)

    def save() -> bool:
        pending = reknit.save(f"{bucket}/step_2", STATE, step=2, wait=False)
        return pending.result().nbytes > 0 and reknit.close()

    assert in_fork(save)
    assert reknit.latest(bucket) == f"{bucket}/step_2"


@needs("tensorstore", "tensorstore")
def test_a_process_forked_after_arrays_of_zarr_were_read_is_refused_and_not_ended(tmp_path: Path) -> None:
    import tensorstore

    from reknit.integrations.formats.derived import ZarrArrays

    place = {"driver": "file", "path": f"{tmp_path}/a/"}
    tensorstore.open({"driver": "zarr", "kvstore": place}, create=True, dtype="int8", shape=[4]).result()
    arrays = ZarrArrays(str(tmp_path))
    assert arrays.facts("file-zarr", "", ["a"])[0].shape == (4,)
    assert in_fork(lambda: refused(lambda: arrays.facts("file-zarr", "", ["a"])))
    assert arrays.facts("file-zarr", "", ["a"])[0].shape == (4,)


HDFS = """
import sys
from reknit.errors import ReknitError
from reknit.stores.hdfs.client import HdfsClient
from reknit.stores.hdfs.config import parse_url
from tests.forks import in_fork

client = HdfsClient(parse_url(sys.argv[1]))

def ask(*clients):
    for client in clients:
        try:
            client.stat("/x")
        except ReknitError as error:
            print(type(error).__name__, str(error).splitlines()[0], flush=True)
    return True

in_fork(lambda: ask(client, HdfsClient(client.place)))
ask(client)
in_fork(lambda: ask(client, HdfsClient(client.place)))
ask(client)
"""


@needs("hdfs_native", "hdfs-native")
def test_a_process_forked_before_a_request_to_hdfs_connects_anew_and_after_it_is_refused_at_once() -> None:
    url = f"hdfs://127.0.0.1:{free_port()}/x?timeout_s=5"
    done = subprocess.run(
        [sys.executable, "-c", HDFS, url], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    unreached, refused = "StorageUnavailableError", "UsageError"
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*[unreached] * 3, *[refused] * 2, unreached]
    assert all("Connection refused" in line for line in lines if unreached in line)
    assert all("was forked from process" in line for line in lines if refused in line)


@needs("hdfs_native", "hdfs-native")
def test_a_forked_process_may_drop_its_parents_hdfs_clients() -> None:
    from reknit.stores.hdfs.client import HdfsClient
    from reknit.stores.hdfs.config import parse_url

    place = parse_url(f"hdfs://127.0.0.1:{free_port()}/x?timeout_s=5")
    made: list[HdfsClient] = []

    def drop() -> bool:
        made.clear()  # as the collector does in a worker of a data loader
        return True

    for clients in (0, 1, 3):
        made.extend(HdfsClient(place) for _ in range(clients - len(made)))
        assert in_fork(drop)
        assert in_fork(lambda: in_fork(drop))
        assert len(made) == clients
