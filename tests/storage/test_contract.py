"""Local stores pass the shipped suite; the other stores and the wrappers do so beside their own tests."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reknit.storage.local.memory import MemoryStorage
from reknit.storage.local.store import LocalStorage
from reknit.testing.storage_suite import StorageSuite
from tests.running.examples import is_night

if TYPE_CHECKING:
    from reknit.storage.base import Storage


class LocalSuite(StorageSuite):
    def make(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "not made yet" / "root", durability="power")

    def raw_read(self, storage: Storage, path: str) -> bytes:
        return Path(storage.url, path).read_bytes()

    def raw_write(self, storage: Storage, path: str, data: bytes) -> None:
        target = Path(storage.url, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


class OneRowOfAKind(StorageSuite):
    """The suite with fewer paths, names and runs, for a client whose code treats the others alike."""

    @pytest.mark.parametrize("path", ["", "a/../../up", "a\0b", "a/.x.tmp/b", "\ud800"])
    def test_a_path_that_leads_out_is_refused(self, storage: Storage, path: str) -> None:
        super().test_a_path_that_leads_out_is_refused(storage, path)

    @pytest.mark.parametrize("name", ["模型/层 1", "a.b/c,d[0:128]", "%2e%2e", "x" * 200])
    def test_names_of_any_language_work(self, storage: Storage, name: str) -> None:
        super().test_names_of_any_language_work(storage, name)

    @pytest.mark.parametrize("nbytes", [13, 5000])
    @pytest.mark.parametrize("largest_hole", [7, 100_000])
    def test_runs_come_one_after_another(self, storage: Storage, nbytes: int, largest_hole: int) -> None:
        super().test_runs_come_one_after_another(storage, nbytes, largest_hole)


class OnSlowServer(OneRowOfAKind):
    """By day without races that take seconds on a server; those of first commits and new files stay."""

    if not is_night():
        test_a_file_deleted_under_its_readers_is_whole_or_missing = None  # type: ignore[assignment]
        test_creating_in_a_folder_while_others_empty_it = None  # type: ignore[assignment]
        test_many_threads_read_many_files = None  # type: ignore[assignment]
        test_readers_see_the_old_content_or_the_new = None  # type: ignore[assignment]

        @pytest.mark.parametrize("if_absent", [True])
        def test_of_many_commits_at_once_one_content_stays_whole(
            self, storage: Storage, if_absent: bool
        ) -> None:
            super().test_of_many_commits_at_once_one_content_stays_whole(storage, if_absent)

        @pytest.mark.parametrize("if_absent", [True])
        def test_whoever_deletes_the_marker_is_too_late_or_prevents_the_commit(
            self, storage: Storage, if_absent: bool
        ) -> None:
            super().test_whoever_deletes_the_marker_is_too_late_or_prevents_the_commit(storage, if_absent)


class TestLocalWithPowerDurability(LocalSuite):
    pass


class TestMemory(OneRowOfAKind, LocalSuite):
    def make(self, tmp_path: Path) -> Storage:
        return MemoryStorage(f"contract-{uuid.uuid4().hex}")

    def raw_read(self, storage: Storage, path: str) -> bytes:
        return self.raw(storage, path).read_bytes()

    def raw_write(self, storage: Storage, path: str, data: bytes) -> None:
        target = self.raw(storage, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    def raw(self, storage: Storage, path: str) -> Path:
        assert isinstance(storage, MemoryStorage)
        return Path(storage.folder, path)
