"""The operations of saves and loads of many replicas on an object store; ranks are threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import reknit
from reknit.storage.registry import open_storage
from reknit.testing.world import run_ranks

if TYPE_CHECKING:
    from reknit.comm.group import Group

TIMEOUT_S = 200.0


class Operations:
    """A sink that counts the operations of all ranks, and the bytes of the reads."""

    def __init__(self) -> None:
        self.number = self.read_nbytes = 0
        self._lock = threading.Lock()

    def __call__(self, record: Any) -> None:
        operation = getattr(record, "operation", None)
        if operation is None:
            return
        with self._lock:
            self.number += 1
            if operation.startswith(("read", "get")):
                self.read_nbytes += record.nbytes


class Counted(NamedTuple):
    """The operations, the bytes that were read, and the bytes that the busiest rank wrote."""

    save: int
    load: int
    read_nbytes: int
    most_written_nbytes: int


def count(url: str, replicas: int, *, mib: int, arrays: int, share: str) -> Counted:
    """Save and load one state that all replicas have alike."""
    random = np.random.default_rng(0)
    shape = ((mib << 20) // arrays,)
    state = {f"w{number:03d}": random.integers(0, 256, shape, np.uint8) for number in range(arrays)}
    saving, loading = Operations(), Operations()
    written = run_ranks(replicas, lambda group: _saved(url, state, group, saving), timeout_s=TIMEOUT_S)
    reknit.sinks.flush()
    run_ranks(replicas, lambda group: _loaded(url, state, group, loading, share), timeout_s=TIMEOUT_S)
    reknit.sinks.flush()
    store = open_storage(url)
    for file in list(store.list()):
        store.delete(file.path)
    return Counted(saving.number, loading.number, loading.read_nbytes, max(written))


def _saved(url: str, state: dict[str, Any], group: Group, sink: Operations) -> int:
    options = reknit.SaveOptions(events=sink, timeout_s=TIMEOUT_S)
    return reknit.save(url, {"model": state}, group=group, options=options).result().nbytes


def _loaded(url: str, state: dict[str, Any], group: Group, sink: Operations, share: Any) -> None:
    target = {name: np.zeros_like(array) for name, array in state.items()}
    options = reknit.LoadOptions(events=sink, share=share, timeout_s=TIMEOUT_S)
    reknit.load(url, {"model": target}, group=group, options=options)
    assert all(np.array_equal(state[name], target[name]) for name in state)
