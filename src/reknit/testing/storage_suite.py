"""What every store must do, as tests: subclass `StorageSuite`, say how to make the store, run pytest."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reknit.errors import StorageError, StorageNotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.storage.base import Storage

LIMIT = 1 << 20
ESCAPES = (
    "",
    "/",
    "/etc/passwd",
    "..",
    "../up",
    "a/../../up",
    "a//b",
    "a/",
    "./a",
    "a/.",
    "a\0b",
    "a\\..\\b",
)
RESERVED = (".x.tmp", "a/.x.tmp/b", ".nfs0001", "\ud800")
NAMES = ("weights", "Größe", "模型/层 1", "emoji 🧵.bin", "a.b/c,d[0:128]", "-rf", "%2e%2e", "~", "x" * 200)


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes that differ everywhere, so that a piece in the wrong place is seen."""
    return random.Random(seed).randbytes(nbytes)


def write(storage: Storage, path: str, data: bytes) -> None:
    """Write a whole file in one piece."""
    writer = storage.create(path, len(data))
    writer.write(0, memoryview(data))
    writer.finish()


def read(storage: Storage, path: str, start: int, nbytes: int) -> bytes:
    """Read a range into one buffer."""
    buffer = bytearray(nbytes)
    storage.read_into(path, start, [memoryview(buffer)])
    return bytes(buffer)


def read_runs(storage: Storage, path: str, starts: list[int], nbytes: int) -> bytes:
    """Read runs of one size into one buffer."""
    buffer = bytearray(len(starts) * nbytes)
    storage.read_runs(path, np.array(starts, np.int64), nbytes, memoryview(buffer))
    return bytes(buffer)


def listed(storage: Storage, prefix: str = "") -> dict[str, int]:
    """Return what a store lists: sizes by path."""
    found = list(storage.list(prefix))
    assert len(found) == len({file.path for file in found}), "a file is listed twice"
    return dict(found)


