"""Every store passes the shipped suite."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from reknit.storage.local.memory import MemoryStorage
from reknit.storage.local.store import LocalStorage
from reknit.storage.ranges import read_runs
from reknit.testing.faulty_storage import FaultyStorage
from reknit.testing.storage_suite import StorageSuite
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from reknit.options import Durability
    from reknit.storage.base import Storage


class LocalSuite(StorageSuite):
    durability: ClassVar[Durability] = "power"

    def make(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "not made yet" / "root", durability=self.durability)

    def raw_read(self, storage: Storage, path: str) -> bytes:
        return Path(storage.url, path).read_bytes()

    def raw_write(self, storage: Storage, path: str, data: bytes) -> None:
        target = Path(storage.url, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


class TestLocalWithPowerDurability(LocalSuite):
    pass


class TestLocalWithProcessDurability(LocalSuite):
    durability: ClassVar[Durability] = "process"


class TestLocalBelowAnotherStore(LocalSuite):
    durability: ClassVar[Durability] = "process"

    def make(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path, durability=self.durability).sub("steps/1")


class TestLocalThatPassesThroughAFaultyStorage(LocalSuite):
    durability: ClassVar[Durability] = "process"

    def make(self, tmp_path: Path) -> Storage:
        return FaultyStorage(LocalStorage(tmp_path, durability=self.durability))


class WithoutRuns(LocalStorage):
    """A store that reads runs as ranges."""

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        read_runs(self.read_into, path, starts, nbytes, buffer)


class TestLocalThatReadsRunsAsRanges(LocalSuite):
    durability: ClassVar[Durability] = "process"

    def make(self, tmp_path: Path) -> Storage:
        return WithoutRuns(tmp_path, durability=self.durability)


class TestMemory(LocalSuite):
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


class TestMemoryBelowAnotherStore(TestMemory):
    def make(self, tmp_path: Path) -> Storage:
        return super().make(tmp_path).sub("steps/1")


class ProcessMemorySuite(StorageSuite):
    """The raw access is a second store, opened at the root of the tree."""

    def make(self, tmp_path: Path) -> Storage:
        ProcessMemory.clear("contract")
        return ProcessMemory("contract")

    def _raw(self, storage: Storage) -> dict[str, memoryview]:
        return ProcessMemory.trees["contract"].files

    def _key(self, storage: Storage, path: str) -> str:
        return f"{storage.url}/{path}".removeprefix("process://contract/")

    def raw_read(self, storage: Storage, path: str) -> bytes:
        return bytes(self._raw(storage)[self._key(storage, path)])

    def raw_write(self, storage: Storage, path: str, data: bytes) -> None:
        self._raw(storage)[self._key(storage, path)] = memoryview(data)


class TestProcessMemory(ProcessMemorySuite):
    pass


class TestProcessMemoryBelowAnotherStore(ProcessMemorySuite):
    def make(self, tmp_path: Path) -> Storage:
        return super().make(tmp_path).sub("steps/1")
