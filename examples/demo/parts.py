"""The parts of the demo: what each does, what it expects and what it measures."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from checks import Check, read_checks
from documents import token_sets
from held_store import SCHEME
from journal import Journal, by_source, read_journal, read_ledger
from ranks import Job

import reknit
from reknit.dataloader import TokenLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HERE = Path(__file__).resolve().parent
STEPS, SAVE_EVERY, DROPOUT_STEPS = 24, 4, 16
LOST_RANK, HELD_AT = 2, 8
FEED_SAVE = 4
TOLERANCE = 1e-3
TIMEOUT_S = 180.0
GRACE_S = 30.0


def steps(numbers: Sequence[int]) -> str:
    """Say which steps there are."""
    return f"step{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else "none"


class Demo:
    """The seven parts; each adds to `checks`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checks: list[Check] = []
        self.jobs: list[Job] = []

    def check(self, what: str, expected: str, measured: object, ok: bool) -> None:
        """Note one line of the table."""
        self.checks.append(Check(what, expected, str(measured), ok))

    def job(self, name: str, script: str, *arguments: str, world: int) -> Job:
        """Return a job of `world` ranks that run a script of this folder."""
        self.jobs.append(Job(name, HERE / script, arguments, world=world, logs=self.folder))
        return self.jobs[-1]

    def train(self, name: str, run: str, *arguments: str, world: int = 4, held: bool = False) -> Job:
        """Return the job that trains in the folder `run`, which stands still on demand where it is `held`."""
        script = ("held_store.py", "train") if held else ("train.py",)
        places = [f"--root={self.place(run, held)}", f"--journal={self.folder / name}.jsonl"]
        fixed = [f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", f"--dropout-steps={DROPOUT_STEPS}"]
        return self.job(name, *script, *places, *fixed, *arguments, world=world)

    def place(self, run: str, held: bool) -> str:
        """Return the folder of a run as a path, or as the URL by which it stands still on demand."""
        return f"{SCHEME}://{self.folder / run}" if held else str(self.folder / run)

    def journal(self, name: str) -> Journal:
        """Return what a run wrote down."""
        return read_journal(self.folder / f"{name}.jsonl")

    def step(self, step: int, run: str = "run") -> Path:
        """Return the folder of a checkpoint."""
        return self.folder / run / f"step_{step:08d}"

    def is_committed(self, step: int, run: str = "run") -> bool:
        """Return whether a checkpoint exists."""
        return (self.step(step, run) / "manifest.json").exists()

    def hold(self, step: int, run: str = "run") -> Path:
        """Let the store stand still at a save; return the file to remove when it may go on."""
        hold = self.step(step, run).with_suffix(".hold")
        hold.parent.mkdir(exist_ok=True)
        hold.touch()
        return hold

    def sound_steps(self) -> list[int]:
        """Return the steps of all committed checkpoints of the run, of which every byte is right."""
        found = (path.parent for path in sorted((self.folder / "run").glob("*/manifest.json")))
        return [int(path.name.removeprefix("step_")) for path in found if reknit.verify(path, "data").ok]

    def uninterrupted(self) -> None:
        """Train from start to end."""
        with self.train("whole", "whole") as job:
            job.wait(TIMEOUT_S)
        losses = self.journal("whole").losses
        first, last = losses[1], losses[STEPS]
        self.check(
            f"train {STEPS} steps on 4 ranks, FSDP2",
            "loss falls",
            f"{first:.3f} -> {last:.3f}",
            last < first - 1,
        )

    def lost_rank(self) -> None:
        """Train again, and lose a rank with its agent, as with a host that fails, while a save is written."""
        hold = self.hold(HELD_AT)
        before = HELD_AT - SAVE_EVERY
        with self.train("lost", "run", held=True) as job:
            # After the next step of rank 0 all ranks have staged the save, which no agent can write yet.
            job.wait_until(
                lambda: self.is_committed(before) and HELD_AT + 1 in self.journal("lost").losses,
                f"step {before} committed and step {HELD_AT} staged",
                TIMEOUT_S,
            )
            job.kill(LOST_RANK, agents=True)
            start = time.monotonic()
            hold.unlink()
            stuck = job.end(GRACE_S)
            took_s = time.monotonic() - start
            job.wait_for_agents(TIMEOUT_S)
        codes = [process.returncode for process in job.processes]
        errors = sum(code > 0 for code in codes)
        self.check(
            f"kill rank {LOST_RANK} and its agent in save {HELD_AT}",
            f"3 errors within {GRACE_S:.0f} s",
            f"{errors} errors, {took_s:.1f} s",
            codes[LOST_RANK] == -signal.SIGKILL and errors == 3 and not stuck,
        )
        told = f"rank {LOST_RANK} is gone" in job.said(0)
        self.check("  what rank 0 logs of that save", "why", "why" if told else "nothing", told)
        found, expected = self.sound_steps(), [before]
        self.check("  checkpoints that verify", steps(expected), steps(found), found == expected)

    def orphaned(self) -> None:
        """Resume, train on while the store stands still, and kill all trainers before anything is written."""
        hold, ahead = self.hold(HELD_AT), HELD_AT + SAVE_EVERY
        with self.train("orphaned", "run", held=True) as job:
            # Two saves are staged then; a third waits, or is about to, for the memory of the first.
            job.wait_until(
                lambda: ahead + SAVE_EVERY in self.journal("orphaned").losses,
                f"steps {HELD_AT} and {ahead} staged",
                TIMEOUT_S,
            )
            job.kill(*range(4))
            job.end(GRACE_S)
            before, start = self.sound_steps(), time.monotonic()
            hold.unlink()
            job.wait_for_agents(TIMEOUT_S)
            took_s = time.monotonic() - start
        last = max(self.journal("orphaned").losses)
        self.check(
            f"train on while save {HELD_AT} is held back",
            f"{2 * SAVE_EVERY} steps",
            f"{last - HELD_AT} steps",
            last - HELD_AT == 2 * SAVE_EVERY,
        )
        codes = [process.returncode for process in job.processes]
        expected = [HELD_AT - SAVE_EVERY]
        self.check(
            "kill all 4 trainers; committed so far",
            steps(expected),
            steps(before),
            before == expected and codes == [-signal.SIGKILL] * 4,
        )
        found, expected = self.sound_steps(), [HELD_AT - SAVE_EVERY, HELD_AT, ahead]
        self.check(
            "  when their agents have ended",
            steps(expected),
            f"{steps(found)}, {took_s:.1f} s",
            found == expected,
        )

    def resumed(self) -> None:
        """Go on from what the agents committed, on the same layout."""
        with self.train("resumed", "run") as job:
            job.wait(TIMEOUT_S)
        whole, resumed = self.journal("whole"), self.journal("resumed")
        start = resumed.first - 1
        self.check(
            "resume from the newest checkpoint",
            f"step {HELD_AT + SAVE_EVERY}",
            f"step {start}",
            start == HELD_AT + SAVE_EVERY,
        )
        equal = sum(whole.losses[step] == resumed.losses.get(step) for step in range(start + 1, STEPS + 1))
        self.check(
            "  train to the end on 4 ranks",
            "losses equal, all bits",
            f"{equal} of {STEPS - start} equal",
            equal == STEPS - start > 0,
        )
        same = whole.fingerprint == resumed.fingerprint != ""
        self.check("  hash of the whole final state", "equal", "equal" if same else "differs", same)

    def moved(self) -> None:
        """Go on from a checkpoint of four ranks on two, that share each matrix."""
        source = f"--start-from={self.step(DROPOUT_STEPS)}"
        with self.train("moved", "moved", source, "--tp=2", world=2) as job:
            job.wait(TIMEOUT_S)
        whole, moved = self.journal("whole").losses, self.journal("moved")
        steps = range(DROPOUT_STEPS + 1, STEPS + 1)
        worst = max(abs(whole[step] - moved.losses[step]) for step in steps)
        self.check(
            f"resume from step {DROPOUT_STEPS} on 2, FSDP2 x TP",
            f"losses within {TOLERANCE}",
            f"{worst:.1e} apart, {len(steps)} steps",
            moved.first == DROPOUT_STEPS + 1 and worst <= TOLERANCE,
        )
        notes = ", ".join(moved.loaded["notes"]) or "nothing"
        self.check("  left alone by the load", "random state", notes, notes == "rng")
        number = moved.loaded["resharded"]
        self.check("  tensors read from other shards", "some", number, number > 0)

    def one_process(self) -> None:
        """Look into the checkpoint of the two ranks from one process."""
        results = self.folder / "checks.json"
        places = (str(self.step(STEPS, "moved")), str(self.folder), f"--checks={results}")
        with self.job("one-process", "one_process.py", *places, world=1) as job:
            job.wait(TIMEOUT_S)
        self.checks += read_checks(results)

    def feed(self, name: str, *arguments: str, world: int, held: bool = False) -> Job:
        """Return the job that reads documents, and writes into the ledger of its name what it consumed."""
        script = ("held_store.py", "feed") if held else ("feed.py",)
        places = [f"--root={self.place('data', held)}", f"--meeting={self.folder / 'meeting'}"]
        return self.job(name, *script, *places, f"--ledger={self.folder / name}", *arguments, world=world)

    def fed(self) -> None:
        """Read documents on four ranks, lose them all in their second save, and read what is left on two."""
        four, two = self.folder / "four", self.folder / "two"
        hold = self.hold(2 * FEED_SAVE, "data")
        with self.feed("four", f"--save-every={FEED_SAVE}", world=4, held=True) as job:
            job.wait_until(
                lambda: all(len(read_ledger(four, n)) == 2 * FEED_SAVE for n in range(4)),
                f"{2 * FEED_SAVE} batches read on each rank",
                TIMEOUT_S,
            )
            job.kill(*range(4))
            job.end(GRACE_S)
        hold.unlink()
        with self.feed("two", world=2) as job:
            job.wait(TIMEOUT_S)
        before = [batch for n in range(4) for batch in read_ledger(four, n)]
        kept = [batch["samples"] for batch in before if batch["step"] <= FEED_SAVE]
        after = [batch["samples"] for n in range(2) for batch in read_ledger(two, n)]
        lost = len(before) - len(kept)
        self.check(
            f"kill 4 ranks that read documents in save {2 * FEED_SAVE}",
            f"{4 * FEED_SAVE} batches lost",
            f"{lost} of {len(before)} lost",
            lost == 4 * FEED_SAVE and self.is_committed(FEED_SAVE, "data"),
        )
        whole = list(TokenLoader(token_sets(), token_budget=8192, dtype="uint8"))
        expected = by_source([batch.samples.tolist() for batch in whole])
        found = by_source(kept + after)
        self.check(
            "  2 ranks read what is left",
            "each piece once, in order",
            f"{sum(map(len, found.values()))} pieces of {len(found)} sources",
            found == expected,
        )


PARTS: dict[str, Callable[[Demo], None]] = {
    "train on 4 ranks": Demo.uninterrupted,
    "again, and lose a rank in a save": Demo.lost_rank,
    "resume, and lose all trainers while the store stands still": Demo.orphaned,
    "resume from what the agents committed": Demo.resumed,
    "go on with 2 ranks and tensor parallelism": Demo.moved,
    "look at that checkpoint from one process": Demo.one_process,
    "read documents on 4 ranks, lose them, go on with 2": Demo.fed,
}
