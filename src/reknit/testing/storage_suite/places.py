"""Places of files: names, folders, stores below, and places that must never be reached."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from reknit.errors import StorageError
from reknit.testing.storage_suite.probes import listed, read, read_runs, write
from reknit.testing.storage_suite.suite import Suite

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.storage.base import Storage

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
