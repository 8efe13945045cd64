"""One round after another: a save, a load, and the plain copies that they are compared with, in turns."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import reknit
from benchmarks.gpu.training import Link, Training, median, seconds
from benchmarks.storage.timing import MIB, memory
from reknit.types import devices

if TYPE_CHECKING:
    from collections.abc import Callable

EAGER, LAZY = reknit.SaveOptions(stage="eager"), reknit.SaveOptions(stage="lazy")
READ_NBYTES = 8 * MIB
READERS = min(4, os.cpu_count() or 1)


class Bench:
    """The times of all rounds, by name, and the memory beside the state."""

    def __init__(self, training: Training, folder: str) -> None:
        self.training, self._folder = training, folder
        self.times: dict[str, list[float]] = {}
        self.memory: dict[str, dict[str, float | None]] = {}
        self._num_saves = 0
        self._pending: Any = None
        before = _resident()
        reknit.prepare(folder, training.state, options=LAZY)
        for options in (EAGER, LAZY):
            training.steps(1)
            self._save(options)
            self._finish()
        self.memory["kept from the first save on"] = {"device": None, "host": (_resident() - before) / MIB}
        self.link = Link(training.tensors())  # later, since its memory does not belong to a save
        self.base = f"{folder}/base"
        reknit.save(self.base, training.state)
        reknit.load(self.base, training.state)
        self._buffers = [bytearray(READ_NBYTES) for _ in range(READERS)]
        self.has_streams = devices.has_streams(training.device)
        self.window = self._window()

    def _window(self) -> int:
        """Return a number of steps that take much longer than a copy of the state beside them."""
        step_s = seconds(lambda: self.training.steps(2)) / 2
        copy_s = seconds(self._down)
        return min(max(4, int(3 * copy_s / step_s)), 200)

    def round(self) -> None:
        """Measure everything once."""
        self._time("memcpy to host", self._down)
        for name, options in (("eager", EAGER), ("lazy", LAZY)):
            self.training.steps(1)  # else no step waits for a lazy save
            self._time(f"save {name}", partial(self._save, options))
            self.training.steps(1)
            self._finish()
        self._time("steps", lambda: self.training.steps(self.window))
        if self.has_streams:
            copy = partial(self.link.down_beside, self.training.device)
            self._time("steps beside memcpy", partial(self._steps_after, copy))
        for name, options in (("eager", EAGER), ("lazy", LAZY)):
            self._time(f"steps beside save {name}", partial(self._steps_after, partial(self._save, options)))
            self._finish()
        self._time("memcpy to device", self._up)
        self._time("read", self._read)
        self._time("load", self._load)

    def watch_memory(self) -> None:
        """Record the most memory that saves and a load take in addition to the state and the arena."""
        for name, options in (("save eager", EAGER), ("save lazy", LAZY)):
            self.training.steps(1)
            with _Watch(self, name):
                self._save(options)
                self._pending.staged()
            self._finish()
        with _Watch(self, "load"):
            self._load()

    def median(self, name: str) -> float | None:
        """Return the median of all rounds, None if it was not measured."""
        return median(self.times[name]) if name in self.times else None

    def ratio(self, name: str, *limits: str) -> float | None:
        """Return the median of each round's ratio to the slowest of the limits."""
        if not all(one in self.times for one in (name, *limits)):
            return None
        slowest = map(max, zip(*(self.times[limit] for limit in limits), strict=True))
        return median([ours / limit for ours, limit in zip(self.times[name], slowest, strict=True)])

    def _time(self, name: str, work: Callable[[], object]) -> None:
        self.training.synchronize()
        self.times.setdefault(name, []).append(seconds(work))

    def _steps_after(self, begin: Callable[[], object]) -> None:
        begin()
        self.training.steps(self.window)

    def _save(self, options: reknit.SaveOptions) -> None:
        self._num_saves += 1
        path = f"{self._folder}/step_{self._num_saves:08d}"
        self._pending = reknit.save(
            path, self.training.state, step=self._num_saves, wait=False, options=options
        )

    def _finish(self) -> None:
        """Wait until the save is committed, and remove it."""
        shutil.rmtree(self._pending.result().path)

    def _load(self) -> None:
        reknit.load(self.base, self.training.state)
        self.training.synchronize()

    def _down(self) -> None:
        self.link.down()
        self.training.synchronize()

    def _up(self) -> None:
        self.link.up()
        self.training.synchronize()

    def _read(self) -> None:
        """Read all data files from the page cache, with as many threads as a load."""
        pieces = [
            (path, start)
            for path in Path(self.base).rglob("*.safetensors")
            for start in range(0, path.stat().st_size, READ_NBYTES)
        ]
        assert pieces, f"no data files below {self.base}"

        def read(reader: int) -> None:
            for path, start in pieces[reader::READERS]:
                with path.open("rb", buffering=0) as file:
                    file.seek(start)
                    file.readinto(self._buffers[reader])

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(read, range(READERS)))


class _Watch:
    """Records the most memory, of the device and of this process, that was taken within a block."""

    def __init__(self, bench: Bench, name: str) -> None:
        self._bench, self._name = bench, name
        self._device = bench.training.device
        self._module: Any = torch.get_device_module(self._device)

    def __enter__(self) -> None:
        self._bench.training.synchronize()
        if hasattr(self._module, "reset_peak_memory_stats"):
            self._module.reset_peak_memory_stats(self._device)
        self._on_device, self._on_host = self._most(), _resident()

    def __exit__(self, *error: object) -> None:
        most = self._most()
        on_device = None if most is None or self._on_device is None else (most - self._on_device) / MIB
        self._bench.memory[self._name] = {"device": on_device, "host": (memory() - self._on_host) / MIB}

    def _most(self) -> int | None:
        """Return the most bytes of the device that were in use, None if torch does not count them."""
        most = getattr(self._module, "max_memory_allocated", None)
        return None if most is None else int(most(self._device))


def _resident() -> int:
    """Return the memory of this process, and reset the peak that `memory` returns."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory()
