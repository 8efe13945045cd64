"""Random lives of runs in memory, against a plain reference: which save did each save come from?

`python -m tests.runs.schedules --seeds 2000 --first 0` runs the schedules of many seeds.  A run has one to
four ranks, which are threads, and one to three tiers, with policies and moves to a cold store.  It goes back
to earlier steps.  Others remove, pin, score, copy, rename and damage steps, stores are full, and clocks jump.
One rank dies, or all, in the middle of any change to a store.  After that:

* the last save loads, unless it was lost since;
* the next run, `latest` of it and `reknit.latest` find the newest whole step that the last save came from;
* copies that somebody has made stay, also renamed steps, and pinned steps are as they were;
* each checkpoint in the cold store is named at its old path.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import numpy as np

import reknit
from reknit import Checkpointer, Cool, SaveOptions, Tier
from reknit.engine.memory import workers
from reknit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommError,
    FormatError,
    ReknitError,
    StorageError,
    StorageFullError,
    UndecidedError,
)
from reknit.policies import at, best, every, latest
from reknit.runs.agreement import ask_root
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
    from reknit.types.manifest import SavedStep

SCHEME = "schedule"
_ENDLESS = 1 << 30
_OTHER_NAMES = ("best", "step_00000998", "step_00000999")
"""The names that others give to steps that they copy or rename."""
_BACK = 0.2
"""Share of steps before which a run goes back."""
_LIVES = 5
_MOST_RANKS = 4
_LIMIT_S = 200.0
_KEEP = (None, latest(1), latest(2), every(3), best(1, "loss"), at(2), latest(1) | best(2, "loss"))
_OPTIONS = SaveOptions(durability="process", threads=1)


_FULL = 0.1
"""Share of lives in which a store is full for some changes."""

T = TypeVar("T")


class _Rank(Life):
    """The lifetime of one rank or of all ranks; a dead rank sends nothing to the others."""

    def __init__(self, left: int = _ENDLESS, group: Group | None = None, full: range = range(0)) -> None:
        self.left, self._group, self._full = left, group, full

    def is_full(self, name: str) -> bool:
        """Return whether the store takes no more bytes now."""
        return name in ("create", "write", "put", "commit") and self.left in self._full

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
        if not self._life.goes_on(name):
            raise StorageError("dead", path=path)
        if self._life.is_full(name):
            raise StorageFullError("full", path=path)
        return whole()


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
        self._saves: list[tuple[int, int | None]] = []
        """The reference: step and origin of each save; its number is the value of its tensors."""
        self._head: int | None = None
        self._copies: set[str] = set()

    def _origins(self, save: int | None) -> set[int]:
        """Return a save and all that it came from."""
        found = set()
        while save is not None:
            found.add(save)
            save = self._saves[save][1]
        return found

    def _cool(self, tier: int) -> Cool | None:
        after = self._rng.choice((latest(1), latest(2), every(2)))
        return Cool(f"{SCHEME}://cold", after=after) if tier == self._cooled else None

    def live(self) -> None:
        """Run one job after another, and check the files after each; workers start no threads."""
        with mock.patch.object(workers, "start_worker", lambda worker: worker.run()):
            self._live()

    def _live(self) -> None:
        for _ in range(_LIVES):
            self._one_life()
            there = self._whole()
            assert self._head is None or self._head in set().union(*there), f"save {self._head} is lost"
            there = self._fate(there)
            expected = self._newest(there)
            self._head = self._resume(expected, there)
            self._look_around()
            there = self._whole()
            kept = self._head is None or self._head in set().union(*there)
            assert kept, f"save {self._head} went in a quiet life"

    def _newest(self, there: list[set[int]]) -> int | None:
        """Return the newest save that is whole and that the last one came from."""
        return max(self._origins(self._head) & set().union(*there), default=None, key=self._step)

    def _has_branch(self, there: list[set[int]]) -> bool:
        """Return whether a whole save is left of those since the run went back last, or was lost."""
        save, whole = self._head, set().union(*there)
        while save is not None and save not in whole:
            save = save - 1 if self._saves[save][1] == save - 1 else None
        return save is not None or not whole

    def _step(self, save: int) -> int:
        return self._saves[save][0]

    def _resume(self, save: int | None, there: list[set[int]]) -> int | None:
        """Resume all ranks from a save, end them in order, and return the save.

        If no save is left of the last branch, it may be a whole save of any other.
        """
        found: list[int | None] = []

        def work(group: Group) -> None:
            held = _state(group.rank)
            with self._run(group) as run:
                step = run.resume(held)
            value = int(held["model"]["w"][0]) if step else None
            found.append(value)
            assert step == (0 if value is None else self._step(value) + 1)
            expected = _state(group.rank, value or 0)["model"]
            assert all(np.array_equal(held["model"][name], each) for name, each in expected.items())

        run_ranks(self._ranks, work, timeout_s=_LIMIT_S)
        assert len(set(found)) == 1
        if self._has_branch(there):
            assert found[0] == save, f"save {found[0]} was found, not {save}; there are {there}"
        else:
            self.done["lost branches"] += 1
            assert found[0] in set().union(*there), "there is a whole step, and the run began with step 0"
        if len(self.urls) == 1 and found[0] is not None:
            path = reknit.latest(self.urls[0])
            assert path is not None
            # A step whose files are damaged, but not its manifest, is still the newest that is committed.
            assert not _is_whole(path) or _value(path) == found[0]
        return found[0]

    def _run(self, group: Group) -> Checkpointer:
        return Checkpointer(tiers=self._tiers, wait=True, options=_OPTIONS, group=group)

    def _one_life(self) -> None:
        """Resume, train, go back and act like users until a rank dies or the run ends."""
        rng = self._rng
        left, victim = rng.randrange(2, 160), rng.randrange(-1, self._ranks)
        steps = [(rng.random(), rng.randrange(1, 3), rng.random()) for _ in range(rng.randrange(1, 8))]
        begin = rng.randrange(left)
        full = range(begin, begin + rng.randrange(1, 6)) if rng.random() < _FULL else range(0)
        of_all = _Rank(left, full=full)
        begun: list[int] = []
        saved: list[int] = []
        at: list[int | None] = [self._head]

        def work(group: Group) -> bool:
            one = _Rank(left if victim == group.rank else _ENDLESS, group)
            living.begin(group.rank, of_all if victim < 0 else one)
            try:
                with self._run(group) as run:
                    step = self._begin(run, group, at)
                    for loss, more, chance in steps:
                        if chance < _BACK and step:
                            step = self._go_back(run, group, at, chance / _BACK)
                        # All ranks have loaded before the reference goes on, and rank 0 is the first to save.
                        if group.rank == 0:
                            self._saves.append((step, at[0]))
                            begun.append(len(self._saves) - 1)
                        value = ask_root(group, "value", _LIMIT_S, lambda: begun[-1])
                        if run.save(step, _state(group.rank, value), {"loss": loss}) is not None:
                            saved.append(value)
                            at[0] = value
                        if group.rank == 0:
                            self._meddle(step)
                        step += more
            except CheckpointExistsError as error:  # a pinned step is in the way
                if "pinned" not in error.message:
                    raise
                self.done["pins in the way"] += 1
                return True
            except (StorageError, CommError) as error:
                undecided = isinstance(error, UndecidedError) and ": dead" in error.message
                planned = undecided or error.message.startswith(("dead", "full"))
                if isinstance(error, StorageError) and not planned:
                    raise
                return True
            return False

        with mock.patch.object(time, "time", self._clock()):
            try:
                died = run_ranks(self._ranks, work, timeout_s=_LIMIT_S)
            finally:
                living.end()
                self._expire()
        self.done["saves"] += len(set(saved))
        self.done["deaths of all" if victim < 0 else "deaths of one"] += any(died)
        self.done["full stores"] += bool(full)
        committed = set(saved) | (set(begun[-1:]) & set().union(*self._whole()))
        self._head = max(committed, default=self._head)

    def _clock(self) -> Callable[[], float]:
        """Return a clock that is set hours ahead or back in some lives."""
        ahead = self._rng.choice((0.0, 0.0, 7200.0, -7200.0))
        self.done["wrong clocks"] += bool(ahead)
        return lambda real=time.time: real() + ahead  # type: ignore[misc]

    def _begin(self, run: Checkpointer, group: Group, at: list[int | None]) -> int:
        held = _state(group.rank)
        step = run.resume(held)
        if group.rank == 0:
            at[0] = int(held["model"]["w"][0]) if step else None
        return step

    def _go_back(self, run: Checkpointer, group: Group, at: list[int | None], which: float) -> int:
        """Load any step that is there, of the line or given up, and return the next one."""
        there = ask_root(group, "there", _LIMIT_S, lambda: self._numbers(run))
        if not there:
            return int(
                ask_root(group, "on", _LIMIT_S, lambda: self._step(at[0]) + 1 if at[0] is not None else 0)
            )
        held = _state(group.rank)
        step = there[int(which * len(there))]
        try:
            run.load(held, step)
        except (FormatError, CheckpointNotFoundError):  # it is damaged, or was removed meanwhile
            self.done["lost steps"] += group.rank == 0
            return int(
                ask_root(group, "on", _LIMIT_S, lambda: self._step(at[0]) + 1 if at[0] is not None else 0)
            )
        if group.rank == 0:
            at[0] = int(held["model"]["w"][0])
            self.done["went back"] += 1
        return int(step) + 1

    def _numbers(self, run: Checkpointer) -> list[int]:
        return sorted({step.step for step in run.steps() if step.step is not None and not step.problem})

    def _meddle(self, newest: int) -> None:
        """Remove, pin or score a step that is not the newest, as another job might."""
        rng = self._rng
        found = reknit.steps(rng.choice(self.urls))
        older = [each for each in found if each.step not in (None, newest) and each.path not in self._copies]
        if not older or rng.random() < 0.5:
            return
        step = rng.choice(older)
        path = step.path
        if rng.random() < 0.3:
            self._copy(step, moves=rng.random() < 0.5)
            return
        what = rng.choice((reknit.delete, reknit.pin, reknit.unpin, reknit.note))
        self.done[what.__name__] += 1
        try:
            what(path, {"loss": rng.random()}) if what is reknit.note else what(path)  # type: ignore[call-arg]
        except ReknitError as error:  # it is held, or was removed meanwhile
            if "dead" in error.message:
                raise

    def _copy(self, step: SavedStep, *, moves: bool) -> None:
        """Copy or rename the folder of a step, maybe to the name of a later step."""
        tree, path = ProcessMemory("schedules"), step.path
        here = path.removeprefix(f"{SCHEME}://")
        if "cold" in here or not _is_whole(path) or here.rpartition("/")[2] in _OTHER_NAMES:
            return
        to = f"{here.rpartition('/')[0]}/{self._rng.choice(_OTHER_NAMES)}"
        with tree.lock:  # the run may be removing it, and a rename is one act
            files = [each.path for each in tree.list(here)]
            whole = f"{here}/manifest.json" in files and not any("/pending." in each for each in files)
            if (
                not whole
                or tree.sub(to).folders()
                or any("/.notes/" in each for each in files)
                or step.moved_to
            ):
                return
            for each in files:
                tree.put(to + each.removeprefix(here), tree.get(each, limit=_ENDLESS), if_absent=False)
                if moves:
                    tree.delete(each)
        self._copies.add(f"{SCHEME}://{to}")
        self.done["renames" if moves else "copies"] += 1

    def _fate(self, there: list[set[int]]) -> list[set[int]]:
        """Damage the newest step of the first tier, or lose the tier, in some runs with other copies."""
        fate = self._rng.random()
        if fate > 0.3 or not there[0] or not any(there[1:]):
            return there
        root = ProcessMemory("schedules").sub("tier0")
        gone = max(step.step or 0 for step in reknit.steps(self.urls[0]) if step.path not in self._copies)
        for path in [each.path for each in root.list()]:
            if fate >= 0.15:
                root.delete(path)
            elif path.startswith(f"step_{gone:08d}/") and path.endswith(".safetensors"):
                data = bytearray(root.get(path, limit=_ENDLESS))
                data[-1] ^= 1
                root.put(path, bytes(data), if_absent=False)
        self.done["damaged" if fate < 0.15 else "lost tiers"] += 1
        return self._whole()

    def _whole(self) -> list[set[int]]:
        """Return the saves of each tier that are as they were saved."""
        return [
            {
                _value(step.path)
                for step in reknit.steps(url)
                if step.step is not None and _is_whole(step.path)
            }
            if _is_there(url)
            else set()
            for url in self.urls
        ]

    def _look_around(self) -> None:
        """Check that each checkpoint in the cold store loads by its old path, and none lies there unnamed."""
        moved = [step for url in self.urls for step in _steps(url) if step.moved_to is not None]
        self.done["moved"] += len(moved)
        assert all(_is_whole(step.path) for step in moved), f"of {moved} one is lost"
        assert self.done["lost tiers"] or all(map(_is_whole, self._copies)), (
            "a copy is not the run's to remove"
        )
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


def _state(rank: int, save: int = 0) -> dict[str, Any]:
    """Return the state of a rank at a save: the common part, and its own."""
    held = state(float(save))
    held["model"][f"own{rank}"] = np.full(10, float(save + rank))
    return held


def _value(path: str) -> int:
    """Return the number of the save at a path."""
    with reknit.open(path) as checkpoint:
        return int(checkpoint.read("model", "w")[0])


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
