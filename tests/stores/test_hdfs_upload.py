"""One stream into HDFS, without a cluster, survives faults, and never repeats parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hdfs_native", reason="HDFS needs hdfs-native")

from reknit.errors import StorageError, StorageUnavailableError
from reknit.stores.hdfs import upload
from reknit.stores.hdfs.upload import SubFiles

PART = 8


class OneStream:
    """A client whose calls of `feed` fail as planned: after some bytes of the piece, or with all lost."""

    def __init__(self, failures: dict[int, int], durability: str = "process", tries: int = 4) -> None:
        self.place = SimpleNamespace(durability=durability)
        self.options = SimpleNamespace(part_nbytes=PART, concurrency=4, tries=tries, timeout_s=10)
        self.failures, self.calls, self.open, self.data = failures, 0, False, b""
        self.deleted: list[str] = []
        self.ended = 0

    def url(self, path: str) -> str:
        return f"hdfs://host{path}"

    def begin(self, path: str) -> Any:
        self.open = True
        return object()

    reopen = begin

    def feed(self, path: str, writer: Any, piece: bytes) -> None:
        assert self.open
        self.calls += 1
        if (kept := self.failures.get(self.calls)) is not None:
            self.data = self.data + piece[:kept] if kept >= 0 else self.data[:kept]
            raise StorageUnavailableError("Not replicated yet")
        self.data += piece

    def end(self, path: str, writer: Any, *, empty: bool) -> None:
        assert self.open
        self.open, self.ended = False, self.ended + 1

    def recover(self, path: str) -> bool:
        closed, self.open = not self.open, False
        return closed

    def stat(self, path: str) -> Any:
        return SimpleNamespace(length=len(self.data))

    def delete(self, path: str) -> None:
        self.deleted.append(path)

    discard = delete


def written(client: Any, data: bytes) -> SubFiles:
    files = SubFiles(client, client, "/folder", len(data), split=False)
    for start in range(0, len(data), 4):
        files.write(start, memoryview(data)[start : start + 4])
    files.finish()
    return files


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_FIRST_PAUSE_S", 0.0)


def test_a_stream_goes_on_where_the_file_ends_after_a_refusal_that_passes() -> None:
    data = bytes(range(21))
    for failures in ({1: 0}, {1: 3}, {2: 0}, {2: 7}, {3: 2, 4: 3}, {2: 0, 3: 0, 4: 0}, {2: 8}):
        client = OneStream(failures)
        files = written(client, data)
        assert client.data == data, failures
        assert (len(files.created), client.ended, client.open) == (1, 1, False), failures


def test_as_many_refusals_as_there_are_tries_fail_the_stream() -> None:
    with pytest.raises(StorageUnavailableError, match="Not replicated yet"):
        written(OneStream({1: 0, 2: 0}, tries=2), bytes(21))


def test_bytes_that_were_lost_or_not_synced_fail_the_stream() -> None:
    for client in (OneStream({2: -1}), OneStream({3: 5}, "power")):
        with pytest.raises(StorageError, match="cannot be continued") as caught:
            written(client, bytes(21))
        assert not isinstance(caught.value, StorageUnavailableError)
