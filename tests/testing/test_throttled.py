"""A throttled store has the speed of its pace."""

from __future__ import annotations

import threading

import pytest

from reknit.errors import UsageError
from reknit.events.phase import monotonic
from reknit.testing.metered import Pace, ThrottledStorage
from tests.storage.process_memory import ProcessMemory


def test_an_impossible_pace_is_refused() -> None:
    with pytest.raises(UsageError, match="positive"):
        Pace(bytes_per_s=-1)


def test_small_files_that_are_read_are_paid_for_afterwards() -> None:
    ProcessMemory.clear("pace")
    ProcessMemory("pace").put("f", bytes(50_000), if_absent=True)
    begin = monotonic()
    assert (
        len(ThrottledStorage(ProcessMemory("pace"), Pace(bytes_per_s=1e6)).get("f", limit=1 << 20)) == 50_000
    )
    assert monotonic() - begin >= 0.05


def test_bytes_and_requests_pass_at_their_pace() -> None:
    ProcessMemory.clear("pace")
    inner = ProcessMemory("pace")
    by_bytes = ThrottledStorage(inner, Pace(bytes_per_s=1e6))
    begin = monotonic()
    assert by_bytes.put("f", bytes(100_000), if_absent=True)
    assert monotonic() - begin >= 0.1
    by_requests = ThrottledStorage(inner, Pace(requests_per_s=100))
    begin = monotonic()
    threads = [threading.Thread(target=by_requests.size, args=("f",)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert monotonic() - begin >= 0.09
