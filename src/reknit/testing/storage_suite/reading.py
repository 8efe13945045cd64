"""Files that are read: whole, in ranges, in many small runs, and while others delete them; and places."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reknit.errors import StorageError, StorageNotFoundError, UsageError
from reknit.testing.storage_suite.suite import Suite, listed, pattern, read, read_runs, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.plugins.store import Storage


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


class PlacesSuite(Suite):
    """The contract of paths, `list`, `folders`, `delete`, `sub` and `close`."""

    def test_list_finds_every_file_below_a_folder(self, storage: Storage) -> None:
        """A folder is not a prefix of a name."""
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
        """Its neighbours stay, a missing file is not an error, and a folder is not a file."""
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
        storage.put("pending", b"", if_absent=True)
        calls: list[Callable[[], object]] = [
            lambda: storage.create(path, 1),
            lambda: storage.put(path, b"1", if_absent=False),
            lambda: storage.commit(path, b"1", pending="pending", if_absent=False),
            lambda: storage.commit("x", b"1", pending=path, if_absent=False),
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
        assert listed(storage) == {"pending": 0}

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
        storage.put("c", b"", if_absent=True)
        for call in (
            lambda: storage.create("a", 1),
            lambda: storage.put("a", b"1", if_absent=False),
            lambda: storage.put("a", b"1", if_absent=True),
            lambda: storage.commit("a", b"1", pending="c", if_absent=False),
            lambda: storage.commit("a", b"1", pending="c", if_absent=True),
            lambda: storage.create("b/x", 1),
            lambda: storage.put("b/x", b"1", if_absent=True),
        ):
            with pytest.raises(StorageError):
                call()
        storage.delete("c")
        assert listed(storage) == {"a/x": 1, "b": 1}

    def test_close_releases_and_may_be_repeated(self, storage: Storage) -> None:
        """Written files stay."""
        write(storage, "x", b"1")
        assert read(storage, "x", 0, 1) == b"1"
        storage.close()
        storage.close()
        assert self.raw_read(storage, "x") == b"1"


class ReadingSuite(Suite):
    """The contract of `get`, `size`, `read_into`, `read_runs` and `reading`."""

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