class StorageSuite(ABC):
    """The contract of `reknit.storage.base.Storage`.

    `raw_read` and `raw_write` reach the bytes on a way that does not lead through the store under test, so
    that a store which deceives itself consistently does not pass.
    """

    @abstractmethod
    def make(self, tmp_path: Path) -> Storage:
        """Return an empty store whose root need not exist."""

    @abstractmethod
    def raw_read(self, storage: Storage, path: str) -> bytes:
        """Return a file's bytes without using the store."""

    @abstractmethod
    def raw_write(self, storage: Storage, path: str, data: bytes) -> None:
        """Put a file there, or change one, without using the store."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        """Return the store under test."""
        return self.make(tmp_path)

    def test_a_written_file_holds_exactly_its_bytes(self, storage: Storage) -> None:
        """What goes in arrives, at the place where others look."""
        data = pattern(100_000)
        write(storage, "model/00000.bin", data)
        assert self.raw_read(storage, "model/00000.bin") == data
        assert storage.size("model/00000.bin") == len(data)
        assert storage.get("model/00000.bin", limit=LIMIT) == data

    def test_a_file_that_others_wrote_is_read(self, storage: Storage) -> None:
        """What others put there comes out."""
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

    def test_readers_see_the_old_content_or_the_new(self, storage: Storage) -> None:
        """Never a mixture, never nothing, by `get`, by `read_into`, or raw."""
        contents = [bytes([i]) * 4096 for i in range(40)]
        storage.put("x", contents[0], if_absent=False)
        over = threading.Event()

        def watch(look: Callable[[], bytes]) -> set[bytes]:
            seen = set()
            while not over.is_set():
                seen.add(look())
            return seen

        looks: list[Callable[[], bytes]] = [
            lambda: storage.get("x", limit=LIMIT),
            lambda: read(storage, "x", 0, 4096),
            lambda: self.raw_read(storage, "x"),
        ]
        with ThreadPoolExecutor(3) as pool:
            seen = [pool.submit(watch, look) for look in looks]
            for content in contents:
                storage.put("x", content, if_absent=False)
            over.set()
            assert set().union(*(future.result() for future in seen)) <= set(contents)

    def test_put_if_absent_has_one_winner(self, storage: Storage) -> None:
        """Eight threads at once, several times; the winner's content is what remains."""
        for attempt in range(10):
            path, line = f"race/{attempt}", threading.Barrier(8)

            def put(i: int, path: str = path, line: threading.Barrier = line) -> bool:
                line.wait(60)
                return storage.put(path, b"%d" % i, if_absent=True)

            with ThreadPoolExecutor(8) as pool:
                won = list(pool.map(put, range(8)))
            assert won.count(True) == 1
            assert self.raw_read(storage, path) == b"%d" % won.index(True)

    def test_get_refuses_more_than_its_limit(self, storage: Storage) -> None:
        """One byte too many is too many."""
        storage.put("x", bytes(100), if_absent=False)
        assert storage.get("x", limit=100) == bytes(100)
        with pytest.raises(StorageError, match="100"):
            storage.get("x", limit=99)

    def test_a_missing_file_is_reported_as_missing(self, storage: Storage) -> None:
        """By every way to read, also where a folder is or a file is taken for a folder."""
        storage.put("a/b", b"1", if_absent=False)
        looks: list[Callable[[str], bytes]] = [
            lambda path: read(storage, path, 0, 1),
            lambda path: read_runs(storage, path, [0, 9], 1),
            lambda path: read_runs(storage, path, [0, 90_000], 1),
        ]
        for path in ("nothing", "a", "a/c", "a/b/c"):
            with pytest.raises(StorageNotFoundError):
                storage.get(path, limit=1)
            with pytest.raises(StorageNotFoundError):
                storage.size(path)
            for look in looks:
                with pytest.raises(StorageNotFoundError) as caught:
                    look(path)
                assert str(caught.value.path).endswith(path)

    @pytest.mark.parametrize(("start", "nbytes"), [(0, 101), (100, 1), (50, 51), (1000, 1)])
    def test_reading_past_the_end_is_an_error(self, storage: Storage, start: int, nbytes: int) -> None:
        """A short file is never filled up silently."""
        storage.put("x", pattern(100), if_absent=False)
        with pytest.raises(StorageError, match="100"):
            read(storage, "x", start, nbytes)
        assert read(storage, "x", 99, 1) == pattern(100)[99:]

    def test_a_read_fills_many_buffers(self, storage: Storage) -> None:
        """More than the kernel takes in one call, of mixed sizes, empty ones among them."""
        sizes = [i % 7 for i in range(3000)]
        data = pattern(sum(sizes) + 20)
        self.raw_write(storage, "x", data)
        buffers = [bytearray(n) for n in sizes]
        storage.read_into("x", 10, [memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == data[10:-10]

    @pytest.mark.parametrize("nbytes", [1, 13, 300, 5000])
    @pytest.mark.parametrize("largest_hole", [0, 7, 3000, 100_000])
    def test_runs_come_one_after_another(self, storage: Storage, nbytes: int, largest_hole: int) -> None:
        """With holes of one size or of many, near each other and far apart, up to the end of the file."""
        order = random.Random(nbytes + largest_hole)
        for holes in ([largest_hole] * 40, [order.randint(0, largest_hole) for _ in range(40)]):
            starts = [5]
            for hole in holes:
                starts.append(starts[-1] + nbytes + hole)
            data = pattern(starts[-1] + nbytes)
            storage.delete("x")
            self.raw_write(storage, "x", data)
            expected = b"".join(data[start : start + nbytes] for start in starts)
            assert read_runs(storage, "x", starts, nbytes) == expected

    def test_more_runs_than_fit_in_any_buffer_of_the_store(self, storage: Storage) -> None:
        """Many small ones, and a few whose holes are much larger than the rest."""
        data = pattern(3 << 20)
        self.raw_write(storage, "x", data)
        starts = [k * 37 for k in range(30_000)] + [(2 << 20) + k for k in range(0, 900, 3)] + [len(data) - 3]
        expected = b"".join(data[start : start + 3] for start in starts)
        assert read_runs(storage, "x", starts, 3) == expected

    def test_no_runs_and_empty_runs_are_no_special_case(self, storage: Storage) -> None:
        """Nothing is read, but of a file that is there."""
        self.raw_write(storage, "x", b"1")
        assert read_runs(storage, "x", [], 7) == read_runs(storage, "x", [0, 1], 0) == b""
        with pytest.raises(StorageNotFoundError):
            read_runs(storage, "nothing", [], 7)

    @pytest.mark.parametrize("step", [10, 50_000])
    def test_a_run_past_the_end_is_an_error(self, storage: Storage, step: int) -> None:
        """Whether its first byte is missing or only its last."""
        starts = [k * step for k in range(5)]
        storage.put("x", pattern(starts[-1] + 7), if_absent=False)
        for nbytes in (8, 9):
            with pytest.raises(StorageError, match=str(starts[-1] + 7)):
                read_runs(storage, "x", starts, nbytes)
        with pytest.raises(StorageError):
            read_runs(storage, "x", [*starts, 10 * step], 7)
        assert read_runs(storage, "x", starts, 7)[-7:] == pattern(starts[-1] + 7)[-7:]

    def test_a_buffer_of_another_size_than_the_runs_is_refused(self, storage: Storage) -> None:
        """As a mistake of the caller, and so are runs before the file."""
        self.raw_write(storage, "x", pattern(100))
        for starts, nbytes, size in (([0, 50], 10, 19), ([0, 50], 10, 21), ([-1, 50], 10, 20), ([0], -1, 1)):
            with pytest.raises(UsageError):
                storage.read_runs("x", np.array(starts), nbytes, memoryview(bytearray(size)))

    def test_how_reads_are_best_cut_makes_sense(self, storage: Storage) -> None:
        """The numbers are none that a planner could stumble over."""
        reading = storage.reading
        assert reading.gap_nbytes >= 0
        assert reading.waste >= 0
        assert reading.piece_nbytes >= 1

    def test_many_threads_read_many_files(self, storage: Storage) -> None:
        """More files than anybody would keep open, in random order."""
        data = {f"f{i}": pattern(500, i) for i in range(150)}
        for path, content in data.items():
            self.raw_write(storage, path, content)

        def check(seed: int) -> None:
            order = random.Random(seed)
            for path in order.choices(list(data), k=200):
                start = order.randrange(400)
                assert read(storage, path, start, 100) == data[path][start : start + 100]

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(check, range(4)))

    def test_a_file_deleted_under_its_readers_is_whole_or_missing(self, storage: Storage) -> None:
        """And a file of the same name written afterwards is that file, not a memory of the old."""
        old, new = pattern(5000, 1), pattern(5000, 2)
        write(storage, "x", old)
        over = threading.Event()

        def watch() -> set[bytes]:
            seen = set()
            while not over.is_set():
                try:
                    seen.add(read(storage, "x", 0, 5000))
                except StorageNotFoundError:
                    seen.add(b"")
            return seen

        with ThreadPoolExecutor(2) as pool:
            seen = [pool.submit(watch) for _ in range(2)]
            for _ in range(20):
                storage.delete("x")
                storage.put("x", old, if_absent=True)
            storage.delete("x")
            over.set()
            assert set().union(*(future.result() for future in seen)) <= {old, b""}
        write(storage, "x", new)
        assert read(storage, "x", 0, 5000) == new

    def test_list_finds_every_file_below_a_folder(self, storage: Storage) -> None:
        """A folder is no prefix of a name."""
        sizes = {"top": 1, "a/x": 2, "a/b/y": 3, "ab/z": 4}
        for path, nbytes in sizes.items():
            write(storage, path, bytes(nbytes))
        assert listed(storage) == sizes
        assert listed(storage, "a") == {"a/x": 2, "a/b/y": 3}
        assert listed(storage, "a/b") == {"a/b/y": 3}
        assert listed(storage, "nothing") == listed(storage, "top") == {}

    def test_folders_are_those_directly_below(self, storage: Storage) -> None:
        """Sorted, without files; a root that is missing has none."""
        assert storage.folders() == []
        assert listed(storage) == {}
        for path in ("top", "b/x", "a/deep/y"):
            write(storage, path, b"1")
        assert storage.folders() == ["a", "b"]

    def test_delete_removes_one_file(self, storage: Storage) -> None:
        """Its neighbours stay, a missing one is no error, and a folder is no file."""
        for path in ("a/x", "a/y", "b"):
            write(storage, path, b"1")
        storage.delete("a/x")
        storage.delete("a/x")
        storage.delete("nothing/at/all")
        storage.delete("b/below")
        assert listed(storage) == {"a/y": 1, "b": 1}
        with pytest.raises(StorageError):
            storage.delete("a")
        storage.delete("a/y")
        storage.delete("b")
        assert listed(storage) == {}
        assert storage.folders() == []
        write(storage, "a/x", b"2")
        assert self.raw_read(storage, "a/x") == b"2"

    def test_creating_in_a_folder_while_others_empty_it(self, storage: Storage) -> None:
        """A folder that vanishes between two steps is made again."""

        def churn(i: int) -> None:
            for k in range(30):
                write(storage, f"a/b/{i}", b"1")
                storage.put(f"a/b/put{i}", b"%d" % k, if_absent=True)
                storage.delete(f"a/b/{i}")
                storage.delete(f"a/b/put{i}")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(churn, range(4)))
        assert listed(storage) == {}

    @pytest.mark.parametrize("path", [*ESCAPES, *RESERVED])
    def test_a_path_that_leads_out_is_refused(self, storage: Storage, path: str) -> None:
        """By every method, before anything is touched."""
        calls: list[Callable[[], object]] = [
            lambda: storage.create(path, 1),
            lambda: storage.put(path, b"1", if_absent=False),
            lambda: storage.get(path, limit=1),
            lambda: storage.size(path),
            lambda: storage.read_into(path, 0, []),
            lambda: read_runs(storage, path, [], 1),
            lambda: read_runs(storage, path, [0, 90_000], 1),
            lambda: storage.delete(path),
            lambda: storage.sub(path),
        ]
        for call in calls if not path else [*calls, lambda: storage.list(path)]:
            with pytest.raises(StorageError):
                call()

    @pytest.mark.parametrize("name", NAMES)
    def test_names_of_any_language_work(self, storage: Storage, name: str) -> None:
        """Written, listed and read under the same name."""
        write(storage, name, b"1")
        storage.put(f"below/{name}", b"22", if_absent=True)
        assert listed(storage) == {name: 1, f"below/{name}": 2}
        assert self.raw_read(storage, name) == storage.get(name, limit=1) == b"1"

    def test_a_store_below_sees_the_same_files(self, storage: Storage) -> None:
        """Paths are relative to its own root."""
        below = storage.sub("steps/1")
        assert below.url.startswith(storage.url)
        write(below, "model/x", b"123")
        assert below.put("manifest", b"m", if_absent=True)
        assert self.raw_read(storage, "steps/1/model/x") == b"123"
        assert listed(below) == {"model/x": 3, "manifest": 1}
        assert listed(storage) == {"steps/1/model/x": 3, "steps/1/manifest": 1}
        assert storage.folders() == ["steps"]
        assert storage.sub("steps").folders() == ["1"]
        assert below.folders() == ["model"]
        assert read(storage.sub("steps").sub("1"), "model/x", 1, 2) == b"23"
        below.delete("model/x")
        assert listed(storage) == {"steps/1/manifest": 1}

    def test_a_file_and_a_folder_do_not_share_a_name(self, storage: Storage) -> None:
        """Neither way round."""
        write(storage, "a/x", b"1")
        write(storage, "b", b"1")
        for call in (
            lambda: storage.create("a", 1),
            lambda: storage.put("a", b"1", if_absent=False),
            lambda: storage.put("a", b"1", if_absent=True),
            lambda: storage.create("b/x", 1),
            lambda: storage.put("b/x", b"1", if_absent=True),
        ):
            with pytest.raises(StorageError):
                call()
        assert listed(storage) == {"a/x": 1, "b": 1}

    def test_negative_numbers_are_refused(self, storage: Storage) -> None:
        """As mistakes of the caller."""
        write(storage, "x", b"1")
        with pytest.raises(UsageError):
            storage.create("y", -1)
        with pytest.raises(UsageError):
            read(storage, "x", -1, 1)

    def test_close_releases_and_may_be_repeated(self, storage: Storage) -> None:
        """What was written stays."""
        write(storage, "x", b"1")
        assert read(storage, "x", 0, 1) == b"1"
        storage.close()
        storage.close()
        assert self.raw_read(storage, "x") == b"1"
