"""Train, kill, resume, reshard, check and export, with real processes on this machine.

All saves are asynchronous: an agent beside each rank writes and commits while training goes on.

  1. Four ranks (FSDP2) train a small language model on the sources of Python's standard library.
  2. The same again, but one rank is killed with SIGKILL, and its agent with it, in the middle of a save.
  3. Four ranks resume that run.  The store stands still; they train on, two saves ahead of it.  Then all
     four are killed with SIGKILL, and the store moves again: their agents write and commit both saves.
  4. Four ranks resume from what the agents committed.  Each loss and the final state (weights, optimizer,
     scheduler, loader, random generators) must equal those of the first run, bit for bit.
  5. Two ranks with tensor parallelism (FSDP2 x TP) go on from a checkpoint of the four.  Their losses must
     follow the first run's, but for rounding.  The random state of four ranks means nothing on two, and the
     load report has to say that it was left alone; so the steps compared are those without dropout.
  6. One process opens the checkpoint that the two saved: reads a slice, loads the model alone, verifies every
     byte, exports to Hugging Face format, compares with transformers, and is refused a damaged copy.
  7. Four ranks with worker processes read documents into token buffers, and are all killed between two saves.
     Two ranks go on.  Every document must have been consumed exactly once, those of a source in their order.

A table tells what was expected and what was measured; the exit status is 0 only if all of it is true.  Takes
about a minute on two cores.  Needs no GPU and no network.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checks import Check, read_checks, table
from documents import token_sets
from held_store import SCHEME
from ranks import Job, JobFailed

import reknit
from reknit.dataloader import COLUMNS, TokenLoader

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent
STEPS, SAVE_EVERY, DROPOUT_STEPS = 24, 4, 16
LOST_RANK, HELD_AT = 2, 8
FEED_SAVE = 4
TOLERANCE = 1e-3
TIMEOUT_S = 180.0
GRACE_S = 30.0


@dataclass
class Journal:
    """What the first rank of a run wrote down."""

    losses: dict[int, float] = field(default_factory=dict)
    first: int = 0
    loaded: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""


def read_journal(path: Path) -> Journal:
    """Read the JSON lines of a run, which may still be writing them."""
    journal = Journal()
    lines = path.read_text() if path.exists() else ""
    for line in lines[: lines.rfind("\n") + 1].splitlines():
        record = json.loads(line)
        if "loss" in record:
            journal.losses[record["step"]] = record["loss"]
        elif "first" in record:
            journal.first = record["first"]
        elif "notes" in record:
            journal.loaded = record
        else:
            journal.fingerprint = record["fingerprint"]
    return journal


def steps(numbers: Sequence[int]) -> str:
    """Say which steps there are."""
    return f"step{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else "none"


class Demo:
    """The seven parts; each adds to `checks`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checks: list[Check] = []

    def check(self, what: str, expected: str, measured: object, ok: bool) -> None:
        """Note one line of the table."""
        self.checks.append(Check(what, expected, str(measured), ok))

    def train(self, name: str, run: str, *arguments: str, world: int = 4, script: str = "train.py") -> Job:
        """Return the job that trains in the folder `run`."""
        fixed = [f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", f"--dropout-steps={DROPOUT_STEPS}"]
        scheme = "" if script == "train.py" else f"{SCHEME}://"
        places = [f"--root={scheme}{self.folder / run}", f"--journal={self.folder / name}.jsonl"]
        return Job(name, HERE / script, [*places, *fixed, *arguments], world=world, logs=self.folder)

    def journal(self, name: str) -> Journal:
        """Return what a run wrote down."""
        return read_journal(self.folder / f"{name}.jsonl")

    def hold(self, step: int) -> Path:
        """Let the store stand still at a save; return the file to remove when it may go on."""
        hold = self.folder / "run" / f"step_{step:08d}.hold"
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
        with self.train("lost", "run", script="held_store.py") as job:
            job.wait_until(lambda: HELD_AT + 1 in self.journal("lost").losses, TIMEOUT_S)
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
        found, expected = self.sound_steps(), [HELD_AT - SAVE_EVERY]
        self.check("  checkpoints that verify", steps(expected), steps(found), found == expected)

    def orphaned(self) -> None:
        """Resume, train on while the store stands still, and kill all trainers before anything is written."""
        hold, ahead = self.hold(HELD_AT), HELD_AT + SAVE_EVERY
        with self.train("orphaned", "run", script="held_store.py") as job:
            # Two saves are staged then; a third waits, or is about to, for the memory of the first.
            job.wait_until(lambda: ahead + SAVE_EVERY in self.journal("orphaned").losses, TIMEOUT_S)
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
        source = self.folder / "run" / f"step_{DROPOUT_STEPS:08d}"
        with self.train("moved", "moved", f"--start-from={source}", "--tp=2", world=2) as job:
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
        notes = moved.loaded["notes"]
        told = list(notes) == ["rng"] and "not restored" in notes["rng"]
        self.check("  left alone by the load", "random state", ", ".join(notes) or "nothing", told)
        number = moved.loaded["resharded"]
        self.check("  tensors read from other shards", "some", number, number > 0)

    def one_process(self) -> None:
        """Look into the checkpoint of the two ranks from one process."""
        results = self.folder / "checks.json"
        arguments = [
            str(self.folder / "moved" / f"step_{STEPS:08d}"),
            str(self.folder),
            f"--checks={results}",
        ]
        with Job("one-process", HERE / "one_process.py", arguments, world=1, logs=self.folder) as job:
            job.wait(TIMEOUT_S)
        self.checks += read_checks(results)

    def fed(self) -> None:
        """Read documents on four ranks, lose them all, and read what is left on two."""
        root, ledgers = self.folder / "data", [self.folder / name for name in ("four", "two")]
        root.mkdir()
        fixed = [f"--root={root}", f"--ledger={ledgers[0]}"]
        feed = HERE / "feed.py"
        with Job("four", feed, [*fixed, f"--save-every={FEED_SAVE}"], world=4, logs=self.folder) as job:
            job.wait_until(lambda: all(len(read(ledgers[0], n)) > FEED_SAVE for n in range(4)), TIMEOUT_S)
            job.kill(*range(4))
            job.end(GRACE_S)
        newest = reknit.latest(root / "steps")
        saved = int(Path(newest).name.removeprefix("step_")) if newest else 0
        fixed = [f"--root={root}", f"--ledger={ledgers[1]}"]
        with Job("two", feed, fixed, world=2, logs=self.folder) as job:
            job.wait(TIMEOUT_S)
        before = [batch for n in range(4) for batch in read(ledgers[0], n)]
        kept = [batch["samples"] for batch in before if batch["step"] <= saved]
        after = [batch["samples"] for n in range(2) for batch in read(ledgers[1], n)]
        self.check(
            "kill 4 ranks that read documents",
            "batches lost",
            f"{len(before) - len(kept)} of {len(before)} lost",
            0 < len(kept) < len(before),
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


def read(ledger: Path, rank: int) -> list[dict[str, Any]]:
    """Return the batches that a rank wrote down, but for a line that is still being written."""
    path = Path(f"{ledger}-{rank}.jsonl")
    lines = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in lines[: lines.rfind("\n") + 1].splitlines()]


def by_source(batches: Sequence[Any]) -> dict[int, list[Any]]:
    """Return what was consumed of each source, in the order in which it was."""
    found: dict[int, list[Any]] = {}
    for samples in batches:
        for row in samples:
            found.setdefault(row[COLUMNS.index("source")], []).append(row)
    return found


PARTS = (
    Demo.uninterrupted,
    Demo.lost_rank,
    Demo.orphaned,
    Demo.resumed,
    Demo.moved,
    Demo.one_process,
    Demo.fed,
)


def run(folder: Path) -> int:
    """Run all parts in `folder`, print the table, and return the exit status."""
    demo = Demo(folder)
    start = time.monotonic()
    try:
        for part in PARTS:
            print(f"{time.monotonic() - start:5.1f} s  {part.__name__.replace('_', ' ')} ...", flush=True)
            part(demo)
    except JobFailed as error:
        demo.check("run to the end", "done", "stopped; see above", False)
        print(error, file=sys.stderr)
    print(f"{time.monotonic() - start:5.1f} s  done\n\n{table(demo.checks)}\n")
    wrong = sum(not check.ok for check in demo.checks)
    print(f"{wrong} of {len(demo.checks)} are not true" if wrong else f"all {len(demo.checks)} are true")
    return 1 if wrong else 0


def main() -> int:
    """Parse the command line, and make and remove the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in DIR, new or empty, and keep it")
    args = parser.parse_args()
    # Ended from outside, as by a time limit, the ranks must go too: unwind instead of dying on the spot.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = args.keep or Path(tempfile.mkdtemp(prefix="reknit-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"{folder} is not empty")
    try:
        return run(folder.resolve())
    finally:
        if args.keep:
            print(f"checkpoints, journals and output of all ranks are in {folder}")
        else:
            shutil.rmtree(folder)


if __name__ == "__main__":
    raise SystemExit(main())
