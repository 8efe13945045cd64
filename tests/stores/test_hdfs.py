"""HDFS passes the suite, on a real NameNode with a real DataNode, and writes large files in sub-files."""

from __future__ import annotations

import random
import socket
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("hdfs_native", reason="HDFS needs hdfs-native")

import reknit
from reknit.errors import StorageError, StorageNotFoundError, StorageUnavailableError
from reknit.options import MIB
from reknit.storage.registry import open_storage
from reknit.stores.hdfs.client import of_class
from reknit.stores.hdfs.store import HdfsStorage, open_hdfs
from reknit.testing.storage_suite import listed, pattern, read, write
from reknit.testing.storage_suite.suite import seen_meanwhile
from tests.running.examples import is_night
from tests.servers import server
from tests.storage.test_contract import OnSlowServer
from tests.stores.hdfs_probes import ask, everything, new_proxy, place, raw_get, raw_put

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.storage.base import Storage


def new_url(options: str = "") -> str:
    """Return the URL of a new folder."""
    return f"{server('hdfs')['endpoint']}/test-{uuid.uuid4().hex[:12]}{options}"


class Raw:
    """The raw access uses the web server of Hadoop."""

    def raw_read(self, storage: Storage, path: str) -> bytes:
        return raw_get(server("hdfs"), storage, path)

    def raw_write(self, storage: Storage, path: str, data: bytes) -> None:
        raw_put(server("hdfs"), storage, path, data)


class TestHdfs(Raw, OnSlowServer):
    """A race is shortened, since the client often takes half a second to close a file."""

    def make(self, tmp_path: Path) -> Storage:
        storage = open_storage(new_url("?timeout_s=20&retry_s=0"))
        assert type(storage) is HdfsStorage
        options = replace(storage.place.options, part_nbytes=40_000)  # some of its files are larger
        return HdfsStorage(replace(storage.place, options=options))

    def test_readers_see_what_was_before_a_commit_or_after(self, storage: Storage) -> None:
        contents = [bytes([i]) * 4096 for i in range(10 if is_night() else 5)]
        storage.put("x", contents[0], if_absent=False)

        def commit() -> None:
            for i, content in enumerate(contents):
                storage.put(f"pending.{i}", b"", if_absent=True)
                assert storage.commit("x", content, pending=f"pending.{i}", if_absent=False)

        assert seen_meanwhile(commit, self.looks(storage, "x", 4096)) <= set(contents)


@pytest.mark.parametrize("way", ["rpc", "webhdfs", "none"])
def test_sub_files_become_one_file_in_whatever_order_they_come(way: str) -> None:
    options = "?part_mib=1&concurrency=3"
    if way != "none":  # one file is written in one go, and a busy cluster refuses block after block of it
        options += "&block_mib=1"
    if way == "webhdfs":
        options += f"&webhdfs=http://{server('hdfs')['http']}"
    storage = open_hdfs(new_url(f"{options}&concat={way}"))
    data = pattern(11 * MIB // 2 + 77)
    view, piece = memoryview(data), 300_001
    starts = list(range(0, len(data), piece))
    random.Random(way).shuffle(starts)
    writer = storage.create("a/b", len(data))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda start: writer.write(start, view[start : start + piece]), starts))
    assert listed(storage) == {}
    writer.finish()
    assert len(writer.upload.created) == (1 if way == "none" else 6)
    assert everything(server("hdfs"), place(storage, "a")) == ["b"]
    assert raw_get(server("hdfs"), storage, "a/b") == data
    assert read(storage, "a/b", MIB - 5, 3 * MIB) == data[MIB - 5 : 4 * MIB - 5]


