"""Several runs of one job that save to one path, one operation of their stores at a time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.comm.group import SoloGroup
from reknit.engine.loading.load import load
from reknit.engine.loading.load_job import LoadJob
from reknit.engine.saving.save import save
from reknit.engine.saving.save_job import SaveJob
from reknit.engine.stored.verify import verify
from reknit.errors import CheckpointNotFoundError, ReknitError
from reknit.format.manifest_file import decode_generation, decode_manifest
from reknit.format.paths import MANIFEST_PATH, parse_path
from reknit.monitor.phase import Recorder
from reknit.options import LoadOptions, SaveOptions
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.types.box import Box
from reknit.types.shard import Blob, Holdings, Shard, TensorSpec
from reknit.types.wanted import Wanted
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reknit.storage.base import Storage

SPEC = TensorSpec((30, 4), "float64")
MANY = 200
"""More operations than a save has."""
LIMIT_S = 60.0


def whole(value: int) -> np.ndarray[Any, Any]:
    return np.arange(120.0).reshape(30, 4) + 1000 * value


def save_as(storage: Storage, value: int, generation: int, *, overwrite: bool = True) -> ReknitError | None:
    """Save a state that stands for `value`, as a run of this generation; return its error."""
    shard = Shard("model", "w", SPEC, Box.whole(SPEC.shape), (0,), whole(value))
    holdings = Holdings(("model", "extra"), (shard,), (Blob("extra", "epoch", value),))
    options = SaveOptions(threads=1, timeout_s=LIMIT_S)
    try:
        group, recorder = SoloGroup(generation), Recorder("save", 0)
        save(
            SaveJob(
                collect=lambda: holdings,
                group=group,
                storage=storage,
                options=options,
                recorder=recorder,
                step=value,
                overwrite=overwrite,
            )
        )
    except ReknitError as error:
        return error
    return None


def value_in(storage: Storage) -> int | None:
    """Return the value of the checkpoint here after a full check, None without a checkpoint."""
    try:
        report = verify(storage, "data", LoadOptions())
    except CheckpointNotFoundError:
        return None
    assert report.ok, report.problems
    target = np.zeros(SPEC.shape)
    shards = (Shard("model", "w", SPEC, Box.whole(SPEC.shape), None, target),)
    job = LoadJob(
        want=lambda _: Wanted(("model",), shards),
        group=SoloGroup(),
        storage=storage,
        items=("model",),
        options=LoadOptions(),
        recorder=Recorder("load"),
    )
    value = load(job).step
    assert value is not None
    assert (target == whole(value)).all()
    return value


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
