"""Object stores pass the suite, on real servers."""

from __future__ import annotations

import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("obstore", reason="the object stores need obstore")

from reknit.errors import StorageError, StorageNotFoundError, StoragePermissionError, UsageError
from reknit.options import MIB
from reknit.storage.object.client import ObjectOptions, parse_url, plain, translated
from reknit.storage.object.conditions import look
from reknit.storage.object.store import ObjectStorage
from reknit.storage.object.upload import MAX_PARTS, part_size
from reknit.storage.registry import open_storage
from reknit.storage.wrappers.retrying import RetryingStorage
from reknit.testing.storage_suite import listed
from reknit.testing.storage_suite.suite import Suite
from reknit.testing.storage_suite.writing import WritingSuite
from tests.servers import new_url, raw_get, raw_put, reach, uploads_left
from tests.storage.test_contract import OneRowOfAKind, OnSlowServer

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from obstore import UpdateVersion

    from reknit.storage.base import Storage
    from reknit.storage.object.client import Client


class Swept(ObjectStorage):
    """A store without empty folders, which SeaweedFS lists for some minutes, unlike other object stores."""

    def folders(self) -> list[str]:
        return [name for name in super().folders() if any(True for _ in self.list(name))]


class OnServer(Suite):
    server: ClassVar[str]

    @pytest.fixture(autouse=True)
    def _reached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reach(self.server, monkeypatch)

    def make(self, tmp_path: Path) -> Storage:
        storage = open_storage(f"{new_url(self.server)}?retry_s=0")
        assert type(storage) is ObjectStorage
        return Swept(storage.place, storage.options)

    def raw_read(self, storage: Storage, path: str) -> bytes:
        return raw_get(self.server, f"{storage.url}/{path}")

    def raw_write(self, storage: Storage, path: str, data: bytes) -> None:
        raw_put(self.server, f"{storage.url}/{path}", data)


class TestS3(OnServer, OneRowOfAKind):
    server = "s3"


class TestGcs(OnServer, OnSlowServer):
    server = "gcs"


class TestAzure(OnServer, OnSlowServer):
    server = "azure"


class TestAzureWithFilesInParts(OnServer, WritingSuite):
    """Azure takes parts of any size, so that small files can have several parts."""

    server = "azure"

    def make(self, tmp_path: Path) -> Storage:
        place, _ = parse_url(new_url(self.server))
        return ObjectStorage(place, ObjectOptions(part_nbytes=33))

    def test_many_threads_write_one_file(self, storage: Storage) -> None:
        place, _ = parse_url(storage.url)
        super().test_many_threads_write_one_file(ObjectStorage(place, ObjectOptions(part_nbytes=8192)))

    def test_a_written_file_holds_exactly_its_bytes(self, storage: Storage) -> None:
        place, _ = parse_url(storage.url)
        super().test_a_written_file_holds_exactly_its_bytes(
            ObjectStorage(place, ObjectOptions(part_nbytes=4096, concurrency=1))
        )

    def test_pieces_may_come_in_any_order(self, storage: Storage) -> None:
        place, _ = parse_url(storage.url)
        super().test_pieces_may_come_in_any_order(ObjectStorage(place, ObjectOptions(part_nbytes=1000)))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a new folder on the S3 server, which the environment leads to."""
    return reach("s3", monkeypatch)


def in_parts(url: str, **options: Any) -> ObjectStorage:
    return ObjectStorage(parse_url(url)[0], ObjectOptions(part_nbytes=5 * MIB, **options))


def image(nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("order", ["forward", "backward", "threads"])
def test_a_large_file_goes_up_in_parts_and_comes_back(s3: str, order: str) -> None:
    """Pieces fill parts, cross parts, and are smaller than parts; they are read at once, and in runs."""
    storage, data = in_parts(s3), image(23 * MIB + 7)
    writer = storage.create("x", len(data))
    pieces = [(start, data[start : start + 4 * MIB]) for start in range(0, len(data), 4 * MIB)]
    if order == "backward":
        pieces.reverse()
    with ThreadPoolExecutor(4 if order == "threads" else 1) as pool:
        list(pool.map(lambda piece: writer.write(piece[0], piece[1].data), pieces))
    writer.finish()
    assert storage.size("x") == len(data)
    assert raw_get("s3", f"{s3}/x") == data.tobytes()
    buffers = [bytearray(3), bytearray(len(data) - 10), bytearray(0), bytearray(7)]
    storage.read_into("x", 0, [memoryview(buffer) for buffer in buffers])
    assert b"".join(buffers) == data.tobytes()
    starts = np.arange(0, len(data) - 100, 3 * MIB)
    runs = bytearray(100 * len(starts))
    storage.read_runs("x", starts, 100, memoryview(runs))
    assert bytes(runs) == b"".join(data[start : start + 100].tobytes() for start in starts)
    assert uploads_left(s3) == []


def test_memory_may_be_used_again_as_soon_as_write_returns(s3: str) -> None:
    """The client sends from the caller's memory, and the writer returns after its last use."""
    storage, data = in_parts(s3), image(20 * MIB)
    writer = storage.create("x", len(data))
    for start in range(0, len(data), 5 * MIB):
        piece = data[start : start + 5 * MIB].copy()
        writer.write(start, piece.data)
        piece[:] = 0
    writer.finish()
    assert raw_get("s3", f"{s3}/x") == data.tobytes()