@pytest.mark.parametrize("number", [0, 2])
def test_one_stream_goes_on_after_a_refusal_that_passes(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_hdfs(new_url("?part_mib=2&block_mib=2&concat=none"))
    data = pattern(11 * MIB + 77)
    feed, calls = storage.client.feed, count()

    def refused_once(path: str, writer: Any, piece: bytes) -> None:
        if next(calls) == number:
            feed(path, writer, piece[: len(piece) // 2])
            raise of_class("write", path, "org.NotReplicatedYetException", "Not replicated yet")
        feed(path, writer, piece)

    monkeypatch.setattr(storage.client, "feed", refused_once)
    writer = storage.create("a/b", len(data))
    for start in range(0, len(data), MIB):
        writer.write(start, memoryview(data)[start : start + MIB])
    writer.finish()
    assert len(writer.upload.created) == 1
    assert everything(server("hdfs"), place(storage, "a")) == ["b"]
    assert raw_get(server("hdfs"), storage, "a/b") == data


def test_many_files_are_joined_at_once() -> None:
    storage = open_hdfs(new_url("?part_mib=1&block_mib=1"))
    data = [pattern(2 * MIB + 5, seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: write(storage, f"f{i}", data[i]), range(4)))
    assert [read(storage, f"f{i}", 0, len(data[i])) for i in range(4)] == data


def test_of_many_files_that_are_read_the_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reknit.stores.hdfs.reading._MOST_OPEN", 2)
    storage, names = open_hdfs(new_url()), ["a", "b", "c"]
    for name in names:
        storage.put(name, name.encode(), if_absent=True)
    for _ in range(2):
        assert [read(storage, name, 0, 1) for name in names] == [b"a", b"b", b"c"]


def test_few_requests_are_made_for_each_file() -> None:
    files = 5
    with new_proxy() as proxy:
        storage = open_hdfs(f"hdfs://127.0.0.1:{proxy.port}/{uuid.uuid4().hex}?part_mib=1&block_mib=1")
        for i in range(files):
            write(storage, f"step/{i}", b"1" * 1000)
        small = Counter(filter(None, proxy.calls))
        # The folder is made and listed once.  A file that no DataNode has reported yet is completed twice,
        # which happens at random.
        assert small["mkdirs"] == small["getListing"] == 1
        assert small["create"] == small["addBlock"] == small["rename2"] == files
        assert small.total() - small["complete"] + files <= 6 * files
        write(storage, "step/large", bytes(4 * MIB))
        large = Counter(filter(None, proxy.calls)) - small
    assert large["create"] == large["addBlock"] == 4
    assert large["concat"] == large["rename2"] == 1
    # Per file that the NameNode sees, sub-files among them.
    assert large.total() - large["complete"] + 4 <= 6 * 4
    assert not large["getFileInfo"]


def test_of_two_processes_that_write_one_file_the_first_to_finish_wins() -> None:
    url = new_url("?part_mib=1&block_mib=1")
    first, second = open_hdfs(url), open_hdfs(url)
    one, two = pattern(MIB + 9, 1), pattern(MIB + 9, 2)
    writers = [store.create("x", MIB + 9) for store in (first, second)]
    for writer, data in zip(writers, (one, two), strict=True):
        writer.write(0, memoryview(data))
    writers[1].finish()
    with pytest.raises(StorageError, match="exists"):
        writers[0].finish()
    writers[0].abort()
    assert read(first, "x", 0, MIB + 9) == two
    assert everything(server("hdfs"), place(first)) == ["x"]
    with pytest.raises(StorageError, match="exists"):
        first.create("x", 1)


def test_a_commit_that_was_interrupted_goes_on_with_its_marker() -> None:
    storage = open_hdfs(new_url())
    storage.put("pending", b"", if_absent=True)
    raw_put(server("hdfs"), storage, "pending", b"the man")
    assert storage.commit("manifest", b"the manifest", pending="pending", if_absent=True)
    assert storage.get("manifest", limit=100) == b"the manifest"
    storage.put("pending", b"other", if_absent=True)
    with pytest.raises(StorageError, match="other content"):
        storage.commit("manifest", b"the manifest", pending="pending", if_absent=False)


def test_what_dead_writers_left_is_swept_up_after_a_day() -> None:
    storage = open_hdfs(new_url())
    for name in ("old", "new"):
        status, _ = ask(server("hdfs")["http"], "PUT", place(storage, f".{name}.tmp"), b"1", op="CREATE")
        assert status == 201
    ask(server("hdfs")["http"], "PUT", place(storage, ".old.tmp"), op="SETTIMES", modificationtime=1)
    write(storage, "x", b"1")
    assert sorted(everything(server("hdfs"), place(storage))) == [".new.tmp", "x"]


def nameservice(folder: Path, monkeypatch: pytest.MonkeyPatch, **addresses: str) -> str:
    """Return the URL of a new folder in a nameservice of these NameNodes."""
    values = {"dfs.nameservices": "ns1", "dfs.ha.namenodes.ns1": ",".join(addresses)}
    values |= {f"dfs.namenode.rpc-address.ns1.{name}": address for name, address in addresses.items()}
    lines = (f"<property><name>{k}</name><value>{v}</value></property>" for k, v in values.items())
    (folder / "hdfs-site.xml").write_text(f"<configuration>{''.join(lines)}</configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(folder))
    return f"hdfs://ns1/test-{uuid.uuid4().hex[:12]}"


def test_a_nameservice_is_found_in_hadoops_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = server("hdfs")["endpoint"].removeprefix("hdfs://")
    url = nameservice(tmp_path, monkeypatch, dead="127.0.0.1:1", alive=address)
    storage = open_hdfs(f"{url}?part_mib=1&block_mib=1")
    data = pattern(3 * MIB)
    write(storage, "x", data)
    assert raw_get(server("hdfs"), storage, "x") == data
    storage.set_storage_policy("x", "COLD")


@pytest.mark.skipif(not is_night(), reason="at night: test_hdfs_faults.py has a silent NameNode by day")
def test_a_namenode_that_is_silent_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = server("hdfs")["endpoint"].removeprefix("hdfs://")
    data = pattern(2 * MIB)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        url = nameservice(tmp_path, monkeypatch, silent=f"127.0.0.1:{port}", alive=address)
        storage = open_hdfs(f"{url}?part_mib=1&block_mib=1&timeout_s=6")
        with pytest.raises(StorageUnavailableError, match="within 6 s"):
            storage.size("x")
        writer = storage.create("x", len(data))
        writer.write(0, memoryview(data))
        with pytest.raises(StorageUnavailableError, match="join"):
            writer.finish()
        writer.finish()
        assert read(storage, "x", 0, len(data)) == data
        storage.set_storage_policy("x", "COLD")


def test_errors_say_what_they_are() -> None:
    storage = open_hdfs(new_url())
    write(storage, "x", b"1")
    with pytest.raises(StorageError, match="WARM AND DRY"):
        storage.set_storage_policy("x", "WARM AND DRY")
    with pytest.raises(StorageNotFoundError):
        storage.set_storage_policy("nothing", "COLD")
    gone = open_hdfs("hdfs://127.0.0.1:1/x?timeout_s=5")
    for call in (
        lambda: gone.size("x"),
        lambda: gone.create("x", 1),
        lambda: gone.put("x", b"", if_absent=True),
        lambda: list(gone.list()),
    ):
        with pytest.raises(StorageUnavailableError, match=r"127\.0\.0\.1:1"):
            call()
    with pytest.raises(StorageUnavailableError, match=r"127\.0\.0\.1:1"):
        gone.set_storage_policy("x", "COLD")


def test_a_checkpoint_is_saved_and_loaded() -> None:
    url = new_url("?part_mib=1&block_mib=1")
    weights = np.arange(3 << 18, dtype=np.float32)
    for step, wait in ((5, True), (6, False)):
        reknit.save(url, {"w": weights, "step": step}, wait=wait, overwrite=True).result()
    found = np.zeros_like(weights)
    target = {"w": found, "step": 0}
    reknit.load(url, target)
    assert target["step"] == 6
    assert np.array_equal(found, weights)
