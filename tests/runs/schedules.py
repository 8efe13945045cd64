"""Random lives of runs in memory: tiers, keep policies, moves to a cold store, removals, damage and deaths.

`python -m tests.runs.schedules --seeds 2000 --first 0` lives those of many seeds.  A run dies in the middle
of any change that it makes to a store.  Wherever that is, the step that was saved last, and not lost since,
loads, and so does every other that a store says is there; the next run goes on from the newest; and what lies
in the cold store is known to its path.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from unittest import mock

import reknit
from reknit import Checkpointer, Cool, SaveOptions, Tier
from reknit.engine.memory import workers
from reknit.errors import ReknitError, StorageError
from reknit.policies import at, best, every, latest
from reknit.storage.registry import register
from tests.runs.pieces import state
from tests.runs.test_at_every_instant import Mortal, life
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from reknit.options import Durability
    from reknit.storage.base import Storage

SCHEME = "schedule"
_ENDLESS = 1 << 30
_LIVES = 5
_KEEP = (None, latest(1), latest(2), every(3), best(1, "loss"), at(2), latest(1) | best(2, "loss"))
_OPTIONS = SaveOptions(durability="process", threads=1)


class _Named(Mortal):
    """A store in memory that is opened by its URL."""

    @property
    def url(self) -> str:
        """The URL by which it is opened."""
        return self.inner.url.replace("process://schedules", f"{SCHEME}:/")

    def around(self, inner: Storage, path: str) -> _Named:
        """Return a store below."""
        return _Named(inner)


def _open(url: str, durability: Durability) -> _Named:
    return _Named(ProcessMemory("schedules").sub(url.removeprefix(f"{SCHEME}://")))


class Schedule:
    """The lives of one run."""

    def __init__(self, seed: int) -> None:
        register(SCHEME, _open)
        ProcessMemory.clear("schedules")
        self._rng = rng = random.Random(seed)
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
        """Let one run after another live, and look what is there after each; workers take no threads."""
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
            held = state()
            with self._run() as run:
                assert run.resume(held) == (0 if last is None else last + 1), f"there are {there}"
            assert last is None or held["model"]["w"][0] == last
            self._look_around()
            there = self._whole()
            assert last is None or last in set().union(*there), f"step {last} went in a quiet life"

    def _run(self) -> Checkpointer:
        return Checkpointer(tiers=self._tiers, wait=True, options=_OPTIONS)

    def _one_life(self) -> int | None:
        """Resume, train and do what people do, until death or to an end; return the last step saved."""
        rng, saved = self._rng, None
        life.left = rng.randrange(2, 160)
        try:
            with self._run() as run:
                step = run.resume(state())
                for _ in range(rng.randrange(1, 8)):
                    if run.save(step, state(float(step)), {"loss": rng.random()}) is not None:
                        saved = step
                        self.done["saves"] += 1
                    self._meddle(step)
                    step += rng.randrange(1, 3)
        except StorageError as error:
            if "dead" not in error.message:
                raise
            self.done["deaths"] += 1
        finally:
            life.left = _ENDLESS
            self._expire()
        return saved

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
        """Maybe damage the newest step of the first tier, or lose all of it, where another has some."""
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
        """See that whatever is in the cold store is known at its path, and is all that is not there."""
        moved = [step for url in self.urls for step in _steps(url) if step.moved_to is not None]
        self.done["moved"] += len(moved)
        assert all(_is_whole(step.path) for step in moved), f"of {moved} one is lost"
        if self._cooled is None or self.done["lost tiers"]:  # which takes the notes about copies with it
            return
        hot = ProcessMemory("schedules").sub(f"tier{self._cooled}")
        known = {path.path.partition("/")[0] for path in hot.list() if "/.notes/copy." in path.path}
        for path in [each.path for each in ProcessMemory("schedules").sub("cold").list()]:
            assert path.partition("/")[0] in known, f"nobody knows of {path}"

    def _expire(self) -> None:
        """Let the leases of a process that died end."""
        tree = ProcessMemory("schedules")
        for path in [each.path for each in tree.list()]:
            if "/.notes/lease." in path or "/.notes/removal." in path:
                tree.delete(path)


def _steps(url: str) -> list[Any]:
    return reknit.steps(url) if _is_there(url) else []


def _is_there(url: str) -> bool:
    return bool(_open(url, "process").folders())


def _is_whole(path: str) -> bool:
    with suppress(ReknitError):
        return reknit.verify(path, "data").ok
    return False


def main() -> int:
    """Live, tell of every run that went wrong, and return how many there were (at most 100)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("reknit").setLevel(logging.CRITICAL)
    began, bad, done = time.time(), [], Counter[str]()
    for seed in range(options.first, options.first + options.seeds):
        schedule = Schedule(seed)
        try:
            schedule.live()
        except Exception as error:
            bad.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
        done += schedule.done
    told = ", ".join(f"{number} {what}" for what, number in sorted(done.items()))
    print(f"{options.seeds} seeds from {options.first}, {time.time() - began:.0f} s: {told}; bad: {bad}")
    return min(len(bad), 100)


if __name__ == "__main__":
    sys.exit(main())
