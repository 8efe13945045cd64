"""Random lives of runs that save in the background, on disk, against a plain reference.

`python -m tests.runs.agent_lives --seeds 40 --first 0` makes many runs.  A run has one or two ranks, which
are processes, and one to three tiers.  It goes back to earlier steps.  Trainers, agents or both are killed at
any moment, and tiers are lost.  Meanwhile and in between, others pin, remove, copy and rename steps, and
prune.  After that:

* the last committed save loads, unless it was lost since, and so does every other step that a tier lists;
* the next job goes on from the newest save that the last one came from;
* copies, renamed steps and pinned steps stay as they were.

The seed of a run determines all of it, except the exact moments of the kills and of the acts of others.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import reknit
from reknit import Checkpointer, Cool, SaveOptions, Tier
from reknit.comm.group import quietly
from reknit.comm.meeting.rendezvous import FolderStore
from reknit.errors import CheckpointExistsError, ReknitError
from reknit.options import CommOptions
from reknit.policies import latest
from tests.faults.nursery import Nursery, send, wait_until
from tests.runs import many
from tests.runs.pieces import state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.comm.group import Group
    from tests.faults.nursery import Child

GONE_S = 60.0
"""The longest that anything may go on after a kill."""
STEPS = 15
_VICTIMS = ("trainer", "trainer", "agent", "both", "nobody")
_LATEST_S = 1.5
_PAUSE_S = 0.03
_BACK = 0.15
"""Share of steps before which a run goes back."""
_OTHER_NAMES = ("best", "step_00000998", "step_00000999")  # of steps that others copy or rename
_COMM = CommOptions(connect_timeout_s=15.0)  # another rank may have been killed before it came
_OPTIONS = SaveOptions(durability="process", threads=1, comm=_COMM)


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


def train(
    log: str, plan: list[dict[str, Any]], seed: int, first_save: int, *, meet: str, rank: int, size: int
) -> None:
    """Resume, save and go back, and write the outcomes into a log; the value of a save is its number."""
    rng = random.Random(seed)
    group: Group | None = None
    if size > 1:
        with quietly():
            from reknit.comm.tree.tree_group import TreeGroup

        group = TreeGroup.join(FolderStore(meet), rank, size, job="lives", options=_COMM)
    with (
        open(log, "a", buffering=1) as reported,
        Checkpointer(tiers=tiers_of(plan), options=_OPTIONS, group=group) as run,
    ):
        held = state()
        step = run.resume(held)
        origin = int(held["model"]["w"][0])
        print("resumed", step, origin, file=reported)
        saves: list[tuple[int, Any]] = []
        for number in range(first_save, first_save + STEPS):
            pause_s, back = rng.random() * _PAUSE_S, rng.random()
            if back < _BACK and step > 2:
                step, origin = _go_back(run, held, step, origin, 1 + int(back / _BACK * step))
            print("begun", number, step, origin, file=reported)
            try:
                save = run.save(step, state(float(number)))
            except CheckpointExistsError as error:
                if "pinned" not in error.message:  # somebody has pinned a step that is in the way
                    raise
                break
            if save is not None:
                origin = number
                saves.append((number, save))
            step += 1
            time.sleep(pause_s)
            while saves and saves[0][1].done():
                _report(*saves.pop(0), reported)
        for number, save in saves:
            _report(number, save, reported)
        print("end", file=reported)


def _go_back(run: Checkpointer, held: dict[str, Any], step: int, origin: int, to: int) -> tuple[int, int]:
    """Load an earlier step, if it is there, and return the next step and the number of the loaded save."""
    try:
        run.load(held, to)
    except ReknitError:  # it was removed; if another rank is gone, the next save says so
        return step, origin
    return to + 1, int(held["model"]["w"][0])


def _report(number: int, save: Any, reported: IO[str]) -> None:
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
        self._size = rng.choice((1, 1, 2))
        self._saves: dict[int, tuple[int, int | None]] = {}
        """The reference: step and origin of each save, by its number."""
        self._head: int | None = None
        self._there: set[int] = set()
        self._copies: dict[str, int] = {}
        self._pinned: dict[str, int] = {}
        self.done: Counter[str] = Counter()

    def live(self, lives: int = 5) -> None:
        """Run one job after another, each ended by a kill, and the last by itself."""
        for number in range(lives):
            self._one_life(number, "nobody" if number == lives - 1 else self._rng.choice(_VICTIMS))
            self._meddle()

    def _one_life(self, number: int, victim: str) -> None:
        self._there = set().union(*self._whole())
        meet = self._root / f"meet-{number}"
        meet.mkdir()
        seed = self._rng.random()
        trainers = [
            self._nursery.start(
                "tests.runs.agent_lives:train",
                self._root / f"log-{number}-{rank}",
                plan=self._plan,
                seed=seed,
                first_save=1 + number * STEPS,
                meet=meet,
                rank=rank,
                size=self._size,
            )
            for rank in range(self._size)
        ]
        try:
            self._strike(trainers, victim)
            self._judge(trainers, victim)
        except BaseException as error:
            story = " || ".join(" | ".join(trainer.lines()) for trainer in trainers)
            reported = "\n".join(trainer.reported() for trainer in trainers)
            raise AssertionError(f"{error}\nlife {number}, {victim}: {story}\n{reported}") from error
        finally:
            for trainer in trainers:
                for pid in (*trainer.agents(), trainer.pid):
                    send(pid)

    def _strike(self, trainers: Sequence[Child], victim: str) -> None:
        self.done[victim] += 1
        self.done["ranks"] += len(trainers)
        time.sleep(self._rng.random() * _LATEST_S / 2)
        self._meddle()
        if victim != "nobody":
            time.sleep(self._rng.random() * _LATEST_S / 2)
            struck = self._rng.sample(trainers, self._rng.randrange(1, len(trainers) + 1))
            for trainer in struck:
                agents = trainer.agents()
                which = {"trainer": [trainer.pid], "agent": agents, "both": [trainer.pid, *agents]}
                for pid in which[victim]:
                    send(pid)
        for trainer in trainers:
            wait_until(lambda t=trainer: not t.alive(), GONE_S, trainer.reported)  # type: ignore[misc]
            wait_until(lambda t=trainer: not t.agents(), GONE_S, trainer.reported)  # type: ignore[misc]

    def _judge(self, trainers: Sequence[Child], victim: str) -> None:
        """Compare the lines of all ranks, and the steps on disk, with the reference."""
        self._judge_begin(trainers)
        for trainer in trainers:
            for begun in trainer.said("begun"):
                number, step, origin = map(int, begun.split())
                self._saves[number] = step, origin or None
        committed = {int(said) for trainer in trainers for said in trainer.said("committed")}
        self.done["committed"] += len(committed)
        there = self._whole()
        if victim == "nobody":
            assert all(trainer.said("end") for trainer in trainers), "a life in peace ends by itself"
        # The newest that is committed, also if nobody has lived to say so.
        begun_now = {int(said.split()[0]) for trainer in trainers for said in trainer.said("begun")}
        on_disk = set().union(*there)
        self._head = max(committed | (begun_now & on_disk), default=self._head)
        assert self._head not in (committed | self._there) - on_disk, f"save {self._head} is lost: {there}"
        self._judge_others()
        self._lose_some(there)

    def _judge_begin(self, trainers: Sequence[Child]) -> None:
        """Compare the save that all ranks have resumed from with the newest that the last one came from."""
        resumed = {said for trainer in trainers for said in trainer.said("resumed")}
        assert len(resumed) <= 1, f"the ranks resumed from {resumed}"
        for said in resumed:
            step, number = map(int, said.split())
            if self._head in self._there:
                assert number == self._head, f"save {number} was loaded, not {self._head}"
            found = number in self._there or not (number or self._there)
            assert found, f"save {number} is not one of {self._there}"
            assert step == (self._saves[number][0] + 1 if number else 0)
            self._head = number or None

    def _whole(self) -> list[set[int]]:
        """Return the saves of each tier, all of which have to be as they were saved."""
        return [{self._value(path) for path in self._paths(tier["url"])} for tier in self._plan]

    def _paths(self, url: str) -> list[str]:
        return [step.path for step in reknit.steps(url)] if Path(url).exists() else []

    def _value(self, path: str) -> int:
        """Return the number of the save at a path, which has to be whole."""
        assert reknit.verify(path, "data").ok, f"{path} is not as it was saved"
        with reknit.open(path) as checkpoint:
            values = checkpoint.read("model", "w")
        assert (values == values[0]).all(), f"{path} mixes saves"
        return int(values[0])

    def _judge_others(self) -> None:
        """Check that copies, renamed steps and pinned steps hold the same saves as before."""
        for path, number in self._kept.items():
            assert self._value(path) == number, f"{path} holds another save than {number}"

    def _meddle(self) -> None:
        """Pin, remove, copy or rename an older step of the first tier, or prune it, as others might."""
        rng, url = self._rng, self._plan[0]["url"]
        act = rng.choice(("pin", "remove", "copy", "rename", "prune", "nothing"))
        try:
            found = {path: self._value(path) for path in self._paths(url)}
        except (AssertionError, ReknitError):  # one was removed just now
            return
        newest = [*sorted(found.values())[-2:], self._head]  # they may be all that the run has
        older = [path for path in found if found[path] not in newest and path not in self._kept]
        if not older:
            return
        path, to = Path(rng.choice(older)), Path(url) / rng.choice(_OTHER_NAMES)
        try:
            if act == "prune":
                with Checkpointer(url, keep=latest(1), group=reknit.alone()) as run:
                    run.prune()
            elif act == "remove":
                reknit.delete(path)
            elif act == "pin":
                reknit.pin(path, "lives")
                self._pinned[str(path)] = self._value(str(path))
            elif act in ("copy", "rename") and not (to.exists() or self._is_busy(path)):
                self._take(path, to, moves=act == "rename")
            else:
                return
        except (ReknitError, FileNotFoundError):  # the run is at work there, or has just removed it
            self._pinned.pop(str(path), None)
            return
        self.done[act] += 1

    @property
    def _kept(self) -> dict[str, int]:
        """The saves that others keep, by their paths."""
        return self._copies | self._pinned

    def _is_busy(self, path: Path) -> bool:
        """Return whether a step moves to a cold store, or is being read."""
        return self._plan[0]["cold"] is not None or (path / ".notes").exists()

    def _take(self, path: Path, to: Path, *, moves: bool) -> None:
        """Rename the folder of a step, or a copy of it."""
        if moves:
            path.rename(to)
        else:
            aside = self._root / "aside"
            shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(path, aside)
            aside.rename(to)
        if (to / "manifest.json").exists():
            with suppress(AssertionError, ReknitError):  # the run was about to remove it
                self._copies[str(to)] = self._value(str(to))
        if str(to) not in self._copies:
            shutil.rmtree(to)

    def _lose_some(self, there: list[set[int]]) -> None:
        """Lose the first tier in some runs with other copies."""
        if self._rng.random() < 0.2 and any(there[1:]):
            shutil.rmtree(self._plan[0]["url"])
            self._copies.clear()
            self._pinned.clear()
            self.done["lost tiers"] += 1


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