def test_parts_go_up_from_the_memory_they_are_in(s3: str) -> None:
    """No copy of the file is made: the process's memory grows by less than one part for each upload."""
    storage, data = in_parts(s3, concurrency=2), image(60 * MIB)
    write_whole(storage, "warm", data[: 10 * MIB])
    before = psutil.Process().memory_info().rss
    seen = []

    def watch(over: threading.Event) -> None:
        while not over.wait(0.005):
            seen.append(psutil.Process().memory_info().rss)

    over = threading.Event()
    watcher = threading.Thread(target=watch, args=(over,))
    watcher.start()
    write_whole(storage, "x", data)
    over.set()
    watcher.join()
    assert max(seen) - before < 30 * MIB


def write_whole(storage: Storage, path: str, data: NDArray[np.uint8]) -> None:
    writer = storage.create(path, len(data))
    writer.write(0, data.data)
    writer.finish()


def test_an_aborted_upload_leaves_no_parts(s3: str) -> None:
    storage, data = in_parts(s3), image(16 * MIB)
    writer = storage.create("x", len(data))
    writer.write(0, data[: 10 * MIB].data)
    assert len(uploads_left(s3)) == 1
    writer.abort()
    assert uploads_left(s3) == []
    assert listed(storage) == {}
    write_whole(storage, "x", data)
    assert raw_get("s3", f"{s3}/x") == data.tobytes()


@pytest.mark.parametrize("nbytes", [3, 11 * MIB])
def test_a_file_is_not_written_over_one_that_came_meanwhile(s3: str, nbytes: int) -> None:
    storage = open_storage(f"{s3}?part_mib=5")
    writer = storage.create("x", nbytes)
    writer.write(0, image(nbytes).data)
    raw_put("s3", f"{s3}/x", b"other")
    with pytest.raises(StorageError, match="exists"):
        writer.finish()
    assert raw_get("s3", f"{s3}/x") == b"other"
    assert uploads_left(s3) == []


