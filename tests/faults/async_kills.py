"""SIGKILL at a random moment of a job that saves in the background: one run, and many from a command line.

``python -m tests.faults.async_kills --runs 400 --seed 0`` makes many runs and counts their outcomes.  The
seed of a run determines all of it, and is printed when the run fails.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from tests.faults.nursery import Child, Nursery, send, wait_until
from tests.faults.trainers import found, step_path

if TYPE_CHECKING:
    from collections.abc import Sequence

Victim = Literal["trainer", "trainers", "agent", "agents", "pair", "everything"]

MIB = 1 << 20
STEPS = 4
GONE_S = 120.0
"""The longest time that a process may take to end after the kill, without counting as one that hangs."""
_WORDS = ("begin", "staged", "committed")
_LATEST_S = {"begin": 0.04, "staged": 0.04, "committed": 0.01}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: `phase` is the last word of the victim, `tries` the saves until one succeeded."""

    victim: Victim
    size: int
    phase: str
    committed: int
    aborted: int
    tries: int


@dataclass(frozen=True)
class Plan:
    """The victim and the moment of a kill: `delay_s` after rank `watched` writes `word` of `step`."""

    victim: Victim
    size: int
    nbytes: int
    rank: int
    watched: int
    word: str
    step: int
    delay_s: float

    @classmethod
    def of(cls, seed: int, *, nbytes: int | None = None) -> Plan:
        """Return the plan that belongs to a seed."""
        rng = random.Random(seed)
        size = rng.choice((1, 2, 2))
        word = rng.choice(_WORDS)
        return cls(
            victim=rng.choice(get_args(Victim)),
            size=size,
            nbytes=nbytes or rng.choice((1, 4, 6)) * MIB,
            rank=rng.randrange(size),
            watched=rng.randrange(size),
            word=word,
            step=rng.randrange(STEPS),
            delay_s=rng.random() * _LATEST_S[word] * (1 if nbytes is None else 4),
        )


def run_once(nursery: Nursery, root: Path, plan: Plan) -> Outcome:
    """Start a job, kill as planned, and check all that has to hold afterwards."""
    trainers = nursery.start_job("train", root, plan.size, nbytes=plan.nbytes, steps=STEPS)
    try:
        phase = _strike(trainers, plan)
        (root / "struck").touch()
        return _judge(trainers, root, plan, phase)
    except BaseException as error:
        logs = "\n".join(f"{t.log.name}: {' | '.join(t.lines())}\n{t.reported()}" for t in trainers)
        raise AssertionError(f"{type(error).__name__}: {error}\n{plan}\n{logs}") from error
    finally:
        for trainer in trainers:
            for pid in (*trainer.agents(), trainer.pid):
                send(pid)


def _strike(trainers: Sequence[Child], plan: Plan) -> str:
    """Wait for the moment, kill, and return the last word of the victim."""
    watched, victim = trainers[plan.watched], trainers[plan.rank]
    wait_until(
        lambda: str(plan.step) in watched.said(plan.word) or not watched.alive(),
        GONE_S,
        lambda: f"rank {plan.watched} never said {plan.word} {plan.step}",
    )
    agents = [trainer.agents() for trainer in trainers]
    time.sleep(plan.delay_s)
    everyone = [trainer.pid for trainer in trainers]
    all_agents = [agent for some in agents for agent in some]
    marked = {
        "trainer": [victim.pid],
        "trainers": everyone,
        "agent": agents[plan.rank],
        "agents": all_agents,
        "pair": [victim.pid, *agents[plan.rank]],
        "everything": everyone + all_agents,
    }[plan.victim]
    phase = " ".join(victim.lines()[-1:]).split(" ")[0]
    for pid in marked:
        send(pid)
    return phase


