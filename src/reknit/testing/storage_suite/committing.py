"""The small file that makes a checkpoint exist: written in one step, and only while a marker is there."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from reknit.errors import StorageNotFoundError
from reknit.testing.storage_suite.probes import listed, read, seen_meanwhile
from reknit.testing.storage_suite.suite import Suite

if TYPE_CHECKING:
    from reknit.storage.base import Storage

either_way = pytest.mark.parametrize("if_absent", [False, True])


class CommittingSuite(Suite):
    """The contract of `commit`."""

    @either_way
    def test_a_commit_uses_up_its_marker(self, storage: Storage, if_absent: bool) -> None:
        """The one file is there, the other is not, and there is no second time."""
        assert storage.put("s/pending.1", b"", if_absent=True)
        assert storage.commit("s/latest", b"one", pending="s/pending.1", if_absent=if_absent) is True
        assert self.raw_read(storage, "s/latest") == b"one"
        assert read(storage, "s/latest", 0, 3) == b"one"
        assert listed(storage) == {"s/latest": 3}
        with pytest.raises(StorageNotFoundError):
            storage.commit("s/latest", b"two", pending="s/pending.1", if_absent=False)
        assert storage.get("s/latest", limit=3) == b"one"

    def test_a_commit_replaces_what_was_there(self, storage: Storage) -> None:
        """By shorter, longer or empty content; old files that a store keeps open do not show."""
        for content in (b"first", b"2nd", b"the third", b"", b"5"):
            storage.put("pending", b"", if_absent=True)
            assert storage.commit("latest", content, pending="pending", if_absent=False) is True
            assert self.raw_read(storage, "latest") == content
            assert read(storage, "latest", 0, len(content)) == content
            assert listed(storage) == {"latest": len(content)}

    @either_way
    @pytest.mark.parametrize("old", [None, b"old"])
    def test_without_its_marker_nothing_is_committed(
        self, storage: Storage, old: bytes | None, if_absent: bool
    ) -> None:
        """Where it was deleted, where it never was, and where not even its folder is."""
        if old is not None:
            storage.put("s/latest", old, if_absent=True)
        storage.put("s/pending.1", b"", if_absent=True)
        storage.put("s/pending.2", b"", if_absent=True)
        storage.delete("s/pending.1")
        before = listed(storage)
        for path, pending in (("s/latest", "s/pending.1"), ("s/latest", "s/none"), ("no/latest", "no/none")):
            with pytest.raises(StorageNotFoundError) as caught:
                storage.commit(path, b"new", pending=pending, if_absent=if_absent)
            assert str(caught.value.path).endswith(pending)
        assert listed(storage) == before
        assert old is None or self.raw_read(storage, "s/latest") == old

    def test_a_commit_where_nothing_may_be_leaves_what_is_there(self, storage: Storage) -> None:
        """The answer is False, and the marker may still be used, or deleted."""
        storage.put("latest", b"old", if_absent=True)
        for pending in ("pending.1", "pending.2"):
            storage.put(pending, b"", if_absent=True)
            assert storage.commit("latest", b"longer", pending=pending, if_absent=True) is False
        assert self.raw_read(storage, "latest") == b"old"
        storage.delete("pending.1")
        assert self.raw_read(storage, "latest") == b"old"
        assert storage.commit("latest", b"longer", pending="pending.2", if_absent=False) is True
        assert self.raw_read(storage, "latest") == b"longer"
        assert listed(storage) == {"latest": 6}

    def test_readers_see_what_was_before_a_commit_or_after(self, storage: Storage) -> None:
        """Never a mixture, never nothing, in every way of reading."""
        contents = [bytes([i]) * 4096 for i in range(40)]
        storage.put("x", contents[0], if_absent=False)

        def commit() -> None:
            for i, content in enumerate(contents):
                storage.put(f"pending.{i}", b"", if_absent=True)
                assert storage.commit("x", content, pending=f"pending.{i}", if_absent=False)

        assert seen_meanwhile(commit, self.looks(storage, "x", 4096)) <= set(contents)

    @either_way
    def test_of_many_commits_at_once_one_content_stays_whole(self, storage: Storage, if_absent: bool) -> None:
        """If no file may be there before, one alone gets the answer that it was first."""
        for attempt in range(10):
            path, line = f"race/{attempt}/x", threading.Barrier(8)

            def commit(i: int, path: str = path, line: threading.Barrier = line) -> bool:
                storage.put(f"{path}.{i}", b"", if_absent=True)
                line.wait(60)
                return storage.commit(path, b"%d" % i * 1000, pending=f"{path}.{i}", if_absent=if_absent)

            with ThreadPoolExecutor(8) as pool:
                won = list(pool.map(commit, range(8)))
            left = self.raw_read(storage, path)
            assert left == left[:1] * 1000
            assert won[int(left[:1])]
            assert won.count(True) == (1 if if_absent else 8)

    @either_way
    def test_whoever_deletes_the_marker_is_too_late_or_prevents_the_commit(
        self, storage: Storage, if_absent: bool
    ) -> None:
        """And its deletion shows which."""
        for attempt in range(40):
            path, line = f"race/{attempt}/x", threading.Barrier(2)
            storage.put(f"{path}.pending", b"", if_absent=True)

            def commit(path: str = path, line: threading.Barrier = line) -> bool:
                line.wait(60)
                try:
                    return storage.commit(path, b"1", pending=f"{path}.pending", if_absent=if_absent)
                except StorageNotFoundError:
                    return False

            with ThreadPoolExecutor(1) as pool:
                committed = pool.submit(commit)
                line.wait(60)
                storage.delete(f"{path}.pending")
                seen = listed(storage, f"race/{attempt}")
                assert committed.result(60) == (seen == {path: 1})
            assert listed(storage, f"race/{attempt}") == seen

    def test_a_store_below_commits_in_its_own_folder(self, storage: Storage) -> None:
        """Both paths are relative to its root."""
        below = storage.sub("steps/1")
        below.put("pending", b"", if_absent=True)
        assert below.commit("manifest", b"m", pending="pending", if_absent=True)
        assert self.raw_read(storage, "steps/1/manifest") == b"m"
        assert listed(storage) == {"steps/1/manifest": 1}