def test_who_slept_after_his_look_loses_to_who_has_committed_since(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker is removed after the writer has seen it, and another store commits."""
    zombie, other = in_parts(s3), in_parts(s3)
    other.put("manifest", b"first", if_absent=True)
    for name in ("pending.1", "pending.2"):
        other.put(name, b"", if_absent=True)

    def slow_look(client: Client, key: str, url: str) -> UpdateVersion | None:
        found = look(client, key, url)
        if key.endswith("pending.1"):
            monkeypatch.setattr("reknit.storage.object.store.look", look)
            other.delete("pending.1")
            assert other.commit("manifest", b"newer", pending="pending.2", if_absent=False)
        return found

    monkeypatch.setattr("reknit.storage.object.store.look", slow_look)
    with pytest.raises(StorageNotFoundError, match=r"pending\.1"):
        zombie.commit("manifest", b"older", pending="pending.1", if_absent=False)
    assert raw_get("s3", f"{s3}/manifest") == b"newer"


def test_of_many_processes_that_put_or_commit_at_once_one_is_first(s3: str) -> None:
    """Separate clients share no state, like separate processes."""
    stores = [in_parts(s3) for _ in range(6)]
    line = threading.Barrier(6)

    def put(k: int) -> bool:
        stores[k].put(f"pending.{k}", b"", if_absent=True)
        line.wait(60)
        return stores[k].put("put", b"%d" % k, if_absent=True)

    def commit(k: int) -> bool:
        line.wait(60)
        return stores[k].commit("committed", b"%d" % k, pending=f"pending.{k}", if_absent=True)

    with ThreadPoolExecutor(6) as pool:
        for path, call in (("put", put), ("committed", commit)):
            won = list(pool.map(call, range(6)))
            assert won.count(True) == 1
            assert raw_get("s3", f"{s3}/{path}") == b"%d" % won.index(True)


def test_the_same_content_from_another_is_not_taken_for_ones_own(s3: str) -> None:
    assert in_parts(s3).put("x", b"same", if_absent=True) is True
    assert in_parts(s3).put("x", b"same", if_absent=True) is False


def test_a_url_that_makes_no_sense_is_refused(s3: str) -> None:
    for url, part in (
        ("s3://", "bucket"),
        ("s3://b/../c", "path"),
        ("s3://b/x?nothing=1", "nothing"),
        ("s3://b/x?part_mib=a", "part_mib"),
        ("s3://b/x?conditional=perhaps", "conditional"),
        ("gs://b/x?region=r", "region"),
    ):
        with pytest.raises((UsageError, StorageError), match=part):
            open_storage(url)


def test_options_of_the_url_count(s3: str) -> None:
    url = f"{s3}/run?part_mib=16&concurrency=3&conditional=lock&timeout_s=7"
    assert isinstance(open_storage(url), RetryingStorage)
    storage = open_storage(f"{url}&retry_s=0")
    assert isinstance(storage, ObjectStorage)
    assert storage.url == f"{s3}/run"
    assert storage.options == ObjectOptions(
        part_nbytes=16 * MIB, concurrency=3, conditional="lock", timeout_s=7.0
    )
    assert storage.reading.piece_nbytes == 16 * MIB


def test_what_the_store_refuses_is_said_with_the_url(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The causes are a missing bucket, wrong credentials, and a server that does not answer."""
    with pytest.raises(StorageError, match="no such bucket") as caught:
        open_storage("s3://no-such-bucket/x").get("y", limit=1)
    assert caught.value.path == "s3://no-such-bucket/x/y"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoragePermissionError, match=f"{s3}/y"):
        open_storage(s3).put("y", b"1", if_absent=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="check the endpoint"):
        open_storage(f"{s3}?retries=0&retry_s=0").put("y", b"1", if_absent=False)


@given(st.integers(0, 1 << 45), st.integers(1, 64))
def test_no_file_has_more_parts_than_a_store_takes(nbytes: int, mib: int) -> None:
    part = part_size(nbytes, mib * MIB)
    assert part >= mib * MIB
    assert -(-nbytes // part) <= MAX_PARTS


def test_secrets_are_left_out_of_messages() -> None:
    error = OSError("GET https://x/y?sig=abc%2F&X-Amz-Signature=def failed\n\nDebug source: abc")
    assert plain(error) == "GET https://x/y?sig=***&X-Amz-Signature=*** failed"


def test_secrets_are_left_out_of_tracebacks() -> None:
    with pytest.raises(StorageError) as caught, translated("read", "s3://x/y"):
        raise ValueError("GET https://x/y?sig=abcdef failed")
    reported = "".join(traceback.format_exception(caught.value))
    assert "sig=***" in reported
    assert "cannot read s3://x/y" in reported
    assert reported.count("failed") == 1, "the client's own error is not shown"