def _judge(trainers: Sequence[Child], root: Path, plan: Plan, phase: str) -> Outcome:
    """Check everything that has to hold after the kill."""
    dead = {
        "trainer": {plan.rank},
        "trainers": set(range(plan.size)),
        "agent": set(),
        "agents": set(),
        "pair": {plan.rank},
        "everything": set(range(plan.size)),
    }[plan.victim]
    # I6: every survivor ends, without an error or with a typed one, and so does every agent.
    for rank, trainer in enumerate(trainers):
        if rank not in dead:
            wait_until(lambda t=trainer: not t.alive(), GONE_S, lambda r=rank: f"rank {r} does not end")  # type: ignore[misc]
            assert trainer.said("end"), f"rank {rank} failed"
    wait_until(lambda: not any(t.agents() for t in trainers), GONE_S, lambda: "agents outlive their work")
    wait_until(lambda: not any(t.alive() for t in trainers), GONE_S, lambda: "a killed process goes on")
    assert not list((root / "temporary").iterdir()), "temporary files are left"
    assert not [entry.name for entry in os.scandir("/dev/shm") if "reknit" in entry.name and entry.is_file()]
    # I1: every visible checkpoint is whole, and has the values that were saved as its step.
    steps = range(STEPS + 3)
    there = {step: found(step_path(root, step), plan.size, plan.nbytes) for step in steps}
    assert all(value in (None, step) for step, value in there.items()), there
    visible = {step for step, value in there.items() if value is not None}
    # I2, I3: a step that was reported as committed stays.
    for trainer in trainers:
        reported = {int(step) for step in trainer.said("committed")}
        assert reported <= visible, f"{reported - visible} was committed"
    begun = {int(step) for trainer in trainers for step in trainer.said("begin")}
    staged = set.intersection(*({int(step) for step in trainer.said("staged")} for trainer in trainers))
    if plan.victim in ("trainer", "trainers"):
        assert staged <= visible, f"{staged - visible} was staged by all ranks, but not committed"
    tries = 0
    if not dead:
        assert not any(trainer.said("alone") for trainer in trainers)
        # Every rank survives, and the next save after the restart of the agents succeeds on all of them.
        goods = [max(map(int, trainer.said("committed")), default=-1) for trainer in trainers]
        assert min(goods) == max(goods) >= STEPS, f"no save went well after the kill: {goods}"
        tries = goods[0] - STEPS + 1
    _check_litter(root, plan, visible)
    return Outcome(plan.victim, plan.size, phase, len(visible & begun), len(begun - visible), tries)


def _check_litter(root: Path, plan: Plan, visible: set[int]) -> None:
    """Check that the next save to a path clears away the files that a killed one left there."""
    import reknit
    from tests.faults.trainers import state

    for step in range(STEPS):
        folder = Path(step_path(root, step))
        if step not in visible and any(path.is_file() for path in folder.rglob("*")):
            for path in folder.rglob(".*.tmp"):
                os.utime(path, (0, 0))  # only old files are swept: a young one may be in use
            options = reknit.SaveOptions(durability="process")
            reknit.save(folder, state(step, plan.size, plan.nbytes), step=step, options=options)
            files = [path for path in folder.rglob("*") if path.is_file()]
            assert len(files) == 4, f"litter stays: {sorted(map(str, files))}"
            return


def main(arguments: Sequence[str] | None = None) -> int:
    """Make many runs, and print the number of each outcome."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.async_kills", description=__doc__)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each next one has the next")
    parser.add_argument("--mib", type=int, help="size of every rank's state")
    parser.add_argument("--victim", choices=get_args(Victim), help="runs with other victims are left out")
    given = parser.parse_args(arguments)
    outcomes: Counter[tuple[str, ...]] = Counter()
    failed: list[int] = []
    with Nursery() as nursery:
        for seed in range(given.seed, given.seed + given.runs):
            plan = Plan.of(seed, nbytes=given.mib and given.mib * MIB)
            if given.victim not in (None, plan.victim):
                continue
            folder = Path(tempfile.mkdtemp(prefix="reknit-kills-"))
            try:
                outcome = run_once(nursery, folder, plan)
            except AssertionError as error:
                failed.append(seed)
                print(f"seed {seed} failed: {error}\n", flush=True)
                continue
            finally:
                shutil.rmtree(folder)
            outcomes[f"killed: {outcome.victim}",] += 1
            outcomes[f"last word: {outcome.phase}",] += 1
            outcomes["steps committed",] += outcome.committed
            outcomes["steps aborted",] += outcome.aborted
            if outcome.tries:
                outcomes[f"saves until one went well: {outcome.tries}",] += 1
    for (what,), count in sorted(outcomes.items()):
        print(f"{what:40} {count:6}")
    print(f"{'failed seeds':40} {failed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
