"""Random lives of runs whose agents are processes: trainers, agents or both are killed, and tiers are lost.

`python -m tests.runs.agent_lives --seeds 40 --first 0` makes many runs.  After a kill at any moment, the last
committed step loads, unless it was lost since, and so does every other step that a tier lists.  The next job
goes on from the newest step.  The seed of a run determines all of it, except the exact moments of the kills.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import reknit
from reknit import Checkpointer, Cool, SaveOptions, Tier
from reknit.errors import ReknitError
from reknit.policies import latest
from tests.faults.nursery import Nursery, send, wait_until
from tests.runs import many
from tests.runs.pieces import state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.faults.nursery import Child

GONE_S = 60.0
"""The longest that anything may go on after a kill."""
STEPS = 15
_VICTIMS = ("trainer", "trainer", "agent", "both", "nobody")
_LATEST_S = 1.5
_PAUSE_S = 0.03
_OPTIONS = SaveOptions(durability="process", threads=1)


def tiers_of(plan: Sequence[dict[str, Any]]) -> list[Tier]:
    """Return the tiers that a plan describes."""
    return [
        Tier(
            each["url"],
            every=each["every"],
            keep=each["keep"] and latest(each["keep"]),
            cool=each["cold"] and Cool(each["cold"], after=latest(each["after"])),
        )
        for each in plan
    ]


def train(log: str, plan: list[dict[str, Any]], seed: int) -> None:
    """Resume and save, and write the outcomes into a log."""
    rng = random.Random(seed)
    with open(log, "a", buffering=1) as reported, Checkpointer(tiers=tiers_of(plan), options=_OPTIONS) as run:
        held = state()
        first = run.resume(held)
        print("resumed", first, int(held["model"]["w"][0]), file=reported)
        saves = []
        for step in range(first, first + STEPS):
            if (save := run.save(step, state(float(step)))) is not None:
                saves.append((step, save))
            time.sleep(rng.random() * _PAUSE_S)
            while saves and (saves[0][1].done() or step == first + STEPS - 1):
                number, save = saves.pop(0)
                try:
                    save.result(GONE_S)
                    print("committed", number, file=reported)
                except ReknitError as error:  # its agent was killed
                    print("failed", number, type(error).__name__, file=reported)


class Lives:
    """One run, and its jobs that are killed."""

    def __init__(self, nursery: Nursery, root: Path, seed: int) -> None:
        self._nursery, self._root, self._rng = nursery, root, random.Random(seed)
        rng = self._rng
        paces = [1, *sorted(rng.sample((2, 3, 5), rng.randrange(3)))]
        cooled = rng.randrange(len(paces)) if rng.random() < 0.5 else None
        self._plan: list[dict[str, Any]] = [
            {
                "url": str(root / f"tier{number}"),
                "every": pace,
                "keep": rng.choice((None, 1, 2)),
                "cold": str(root / "cold") if number == cooled else None,
                "after": rng.choice((1, 2)),
            }
            for number, pace in enumerate(paces)
        ]
        self._last: int | None = None
        self.done: Counter[str] = Counter()

    def live(self, lives: int = 5) -> None:
        """Run one job after another, each ended by a kill, and the last by itself."""
        for number in range(lives):
            self._one_life(number, "nobody" if number == lives - 1 else self._rng.choice(_VICTIMS))

    def _one_life(self, number: int, victim: str) -> None:
        trainer = self._nursery.start(
            "tests.runs.agent_lives:train",
            self._root / f"log-{number}",
            plan=self._plan,
            seed=self._rng.random(),
        )
        try:
            self._strike(trainer, victim)
            self._judge(trainer, victim)
        except BaseException as error:
            story = " | ".join(trainer.lines())
            raise AssertionError(
                f"{error}\nlife {number}, {victim}: {story}\n{trainer.reported()}"
            ) from error
        finally:
            for pid in (*trainer.agents(), trainer.pid):
                send(pid)

    def _strike(self, trainer: Child, victim: str) -> None:
        self.done[victim] += 1
        if victim != "nobody":
            time.sleep(self._rng.random() * _LATEST_S)
            agents = trainer.agents()
            for pid in {"trainer": [trainer.pid], "agent": agents, "both": [trainer.pid, *agents]}[victim]:
                send(pid)
        wait_until(lambda: not trainer.alive(), GONE_S, trainer.reported)
        wait_until(lambda: not trainer.agents(), GONE_S, trainer.reported)

    def _judge(self, trainer: Child, victim: str) -> None:
        for reported in trainer.said("resumed"):
            expected = (0, 0) if self._last is None else (self._last + 1, self._last)
            assert tuple(map(int, reported.split())) == expected, f"resumed {reported}, not {expected}"
        committed = [int(reported) for reported in trainer.said("committed")]
        self.done["committed"] += len(committed)
        there = self._whole()
        newest = max(set().union(*there), default=None)
        for step in (self._last, *committed):
            assert step is None or (newest is not None and step <= newest), f"step {step} is lost: {there}"
        if victim == "nobody":
            assert committed, "a life in peace commits"
        self._last = max(set().union(*self._lose_some(there)), default=None)

    def _whole(self) -> list[set[int]]:
        """Return the steps of each tier, all of which have to be as they were saved."""
        found = []
        for tier in self._plan:
            steps = reknit.steps(tier["url"]) if Path(tier["url"]).exists() else []
            for step in steps:
                assert reknit.verify(step.path, "data").ok, f"{step.path} is not as it was saved"
            found.append({step.step for step in steps if step.step is not None})
        return found

    def _lose_some(self, there: list[set[int]]) -> list[set[int]]:
        """Lose the first tier in some runs with other copies; return the remaining steps of each tier."""
        if self._rng.random() > 0.2 or not any(there[1:]):
            return there
        shutil.rmtree(self._plan[0]["url"])
        self.done["lost tiers"] += 1
        return [set(), *there[1:]]


def live(nursery: Nursery, seed: int, done: Counter[str]) -> None:
    """Make the run of a seed; after a failure, its files stay on disk."""
    root = Path(tempfile.mkdtemp(prefix="reknit-lives-"))
    lives = Lives(nursery, root, seed)
    try:
        lives.live()
    except AssertionError as error:
        raise AssertionError(f"in {root}: {error}") from error
    finally:
        done.update(lives.done)
    shutil.rmtree(root)


if __name__ == "__main__":
    with Nursery() as shared:
        sys.exit(many.main(__doc__, partial(live, shared)))
