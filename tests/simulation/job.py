"""The work of the ranks of a simulated job: real saves of a few small tensors with predictable values."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from unittest.mock import patch

import numpy as np

from reknit.engine.memory import write
from reknit.engine.stored import marker, removals
from reknit.errors import ReknitError
from reknit.format import paths
from reknit.options import SaveOptions
from reknit.types.box import Box
from reknit.types.shard import Blob, Holdings, Shard, TensorSpec
from tests.engine.held import save_held, task_at
from tests.simulation.process import sleep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from random import Random

    from numpy.typing import NDArray

    from reknit.engine.memory.workers import Arena
    from reknit.storage.base import Storage
    from tests.simulation.group import SimGroup

ITEM = "model"
ROW = 4
"""Elements of a rank's own tensor, and of its part of the tensor that all ranks share."""
NEIGHBOURS = 8
"""So many ranks hold copies of the same tensor."""


@dataclass(frozen=True, slots=True)
class Save:
    """A save of every rank of the job: into a folder, over an older save or only into an empty one."""

    folder: str = "checkpoint"
    overwrite: bool = True


class Ending(NamedTuple):
    """How a save ended for a rank: its write id, or the error."""

    run: int
    rank: int
    number: int
    folder: str
    ended_s: float
    write_id: str | None
    error: BaseException | None

    @property
    def outcome(self) -> str:
        """``"ok"``, or the name of the error's type."""
        return "ok" if self.error is None else type(self.error).__name__


def stamp(run: int, number: int) -> float:
    """Return the value that every element of a save begins from."""
    return 1e6 * (run + 1) + 1e4 * number


def tensors(ranks: int, run: int, number: int) -> dict[str, NDArray[np.float64]]:
    """Return every tensor of a save, whole, by name."""
    base = stamp(run, number)
    found = {f"own.{rank}": _own(base, rank) for rank in range(ranks)}
    found |= {f"near.{place}": base + np.arange(6.0) + place for place in range(-(-ranks // NEIGHBOURS))}
    found["all"] = np.concatenate([_own(base, rank) for rank in range(ranks)])
    found["guessed"] = base + np.arange(3.0)
    return found


def holdings(ranks: int, rank: int, run: int, number: int) -> Holdings:
    """Return the holdings of a rank: its own tensor, a part, a copy that others have too, and a guess."""
    base, place = stamp(run, number), rank // NEIGHBOURS
    near = tuple(range(place * NEIGHBOURS, min(ranks, (place + 1) * NEIGHBOURS)))
    shards = (
        _whole(f"own.{rank}", _own(base, rank), (rank,)),
        _whole(f"near.{place}", base + np.arange(6.0) + place, near),
        Shard(
            ITEM,
            "all",
            TensorSpec((ranks * ROW,), "float64"),
            Box((rank * ROW,), (ROW,)),
            (rank,),
            _own(base, rank),
        ),
        _whole("guessed", base + np.arange(3.0), None),
    )
    blobs = (Blob("extra", "step", number), Blob("extra", "mine", [run, rank], {"rank": rank}))
    return Holdings((ITEM, "extra"), shards, blobs)


def _own(base: float, rank: int) -> NDArray[np.float64]:
    return base + rank + np.arange(ROW) / ROW


def _whole(fqn: str, data: NDArray[np.float64], replicas: tuple[int, ...] | None) -> Shard:
    return Shard(ITEM, fqn, TensorSpec(data.shape, "float64"), Box.whole(data.shape), replicas, data)


@dataclass(frozen=True, slots=True)
class Worker:
    """One rank's part in a job."""

    group: SimGroup
    storage: Storage
    saves: tuple[Save, ...]
    timeout_s: float
    random: Random
    ended: Callable[[Ending], None]

    def work(self) -> None:
        """Make all saves, with any outcome of each; a Ctrl-C between them ends the process."""
        process = self.group.process
        try:
            for number, wanted in enumerate(self.saves):
                process.sleep(self.random.random() * 0.02)
                self._attempt(number, wanted)
        except KeyboardInterrupt:
            self.group.close()
        process.here("end")

    def _attempt(self, number: int, wanted: Save) -> None:
        process, write_id, error = self.group.process, None, None
        try:
            write_id = self._save(number, wanted)
        except (ReknitError, KeyboardInterrupt) as caught:  # any other is a bug, and ends the simulation
            error = caught
        process.schedule.note(process.name, f"SAVE {number}: {type(error).__name__ if error else 'ok'}")
        moment = process.schedule.moment
        self.ended(Ending(process.run, process.rank, number, wanted.folder, moment, write_id, error))

    def _save(self, number: int, wanted: Save) -> str:
        group = self.group
        task = task_at(
            self.storage.sub(wanted.folder),
            group,
            SaveOptions(durability="process", threads=1, timeout_s=self.timeout_s, progress=False),
            step=number,
            overwrite=wanted.overwrite,
            metadata={"ranks": group.size, "run": group.run, "save": number},
        )
        return save_held(lambda: holdings(group.size, group.rank, group.run, number), task).write_id


class _Piece:
    """Memory for one small piece, in place of an arena, whose pages would be too many for so many ranks."""

    def view(self, nbytes: int) -> NDArray[np.uint8]:
        """Return so many bytes."""
        return np.empty(nbytes, np.uint8)


def _in_turn(
    jobs: Iterable[Any],
    work: Callable[[Any, Arena], None],
    *,
    meanwhile: Callable[[], None] | None = None,
    **_: object,
) -> None:
    """Do all jobs in the caller's thread, in place of `engine.memory.workers.run_jobs`."""
    for job in jobs:
        work(job, cast("Arena", _Piece()))
    if meanwhile is not None:
        meanwhile()


@contextmanager
def one_thread(random: Random) -> Iterator[None]:
    """Let saves start no threads, wait in virtual time, and draw from `random`, as long as the block takes.

    This holds for all saves of this process, so let no other one run meanwhile.
    """

    notes = count()

    def new_id() -> str:
        return f"{random.getrandbits(128):032x}"

    with (
        patch.object(write, "run_jobs", _in_turn),
        patch.object(paths, "new_write_id", new_id),
        patch.object(marker, "sleep", sleep),
        patch.object(marker, "dice", random),
        patch.object(removals, "new_identity", lambda: f"{next(notes):024x}"),
    ):
        yield
