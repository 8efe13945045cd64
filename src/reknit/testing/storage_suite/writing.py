"""Files that are written: piece by piece, of other files, or at once, such as that of a commit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from reknit.errors import StorageError, StorageNotFoundError, UsageError
from reknit.plugins.store import CLOCK, CopiesFiles, HasDates
from reknit.testing.storage_suite.suite import Suite, listed, pattern, read, seen_meanwhile, write

if TYPE_CHECKING:
    from reknit.plugins.store import Storage


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


NBYTES = 10_000
OLD, NEW = "model/old", "model/new"


class Pair:
    """The folders of two steps in one store, of which the later takes over files of the earlier."""

    def __init__(self, earlier: Storage, later: Storage, copies: CopiesFiles) -> None:
        self.earlier, self.later, self._copies = earlier, later, copies

    def copy(self, path: str = NEW, source: str = OLD, nbytes: int = NBYTES) -> bool:
        """Take over a file of the earlier folder."""
        return self._copies.copy_from(self.earlier, source, path, nbytes)


class CopyingSuite(Suite):
    """The contract of `CopiesFiles`; stores that are none are passed over."""

    @pytest.fixture
    def pair(self, storage: Storage) -> Pair:
        """Return two folders, with a file in the first."""
        earlier, later = storage.sub("1"), storage.sub("2")
        if not isinstance(later, CopiesFiles):
            pytest.skip("this store copies no files")
        write(earlier, OLD, pattern(NBYTES))
        pair = Pair(earlier, later, later)
        if not pair.copy("probe"):
            pytest.skip("this store refuses to copy files here")
        return pair

    def test_a_copy_is_a_file_of_its_own(self, pair: Pair) -> None:
        """It keeps the bytes if the other changes or goes, and the other stays when it goes."""
        assert pair.copy()
        assert pair.copy("again", source=OLD)
        pair.later.delete("again")
        assert read(pair.earlier, OLD, 0, NBYTES) == pattern(NBYTES)
        write(pair.earlier, "stays", b"1")  # a folder that a store was opened in may stay when it is empty
        pair.earlier.delete(OLD)
        assert read(pair.later, NEW, 0, NBYTES) == pattern(NBYTES)
        assert listed(pair.later) == {"probe": NBYTES, NEW: NBYTES}

    def test_a_copy_of_a_copy_is_as_good(self, pair: Pair) -> None:
        """A file may be taken over from step to step."""
        write(pair.later, "other", b"1")
        assert isinstance(pair.earlier, CopiesFiles)
        assert pair.earlier.copy_from(pair.later, "probe", "back", NBYTES)
        assert pair.earlier.get("back", limit=NBYTES) == pattern(NBYTES)

    @pytest.mark.parametrize(
        ("source", "nbytes"), [("nothing", NBYTES), ("model", NBYTES), (OLD, NBYTES - 1)]
    )
    def test_what_is_not_there_as_expected_is_not_copied(self, pair: Pair, source: str, nbytes: int) -> None:
        """A source that is gone, a folder, another size: the answer is no, and nothing is there."""
        assert not pair.copy(source=source, nbytes=nbytes)
        assert listed(pair.later) == {"probe": NBYTES}
        write(pair.later, NEW, b"1")  # the name is free

    def test_a_name_that_is_taken_is_refused(self, pair: Pair) -> None:
        """A file that has the name stays as it is."""
        write(pair.later, NEW, b"1")
        with pytest.raises(StorageError):
            pair.copy()
        assert pair.later.get(NEW, limit=10) == b"1"

    @pytest.mark.parametrize("path", ["../2/up", "/etc/x", ""])
    def test_no_path_leads_out_of_the_folders(self, pair: Pair, path: str) -> None:
        """Neither where a file comes from, nor where it goes to."""
        with pytest.raises(StorageError):
            pair.copy(path)
        with pytest.raises(StorageError):
            pair.copy(source=path)

    def test_another_kind_of_store_has_nothing_to_copy(self, pair: Pair) -> None:
        """It is not an error: the file is written then."""
        copies = pair.later
        assert isinstance(copies, CopiesFiles)
        assert not copies.copy_from(Elsewhere(), OLD, NEW, NBYTES)  # type: ignore[arg-type]
        assert listed(pair.later) == {"probe": NBYTES}


class Elsewhere:
    """A store of a kind that no other store recognizes."""


_AHEAD_S = 3600.0


class _Ahead:
    """The clock of a host that is an hour ahead."""

    def __init__(self) -> None:
        self._right = CLOCK.get()
        self.monotonic = self._right.monotonic

    def time(self) -> float:
        return self._right.time() + _AHEAD_S


class PuttingSuite(Suite):
    """The contract of `put`."""

    def test_put_writes_and_replaces(self, storage: Storage) -> None:
        """With `if_absent` the first content stays."""
        assert storage.put("s/latest", b"one", if_absent=True) is True
        assert storage.put("s/latest", b"two", if_absent=True) is False
        assert self.raw_read(storage, "s/latest") == b"one"
        assert storage.put("s/latest", b"longer", if_absent=False) is True
        assert storage.put("s/new", b"", if_absent=False) is True
        assert self.raw_read(storage, "s/latest") == b"longer"
        assert read(storage, "s/latest", 0, 6) == b"longer"
        assert listed(storage) == {"s/latest": 6, "s/new": 0}

    def test_the_age_of_a_file_is_measured_on_one_clock(self, storage: Storage) -> None:
        """A new file is younger than an hour, however wrong the clock of this host is."""
        if not isinstance(storage, HasDates):
            pytest.skip("this store does not date its files")
        storage.put("s/new", b"1", if_absent=False)
        token = CLOCK.set(_Ahead())
        try:
            assert 0.0 <= storage.age_s("s/new") < _AHEAD_S
            with pytest.raises(StorageNotFoundError):
                storage.age_s("s/missing")
        finally:
            CLOCK.reset(token)
        assert listed(storage) == {"s/new": 1}

    def test_readers_see_the_old_content_or_the_new(self, storage: Storage) -> None:
        """Never a mixture, never nothing, by `get`, by `read_into`, or raw."""
        contents = [bytes([i]) * 4096 for i in range(40)]
        storage.put("x", contents[0], if_absent=False)

        def put() -> None:
            for content in contents:
                storage.put("x", content, if_absent=False)

        assert seen_meanwhile(put, self.looks(storage, "x", 4096)) <= set(contents)

    def test_put_if_absent_has_one_winner(self, storage: Storage) -> None:
        """Eight threads at once, several times; the winner's content remains."""
        for attempt in range(10):
            path, line = f"race/{attempt}", threading.Barrier(8)

            def put(i: int, path: str = path, line: threading.Barrier = line) -> bool:
                line.wait(60)
                return storage.put(path, b"%d" % i, if_absent=True)

            with ThreadPoolExecutor(8) as pool:
                won = list(pool.map(put, range(8)))
            assert won.count(True) == 1
            assert self.raw_read(storage, path) == b"%d" % won.index(True)


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
