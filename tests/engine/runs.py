"""Several runs of one job that save to one path, one operation of their stores at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from uuid import uuid4

import numpy as np

import reknit
from reknit.comm.group import SoloGroup
from reknit.errors import CheckpointNotFoundError, ReknitError
from reknit.format.manifest_file import decode_generation, decode_manifest
from reknit.format.paths import MANIFEST_PATH, parse_path
from reknit.storage.registry import register
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.types.shard import Holdings
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from reknit.comm.group import Group
    from reknit.storage.base import Storage

T = TypeVar("T")
MANY = 200
"""More operations than a save has."""
LIMIT_S = 60.0
SHAPE = (30, 4)

_given: dict[str, Storage] = {}
register("given", lambda url, durability: _given[url.removeprefix("given://")])


@contextmanager
def url_of(storage: Storage) -> Iterator[str]:
    """Return a URL by which a call of a user reaches this very store."""
    name = uuid4().hex
    _given[name] = storage
    try:
        yield f"given://{name}"
    finally:
        del _given[name]


def whole(value: int) -> np.ndarray[Any, Any]:
    return np.arange(120.0).reshape(SHAPE) + 1000 * value


def apart(call: Callable[..., T], *args: Any, **more: Any) -> T:
    """Call in a thread of its own: runs begin within others here, which calls of one thread may not do."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call, *args, **more).result()


def save_as(storage: Storage, value: int, generation: int, *, overwrite: bool = True) -> ReknitError | None:
    """Save a state that stands for `value`, as a run of this generation; return its error."""
    state = {"model": {"w": whole(value)}, "extra": {"epoch": value}}
    options = reknit.SaveOptions(threads=1, timeout_s=LIMIT_S)
    group = SoloGroup(generation)
    try:
        with url_of(storage) as url:
            apart(reknit.save, url, state, step=value, overwrite=overwrite, group=group, options=options)
    except ReknitError as error:
        return error
    return None


def loaded(storage: Storage, group: Group | None = None) -> int:
    """Load a checkpoint that `save_as` has saved, check that all of it has one value, and return that."""
    state: dict[str, Any] = {"model": {"w": np.zeros(SHAPE)}, "extra": {"epoch": None}}
    options = reknit.LoadOptions(threads=1, timeout_s=LIMIT_S)
    with url_of(storage) as url:
        step = apart(reknit.load, url, state, group=group, options=options).step
    assert step is not None
    assert state["extra"]["epoch"] == step
    assert (state["model"]["w"] == whole(step)).all()
    return step


def value_in(storage: Storage) -> int | None:
    """Return the value of the checkpoint here after a full check, None without a checkpoint."""
    try:
        with url_of(storage) as url:
            report = apart(reknit.verify, url, "data")
    except CheckpointNotFoundError:
        return None
    assert report.ok, report.problems
    return loaded(storage)


def strays(storage: Storage) -> set[str]:
    """Return the files here that no manifest lists."""
    there = {file.path for file in storage.list() if parse_path(file.path) is not None}
    if MANIFEST_PATH not in there:
        return there
    manifest = decode_manifest(storage.get(MANIFEST_PATH, limit=1 << 20))
    return there - {MANIFEST_PATH} - {file.path for file in manifest.files}


class Commit(NamedTuple):
    """A manifest that was committed."""

    generation: int | None
    value: int | None


class Annals(ProcessMemory):
    """A store in memory, empty at first, that records every commit."""

    def __init__(self, name: str) -> None:
        ProcessMemory.clear(name)
        super().__init__(name)
        self.commits: list[Commit] = []

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        with self._tree.lock:
            placed = super().commit(path, data, pending=pending, if_absent=if_absent)
            if placed:
                self.commits.append(Commit(decode_generation(data), decode_manifest(data).step))
        return placed


def pausing(storage: Storage, at: Iterable[int], pause: Callable[[], object], *more: Fault) -> FaultyStorage:
    """Return a store that calls `pause` before some of its operations, which are counted from 1."""
    return FaultyStorage(storage, plan=[*more, *(Fault("stall", k) for k in at)], stall=pause)


class Stage:
    """Runs that act in turns: each waits before every operation until the play lets it go on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._playing: set[int] = set()
        self._over = False
        self._threads: list[threading.Thread] = []

    def enter(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Start a run, which calls its argument before every operation."""
        number = len(self._threads)
        self._playing.add(number)

        def play() -> None:
            try:
                run(lambda: self._wait(number))
            finally:
                with self._changed:
                    self._playing.discard(number)
                    self._changed.notify_all()

        self._threads.append(threading.Thread(target=play, name=f"run {number}", daemon=True))
        self._threads[-1].start()

    def _wait(self, number: int) -> None:
        with self._changed:
            self._waiting.add(number)
            self._changed.notify_all()
            self._changed.wait_for(lambda: number not in self._waiting or self._over)

    def play(self, choose: Callable[[list[int]], int]) -> None:
        """Let the run that `choose` picks do one operation, again and again, until all have ended."""
        try:
            while True:
                with self._changed:
                    assert self._changed.wait_for(lambda: self._waiting == self._playing, LIMIT_S)
                    if not self._waiting:
                        break
                    self._waiting.discard(choose(sorted(self._waiting)))
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._over = True  # after an error, too, no run is left waiting
                self._changed.notify_all()
            for thread in self._threads:
                thread.join(LIMIT_S)


def nothing_held() -> Holdings:
    return Holdings((), (), ())
