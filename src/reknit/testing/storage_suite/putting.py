"""Small files that are there in one step."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from reknit.errors import StorageNotFoundError
from reknit.monitor.phase import CLOCK
from reknit.storage.base import HasDates
from reknit.testing.storage_suite.probes import listed, read, seen_meanwhile
from reknit.testing.storage_suite.suite import Suite

if TYPE_CHECKING:
    from reknit.storage.base import Storage


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
