"""Random lives of runs in memory: tiers, keep policies, moves to a cold store, removals, damage and deaths.

`python -m tests.runs.schedules --seeds 2000 --first 0` runs the schedules of many seeds.  A run has one to
four ranks, which are threads.  One of them dies, or all, in the middle of any change to a store.  After that:

* the last saved step loads, unless it was lost since, and so does every other step that a store lists;
* the next run goes on from the newest step;
* each checkpoint in the cold store is named at its old path.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import numpy as np

import reknit
from reknit import Checkpointer, Cool, SaveOptions, Tier
from reknit.engine.memory import workers
from reknit.errors import CommError, ReknitError, StorageError
from reknit.policies import at, best, every, latest
from reknit.storage.registry import register
from reknit.storage.wrappers.forwarding import ForwardingStorage
from reknit.testing.world import run_ranks
from tests.runs import many
from tests.runs.pieces import state
from tests.runs.test_at_every_instant import Life
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.comm.group import Group
    from reknit.options import Durability
    from reknit.storage.base import Storage
    from reknit.storage.wrappers.forwarding import Half

SCHEME = "schedule"
_ENDLESS = 1 << 30
_LIVES = 5
_MOST_RANKS = 4
_LIMIT_S = 200.0
_KEEP = (None, latest(1), latest(2), every(3), best(1, "loss"), at(2), latest(1) | best(2, "loss"))
_OPTIONS = SaveOptions(durability="process", threads=1)


T = TypeVar("T")


class _Rank(Life):
    """The lifetime of one rank or of all ranks; a dead rank sends nothing to the others."""

    def __init__(self, left: int = _ENDLESS, group: Group | None = None) -> None:
        self.left, self._group = left, group

    def goes_on(self, name: str) -> bool:
        """Count an operation, and return whether the rank lives to do it."""
        if super().goes_on(name):
            return True
        if self._group is not None:
            self._group.close()
        return False


class _Living(threading.local):
    """The rank of each thread; threads that a rank has started belong to rank 0."""

    root = _Rank()
    _mine: _Rank | None = None

    @property
    def mine(self) -> _Rank:
        """The life of this thread's rank."""
        return self._mine or self.root

    def begin(self, rank: int, life: _Rank) -> None:
        """Make this thread a rank from now on."""
        self._mine = life
        if rank == 0:
            type(self).root = life

    def end(self) -> None:
        """End the danger for all ranks."""
        type(self).root = _Rank()


living = _Living()


class _Named(ForwardingStorage):
    """A store in memory that is opened by its URL, by a rank that dies."""

    def __init__(self, inner: Storage, life: _Rank) -> None:
        super().__init__(inner)
        self._life = life

    @property
    def url(self) -> str:
        """The URL by which it is opened."""
        return self.inner.url.replace("process://schedules", f"{SCHEME}:/")

    def around(self, inner: Storage, path: str) -> _Named:
        """Return a store below."""
        return _Named(inner, self._life)

    def intercept(self, name: str, path: str, nbytes: int, whole: Callable[[], T], half: Half = None) -> T:
        """Do the operation as long as the process lives."""
        if self._life.goes_on(name):
            return whole()
        raise StorageError("dead", path=path)


def _open(url: str, durability: Durability) -> _Named:
    return _Named(ProcessMemory("schedules").sub(url.removeprefix(f"{SCHEME}://")), living.mine)


