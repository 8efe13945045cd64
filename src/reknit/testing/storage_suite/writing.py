"""Files that are written piece by piece: exactly their bytes, once, and nothing before they are finished."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from reknit.errors import StorageError, UsageError
from reknit.testing.storage_suite.probes import listed, pattern, read, write
from reknit.testing.storage_suite.suite import Suite

if TYPE_CHECKING:
    from reknit.storage.base import Storage

LIMIT = 1 << 20


class WritingSuite(Suite):
    """The contract of `create` and of the writer that it returns."""

    def test_a_written_file_holds_exactly_its_bytes(self, storage: Storage) -> None:
        """The bytes arrive, at the place where others look."""
        data = pattern(100_000)
        write(storage, "model/00000.bin", data)
        assert self.raw_read(storage, "model/00000.bin") == data
        assert storage.size("model/00000.bin") == len(data)
        assert storage.get("model/00000.bin", limit=LIMIT) == data

    def test_a_file_that_others_wrote_is_read(self, storage: Storage) -> None:
        """The bytes that others put there come out."""
        data = pattern(1000)
        self.raw_write(storage, "a/b.bin", data)
        assert storage.get("a/b.bin", limit=1000) == data
        assert read(storage, "a/b.bin", 100, 50) == data[100:150]
        assert listed(storage) == {"a/b.bin": 1000}

    def test_pieces_may_come_in_any_order(self, storage: Storage) -> None:
        """The last piece first, an empty one in between."""
        data = pattern(10_000)
        writer = storage.create("x", len(data))
        view = memoryview(data)
        for start in (9000, 0, 3000, 6000):
            end = {9000: 10_000, 0: 3000, 3000: 6000, 6000: 9000}[start]
            writer.write(start, view[start:end])
            writer.write(start, view[:0])
        writer.finish()
        assert self.raw_read(storage, "x") == data

    def test_many_threads_write_one_file(self, storage: Storage) -> None:
        """Pieces of odd sizes from eight threads."""
        data = pattern(300_007)
        writer = storage.create("x", len(data))
        view = memoryview(data)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: writer.write(i, view[i : i + 1009]), range(0, len(data), 1009)))
        writer.finish()
        assert self.raw_read(storage, "x") == data

    def test_a_file_may_be_empty(self, storage: Storage) -> None:
        """No byte needs to be written."""
        storage.create("empty", 0).finish()
        assert self.raw_read(storage, "empty") == b""
        assert storage.size("empty") == 0
        assert storage.get("empty", limit=0) == b""
        storage.read_into("empty", 0, [])
        assert listed(storage) == {"empty": 0}

    @pytest.mark.parametrize("written", [[], [(0, 99)], [(1, 99)], [(0, 50), (51, 49)]])
    def test_a_file_with_bytes_missing_cannot_be_finished(
        self, storage: Storage, written: list[tuple[int, int]]
    ) -> None:
        """At the end, at the start, in the middle."""
        writer = storage.create("x", 100)
        for start, nbytes in written:
            writer.write(start, memoryview(pattern(nbytes)))
        with pytest.raises(StorageError):
            writer.finish()
        writer.abort()
        assert listed(storage) == {}

    @pytest.mark.parametrize(("start", "nbytes"), [(0, 101), (100, 1), (-1, 1), (1 << 40, 1)])
    def test_bytes_outside_the_size_announced_are_refused(
        self, storage: Storage, start: int, nbytes: int
    ) -> None:
        """The file never grows."""
        writer = storage.create("x", 100)
        with pytest.raises(StorageError):
            writer.write(start, memoryview(bytes(nbytes)))
        writer.abort()

    def test_an_existing_file_is_never_written_again(self, storage: Storage) -> None:
        """Files are immutable, also those under way."""
        write(storage, "x", b"first")
        with pytest.raises(StorageError):
            storage.create("x", 5)
        assert self.raw_read(storage, "x") == b"first"
        writer = storage.create("y", 1)
        with pytest.raises(StorageError):
            storage.create("y", 1)
        writer.abort()

    def test_of_many_threads_that_create_one_file_one_succeeds(self, storage: Storage) -> None:
        """The name is taken at once."""

        def create(_: int) -> bool:
            try:
                writer = storage.create("deep/down/x", 1)
            except StorageError:
                return False
            writer.write(0, memoryview(b"1"))
            writer.finish()
            return True

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(create, range(8))) == 1

    def test_abort_leaves_nothing(self, storage: Storage) -> None:
        """Neither file nor folder, and the name is free."""
        writer = storage.create("a/b/x", 100)
        writer.write(0, memoryview(bytes(50)))
        writer.abort()
        writer.abort()
        assert listed(storage) == {}
        assert storage.folders() == []
        write(storage, "a/b/x", b"again")
        writer.abort()
        assert self.raw_read(storage, "a/b/x") == b"again"

    def test_a_finished_file_survives_abort(self, storage: Storage) -> None:
        """A caller may abort everything that it has begun."""
        writer = storage.create("x", 1)
        writer.write(0, memoryview(b"1"))
        writer.finish()
        writer.abort()
        assert self.raw_read(storage, "x") == b"1"

    def test_a_closed_writer_takes_no_bytes(self, storage: Storage) -> None:
        """After finish and after abort."""
        done, given_up = storage.create("done", 1), storage.create("given up", 1)
        done.write(0, memoryview(b"1"))
        done.finish()
        given_up.abort()
        for writer in (done, given_up):
            with pytest.raises(StorageError):
                writer.write(0, memoryview(b"2"))
            with pytest.raises(StorageError):
                writer.finish()
        assert listed(storage) == {"done": 1}
        assert self.raw_read(storage, "done") == b"1"

    def test_a_file_deleted_under_its_writer_is_not_called_finished(self, storage: Storage) -> None:
        """And the writer's abort leaves the file alone that has taken the name since."""
        writer = storage.create("x", 1)
        writer.write(0, memoryview(b"1"))
        storage.delete("x")
        with pytest.raises(StorageError):
            writer.finish()
        write(storage, "x", b"other")
        writer.abort()
        assert self.raw_read(storage, "x") == b"other"

    def test_negative_numbers_are_refused(self, storage: Storage) -> None:
        """As mistakes of the caller."""
        write(storage, "x", b"1")
        with pytest.raises(UsageError):
            storage.create("y", -1)
        with pytest.raises(UsageError):
            read(storage, "x", -1, 1)
