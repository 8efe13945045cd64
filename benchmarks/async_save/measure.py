"""One rank's side of every measurement: all ranks begin together, and the slowest counts."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.ranks import phases
from benchmarks.rivals.waiting import raw_write

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.ranks import Bench
    from benchmarks.rivals.background import Contender

PAGE = 4096


class Training:
    """Stands for a training step: a matrix product on one thread."""

    def __init__(self, steps: int) -> None:
        import torch

        self._steps = steps
        self._left = torch.randn(512, 512)
        self._out = torch.empty(512, 512)

    def step(self) -> None:
        import torch

        torch.mm(self._left, self._left, out=self._out)

    def alone(self, bench: Bench) -> float:
        """Return the seconds per step of a fixed number of steps, with nothing else under way.

        The best of three: a busy machine must not make a save look cheap.
        """

        def steps() -> None:
            for _ in range(self._steps):
                self.step()

        return bench.best(3, steps, self.step) / self._steps

    def until(self, done: Callable[[], bool]) -> int:
        """Return the number of steps made before `done`."""
        steps = 0
        while not done():
            self.step()
            steps += 1
        return steps


@dataclass(frozen=True)
class Effort:
    """The number of saves of one contender.

    `saves` in a row with an idle trainer, then `computing` with one that computes.  No save begins after
    `budget_s`, but there are always two of the first kind.
    """

    saves: int
    computing: int
    budget_s: float
    training_steps: int


def measure(
    bench: Bench, contender: Contender, effort: Effort, copy: Callable[[], float] | None = None
) -> dict[str, Any]:
    """Return the times of a contender's consecutive saves.

    `copy` times a plain copy of the owned bytes.  It runs between the saves, after the same pause: memory
    that was idle, or busy with a disk, is slower than memory in a hot loop.
    """
    bench.settle()
    begin = time.perf_counter()

    def spent() -> bool:
        return bench.slowest(time.perf_counter() - begin)[0] > effort.budget_s

    saves, copies = [], []
    last: dict[str, float] = {}
    for number in range(effort.saves):
        if number >= 2 and spent():
            break
        bench.pause()
        times, last = idle_save(bench, contender, number)
        saves.append(times)
        if copy is not None:
            bench.pause()
            copies.append(copy())
    result: dict[str, Any] = {"num_saves": len(saves)}
    if copies:
        result["memcpy_between_saves_s"] = round(statistics.median(copies), 4)
    if last:
        result["last_save_phases_rank0_s"] = last
    for name, times in zip(("blocking", "end_to_end"), zip(*saves, strict=True), strict=True):
        result[f"{name}_first_s"] = round(times[0], 4)
        result[f"{name}_s"] = round(statistics.median(times[1:]), 4)
        result[f"{name}_later_s"] = [round(t, 4) for t in times[1:]]
    training = Training(effort.training_steps)
    rows: list[dict[str, float]] = []
    for number in range(len(saves), len(saves) + effort.computing):
        if rows and spent():
            break
        rows.append(_computing_save(bench, contender, training, number))
    # A save that ends before the trainer makes a step does not run in the background.
    if rows and all(row["steps_per_s"] for row in rows):
        result["computing"] = {key: round(statistics.median(r[key] for r in rows), 4) for key in rows[0]}
    bench.say(_line(contender.name, result))
    return result


def idle_save(
    bench: Bench, contender: Contender, number: int
) -> tuple[tuple[float, float], dict[str, float]]:
    """Return the seconds until the state may be changed and until the checkpoint exists, and of each phase
    that the contender reports.
    """
    path = f"{bench.folder}/{number}"
    bench.dist.barrier()
    begin = time.perf_counter()
    under_way = contender.start(path)
    under_way.staged()
    blocking = time.perf_counter() - begin
    report = under_way.result()
    whole, blocked = bench.slowest(time.perf_counter() - begin, blocking)
    bench.drop(path)
    return (blocked, whole), phases(report)


def _computing_save(bench: Bench, contender: Contender, training: Training, number: int) -> dict[str, float]:
    """Return the costs of a save for a trainer that computes.

    `lost_s` is the whole delay of the trainer: the blocking time, and the additional time of the steps
    during the save.
    """
    path = f"{bench.folder}/{number}"
    step_s = training.alone(bench)
    bench.dist.barrier()
    begin = time.perf_counter()
    under_way = contender.start(path)
    under_way.staged()
    staged = time.perf_counter()
    steps = training.until(under_way.done)
    end = time.perf_counter()
    under_way.result()
    total, lost = bench.slowest(end - begin, end - begin - steps * step_s)
    rate, alone = bench.mean(steps / (end - staged), 1 / step_s)
    bench.drop(path)
    return {
        "end_to_end_s": total,
        "steps_per_s": rate,
        "steps_per_s_alone": alone,
        "slowdown": 1 - rate / alone,
        "lost_s": lost,
    }


def _line(name: str, result: dict[str, Any]) -> str:
    text = f"{name:44s} blocking {result['blocking_first_s']:6.3f} then {result['blocking_s']:6.3f} s"
    text += f"   end to end {result['end_to_end_first_s']:6.2f} then {result['end_to_end_s']:6.2f} s"
    if "computing" in result:
        computing = result["computing"]
        text += f"   slowdown {computing['slowdown']:6.1%}   lost {computing['lost_s']:5.2f} s"
    return text


def baselines(bench: Bench, tensors: list[Any], repeat: int) -> dict[str, Any]:
    """Return the times of plain copies and writes of the owned bytes, by all ranks at once."""
    nbytes = sum(t.nbytes for t in tensors)
    copied = memcpy(bench, tensors, 2 * repeat)
    shared = mmap.mmap(-1, nbytes)
    into_shared = memcpy(bench, tensors, 2 * repeat, np.frombuffer(shared, np.uint8))
    bench.say(f"memcpy {copied:.3f} s, into shared memory {into_shared:.3f} s")
    data = memoryview(shared)[: nbytes - nbytes % PAGE]
    writes: dict[str, float | None] = {}
    for direct in (True, False):
        for threads in (1, 2, 4):
            name = f"{'O_DIRECT' if direct else 'buffered'}, {threads} thread" + "s" * (threads > 1)
            writes[name] = _raw_write(bench, data, direct, threads, max(2, repeat // 2))
            bench.say(f"raw write, {name}: {writes[name]} s")
    bench.drop(f"{bench.folder}/raw")
    return {
        "memcpy_s": round(copied, 4),
        "memcpy_into_shared_memory_s": round(into_shared, 4),
        "raw_write_s": min(seconds for seconds in writes.values() if seconds is not None),
        "raw_writes_s": writes,
    }


def memcpy(bench: Bench, tensors: list[Any], repeat: int = 8, target: Any = None) -> float:
    """Return the best time to copy all tensors, one after another, to memory that is already mapped."""
    return bench.best(repeat, copier(tensors, target), lambda: None)


def copier(tensors: list[Any], target: Any = None) -> Callable[[], None]:
    """Return a function that copies all tensors, one after another, to memory that is already mapped."""
    import torch

    arrays = [t.detach().contiguous().view(-1).view(torch.uint8).numpy() for t in tensors]
    ends = np.cumsum([a.nbytes for a in arrays])
    if target is None:
        target = np.empty(ends[-1], np.uint8)
    parts = [target[end - a.nbytes : end] for a, end in zip(arrays, ends, strict=True)]

    def copy() -> None:
        for part, array in zip(parts, arrays, strict=True):
            np.copyto(part, array)

    copy()  # maps every page of the target
    return copy


def _raw_write(bench: Bench, data: memoryview, direct: bool, threads: int, repeat: int) -> float | None:
    """Return the best time to write and sync one new file per rank, None if O_DIRECT is not supported."""
    path = f"{bench.folder}/raw/{bench.rank}"
    os.makedirs(os.path.dirname(path), exist_ok=True)

    def clean() -> None:
        if os.path.exists(path):
            os.unlink(path)
        bench.settle()

    write = partial(raw_write, path, data, direct=direct, threads=threads)
    try:
        raw_write(path, data[:PAGE], direct=direct)
    except OSError:  # the file system has no O_DIRECT
        return None
    return round(bench.best(repeat, write, clean), 4)