class Schedule:
    """The schedule of one run."""

    def __init__(self, seed: int) -> None:
        register(SCHEME, _open)
        ProcessMemory.clear("schedules")
        self._rng = rng = random.Random(seed)
        self._ranks = 1 + (seed + 1) % _MOST_RANKS
        paces = [1, *sorted(rng.sample((1, 2, 3, 5), rng.randrange(3)))]
        self.urls = [f"{SCHEME}://tier{number}" for number in range(len(paces))]
        self._cooled = rng.randrange(len(paces)) if rng.random() < 0.7 else None
        self._tiers = [
            Tier(url, every=pace, keep=rng.choice(_KEEP), cool=self._cool(number))
            for number, (url, pace) in enumerate(zip(self.urls, paces, strict=True))
        ]
        self.done: Counter[str] = Counter()

    def _cool(self, tier: int) -> Cool | None:
        after = self._rng.choice((latest(1), latest(2), every(2)))
        return Cool(f"{SCHEME}://cold", after=after) if tier == self._cooled else None

    def live(self) -> None:
        """Run one job after another, and check the files after each; workers start no threads."""
        with mock.patch.object(workers, "start", lambda worker: worker.run()):
            self._live()

    def _live(self) -> None:
        last: int | None = None
        for _ in range(_LIVES):
            saved = self._one_life()
            there = self._whole()
            last = last if saved is None else saved
            assert last is None or last in set().union(*there), f"step {last} is lost; there are {there}"
            there = self._fate(there)
            last = max(set().union(*there), default=None)
            self._resume(last, there)
            self._look_around()
            there = self._whole()
            assert last is None or last in set().union(*there), f"step {last} went in a quiet life"

    def _resume(self, last: int | None, there: list[set[int]]) -> None:
        """Resume all ranks from the last step, and end them in order."""

        def work(group: Group) -> None:
            held = _state(group.rank)
            with self._run(group) as run:
                assert run.resume(held) == (0 if last is None else last + 1), f"there are {there}"
            expected = _state(group.rank, 0 if last is None else last)["model"]
            assert all(np.array_equal(held["model"][name], each) for name, each in expected.items())

        run_ranks(self._ranks, work, timeout_s=_LIMIT_S)

    def _run(self, group: Group) -> Checkpointer:
        return Checkpointer(tiers=self._tiers, wait=True, options=_OPTIONS, group=group)

    def _one_life(self) -> int | None:
        """Resume, train and act like users until a rank dies or the run ends; return the last step saved."""
        rng = self._rng
        left, victim = rng.randrange(2, 160), rng.randrange(-1, self._ranks)
        steps = [(rng.random(), rng.randrange(1, 3)) for _ in range(rng.randrange(1, 8))]
        of_all = _Rank(left)
        saved: list[int] = []

        def work(group: Group) -> bool:
            one = _Rank(left if victim == group.rank else _ENDLESS, group)
            living.begin(group.rank, of_all if victim < 0 else one)
            try:
                with self._run(group) as run:
                    step = run.resume(_state(group.rank))
                    for loss, more in steps:
                        if run.save(step, _state(group.rank, step), {"loss": loss}) is not None:
                            saved.append(step)
                        if group.rank == 0:
                            self._meddle(step)
                        step += more
            except (StorageError, CommError) as error:
                if isinstance(error, StorageError) and "dead" not in error.message:
                    raise
                return True
            return False

        try:
            died = run_ranks(self._ranks, work, timeout_s=_LIMIT_S)
        finally:
            living.end()
            self._expire()
        self.done["saves"] += len(set(saved))
        self.done["deaths of all" if victim < 0 else "deaths of one"] += any(died)
        return max(saved, default=None)

    def _meddle(self, newest: int) -> None:
        """Remove, pin or score a step that is not the newest, as another job might."""
        rng = self._rng
        older = [step for step in reknit.steps(rng.choice(self.urls)) if step.step not in (None, newest)]
        if not older or rng.random() < 0.5:
            return
        path, what = (
            rng.choice(older).path,
            rng.choice((reknit.delete, reknit.pin, reknit.unpin, reknit.note)),
        )
        self.done[what.__name__] += 1
        try:
            what(path, {"loss": rng.random()}) if what is reknit.note else what(path)  # type: ignore[call-arg]
        except ReknitError as error:  # it is held, or was removed meanwhile
            if "dead" in error.message:
                raise

    def _fate(self, there: list[set[int]]) -> list[set[int]]:
        """Damage the newest step of the first tier, or lose the tier, in some runs with other copies."""
        fate = self._rng.random()
        if fate > 0.3 or not there[0] or not any(there[1:]):
            return there
        root = ProcessMemory("schedules").sub("tier0")
        gone = {max(there[0])} if fate < 0.15 else there[0]
        for path in [each.path for each in root.list()]:
            if fate >= 0.15:
                root.delete(path)
            elif path.startswith(f"step_{max(gone):08d}/") and path.endswith(".safetensors"):
                data = bytearray(root.get(path, limit=_ENDLESS))
                data[-1] ^= 1
                root.put(path, bytes(data), if_absent=False)
        self.done["damaged" if fate < 0.15 else "lost tiers"] += 1
        return self._whole()

    def _whole(self) -> list[set[int]]:
        """Return the steps of each tier that are as they were saved."""
        return [
            {step.step for step in reknit.steps(url) if step.step is not None and _is_whole(step.path)}
            if _is_there(url)
            else set()
            for url in self.urls
        ]

    def _look_around(self) -> None:
        """Check that each checkpoint in the cold store loads by its old path, and none lies there unnamed."""
        moved = [step for url in self.urls for step in _steps(url) if step.moved_to is not None]
        self.done["moved"] += len(moved)
        assert all(_is_whole(step.path) for step in moved), f"of {moved} one is lost"
        if self._cooled is None or self.done["lost tiers"]:  # which takes the notes about copies with it
            return
        hot = ProcessMemory("schedules").sub(f"tier{self._cooled}")
        known = {path.path.partition("/")[0] for path in hot.list() if "/.notes/copy." in path.path}
        for path in [each.path for each in ProcessMemory("schedules").sub("cold").list()]:
            assert path.partition("/")[0] in known, f"no note of a copy names {path}"

    def _expire(self) -> None:
        """End the leases of a process that died."""
        tree = ProcessMemory("schedules")
        for path in [each.path for each in tree.list()]:
            if "/.notes/lease." in path or "/.notes/removal." in path:
                tree.delete(path)


def _state(rank: int, step: int = 0) -> dict[str, Any]:
    """Return the state of a rank after a step: the common part, and its own."""
    held = state(float(step))
    held["model"][f"own{rank}"] = np.full(10, float(step + rank))
    return held


def _steps(url: str) -> list[Any]:
    return reknit.steps(url) if _is_there(url) else []


def _is_there(url: str) -> bool:
    return bool(_open(url, "process").folders())


def _is_whole(path: str) -> bool:
    with suppress(ReknitError):
        return reknit.verify(path, "data").ok
    return False


def live(seed: int, done: Counter[str]) -> None:
    """Run the schedule of a seed."""
    schedule = Schedule(seed)
    try:
        schedule.live()
    finally:
        done.update(schedule.done)


if __name__ == "__main__":
    sys.exit(many.main(__doc__, live))
