"""The tests of `reknit.testing.certify`: the contract of a store, and saves to it that fail everywhere."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.errors import ReknitError
from reknit.format import paths
from reknit.plugins.store import RetryingStorage, RetryPolicy, open_storage, register
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.testing.storage_suite import StorageSuite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from reknit.plugins.store import Storage

_MOST = 100
"""Operations of a small save, at most."""


def below(url: str, name: str) -> str:
    """Return the URL of a folder below; the options at the end of a URL stay there."""
    head, mark, options = url.partition("?") if "://" in url else (url, "", "")
    return f"{head.rstrip('/')}/{name}{mark}{options}"


def clear(url: str) -> None:
    """Delete every file at a URL."""
    storage = open_storage(url)
    for entry in list(storage.list()):
        storage.delete(entry.path)
    storage.close()


class TestContract(StorageSuite):
    """The contract of `reknit.storage.base.Storage` for every store."""

    @pytest.fixture
    def storage(self, scratch_url: str) -> Iterator[Storage]:
        """Return the store under test, empty, and empty it afterwards."""
        storage = open_storage(scratch_url)
        self._past = open_storage(scratch_url)
        yield storage
        clear(scratch_url)

    def make(self, tmp_path: Path) -> Storage:
        """Return nothing: `storage` does."""
        raise AssertionError

    def raw_read(self, storage: Storage, path: str) -> bytes:
        """Read through another store at the same place."""
        return self._past.get(path, limit=1 << 30)

    def raw_write(self, storage: Storage, path: str, data: bytes) -> None:
        """Write through another store at the same place."""
        self._past.put(path, data, if_absent=False)


class TestFaults:
    """Saves and loads with a fault at each operation: afterwards the new or the old checkpoint is whole."""

    @pytest.mark.parametrize("kind", ["error", "lost"])
    def test_a_save_that_fails_at_any_operation_leaves_all_or_nothing(
        self, kind: Any, scratch_url: str
    ) -> None:
        """Fail once at each operation of a save; a load afterwards gives the old state or the new one."""
        place = _Location(scratch_url)
        place.plan = ()
        reknit.save(place.url, _state(1))
        for number in range(1, _MOST):
            place.plan = (Fault(kind, number),)
            with suppress(ReknitError):
                reknit.save(place.url, _state(2), overwrite=True)
            last = not place.opened[-1].fired
            place.plan = ()
            assert _loaded(place.url) in (1, 2)
            if last:
                break
            reknit.save(place.url, _state(1), overwrite=True)
            place.forget()
        assert _loaded(place.url) == 2
        place.clear()

    def test_a_store_that_comes_and_goes_is_outlasted(self, scratch_url: str) -> None:
        """Save and load while every third operation finds the store unavailable."""
        place = _Location(scratch_url)
        place.retries = True
        place.plan = tuple(Fault("away", number) for number in range(1, 1000, 3))
        reknit.save(place.url, _state(1))
        assert _loaded(place.url) == 1
        place.clear()


class _Location:
    """A place in the store that fails as planned."""

    def __init__(self, scratch_url: str) -> None:
        scheme = f"certified{uuid.uuid4().hex}"
        self.url = f"{scheme}://place"
        self.plan: tuple[Fault, ...] = ()
        self.retries = False
        self.opened: list[FaultyStorage] = []
        self._inner = below(scratch_url, "faults")
        register(scheme, self._open)

    def _open(self, _: str, durability: reknit.options.Durability) -> Storage:
        self.opened.append(FaultyStorage(open_storage(self._inner, durability=durability), plan=self.plan))
        if not self.retries:
            return self.opened[-1]
        return RetryingStorage(self.opened[-1], RetryPolicy(first_s=0.001, longest_s=0.01))

    def forget(self) -> None:
        """Delete the notes: that of a removal which failed counts for minutes, and each save reads it."""
        clear(below(self._inner, paths.NOTES_FOLDER))

    def clear(self) -> None:
        clear(self._inner)


def _state(value: int) -> dict[str, Any]:
    return {"model": {"w": np.full(1000, value)}, "extra": {"value": value}}


def _loaded(url: str) -> int:
    target = _state(0)
    reknit.load(url, target)
    assert (target["model"]["w"] == target["extra"]["value"]).all()
    return int(target["extra"]["value"])
