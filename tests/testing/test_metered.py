"""A metered store counts its operations."""

from __future__ import annotations

import threading

import pytest

from reknit.errors import StorageNotFoundError
from reknit.testing.metered import Meter, MeteredStorage
from tests.storage.process_memory import ProcessMemory


def test_a_meter_tells_what_was_asked() -> None:
    ProcessMemory.clear("meter")
    storage = MeteredStorage(ProcessMemory("meter"))
    below = storage.sub("a")
    writer = below.create("file", 1000)
    writer.write(0, memoryview(bytes(600)))
    writer.write(600, memoryview(bytes(400)))
    writer.finish()
    storage.put("mark", b"", if_absent=True)
    storage.commit("done", b"whole", pending="mark", if_absent=True)
    assert storage.get("done", limit=10) == b"whole"
    storage.read_into("a/file", 10, [memoryview(bytearray(20)), memoryview(bytearray(3))])
    assert storage.folders() == ["a"]
    assert {entry.path for entry in storage.list()} == {"a/file", "done"}
    with pytest.raises(StorageNotFoundError):
        storage.size("absent")
    figures = storage.meter.figures
    assert {name: (f.count, f.failed, f.nbytes) for name, f in figures.items()} == {
        "create": (1, 0, 0),
        "write": (2, 0, 1000),
        "finish": (1, 0, 0),
        "put": (1, 0, 0),
        "commit": (1, 0, 5),
        "get": (1, 0, 5),
        "read": (1, 0, 23),
        "list": (2, 0, 0),
        "size": (1, 1, 0),
    }
    assert all(f.at_once == 1 and sum(f.latencies.values()) == f.count for f in figures.values())
    assert all(f.slowest_s <= f.seconds and f.under_way == 0 for f in figures.values())


def test_a_meter_knows_how_many_wait_at_once() -> None:
    meter, together = Meter(), threading.Barrier(3)

    def one() -> None:
        with meter.measuring("read", 1):
            together.wait(10)

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.figures["read"].at_once == 3
