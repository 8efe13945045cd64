"""Train, kill, resume, reshard, check and export, with real processes on this machine.

  1. Four ranks (FSDP2) train a small language model on the sources of Python's standard library.
  2. The same again, but one rank is killed with SIGKILL in the middle of a save.
  3. Four ranks resume that run from its newest checkpoint.  Each loss and the final state (weights,
     optimizer, scheduler, loader, random generators) must equal those of the first run, bit for bit.
  4. Two ranks with tensor parallelism (FSDP2 x TP) go on from a checkpoint of the four.  Their losses must
     follow the first run's, but for rounding.  The random state of four ranks means nothing on two, and the
     load report has to say that it was left alone; so the steps compared are those without dropout.
  5. One process opens the checkpoint that the two saved: reads a slice, loads the model alone, verifies every
     byte, exports to Hugging Face format, compares with transformers, and is refused a damaged copy.

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
from typing import Any

from checks import Check, read_checks, table
from ranks import Job, JobFailed

import reknit

HERE = Path(__file__).parent
STEPS, SAVE_EVERY, DROPOUT_STEPS = 24, 4, 16
KILLED_RANK, KILLED_AT = 2, 12
TOLERANCE = 1e-3
TIMEOUT_S = 180.0
GRACE_S = 30.0


@dataclass
class Journal:
    """What the first rank of a run wrote down."""

    losses: dict[int, float] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""


def read_journal(path: Path) -> Journal:
    """Read the JSON lines of a run."""
    journal = Journal()
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            journal.losses[record["step"]] = record["loss"]
        elif "loaded" in record:
            journal.loaded = record
        else:
            journal.fingerprint = record["fingerprint"]
    return journal


class Demo:
    """The five parts; each adds to `checks`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checks: list[Check] = []

    def check(self, what: str, expected: str, measured: object, ok: bool) -> None:
        """Note one line of the table."""
        self.checks.append(Check(what, expected, str(measured), ok))

    def train(self, name: str, run: str, *arguments: str, world: int = 4) -> Job:
        """Return the job that trains in the folder `run`."""
        fixed = [f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", f"--dropout-steps={DROPOUT_STEPS}"]
        places = [f"--root={self.folder / run}", f"--journal={self.folder / name}.jsonl"]
        return Job(name, HERE / "train.py", [*places, *fixed, *arguments], world=world, logs=self.folder)

    def journal(self, name: str) -> Journal:
        """Return what a run wrote down."""
        return read_journal(self.folder / f"{name}.jsonl")

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

    def killed(self) -> None:
        """Train again, and kill a rank as soon as a save has begun to write."""
        target = self.folder / "run" / f"step_{KILLED_AT:08d}"
        with self.train("killed", "run") as job:
            job.wait_until(target.exists, TIMEOUT_S)
            job.kill(KILLED_RANK)
            start = time.monotonic()
            stuck = job.end(GRACE_S)
            took_s = time.monotonic() - start
        codes = [process.returncode for process in job.processes]
        told = sum(f"CommError: rank {KILLED_RANK} is gone" in job.said(rank) for rank in range(len(codes)))
        # The kill may come too late: then the save is whole, and the others find out at their next step.
        committed = (target / "manifest.json").exists()
        errors = told if told or not committed else sum(code > 0 for code in codes)
        self.check(
            f"kill rank {KILLED_RANK} while it saves step {KILLED_AT}",
            f"3 errors within {GRACE_S:.0f} s",
            f"{errors} {'CommError' if told else 'errors'}, {took_s:.1f} s",
            codes[KILLED_RANK] == -signal.SIGKILL and errors == 3 and 0 not in codes and not stuck,
        )
        expected = KILLED_AT if committed else KILLED_AT - SAVE_EVERY
        newest = reknit.latest(self.folder / "run")
        step = reknit.open(newest).step if newest else None
        sound = newest is not None and reknit.verify(newest, "data").ok
        self.check(
            "  newest checkpoint",
            f"step {expected}, sound",
            f"step {step}, {'sound' if sound else 'not sound'}",
            sound and step == expected,
        )

    def resumed(self) -> None:
        """Go on where the killed run was, on the same layout."""
        with self.train("resumed", "run") as job:
            job.wait(TIMEOUT_S)
        whole, resumed = self.journal("whole"), self.journal("resumed")
        start = resumed.loaded["step"]
        equal = sum(whole.losses[step] == resumed.losses.get(step) for step in range(start + 1, STEPS + 1))
        self.check(
            f"resume from step {start} on 4 ranks",
            "losses equal, all bits",
            f"{equal} of {STEPS - start} equal",
            equal == STEPS - start > 0,
        )
        same = whole.fingerprint == resumed.fingerprint != ""
        self.check("  hash of the whole final state", "equal", "equal" if same else "differs", same)
        notes = resumed.loaded["notes"]
        self.check("  left alone by the load", "nothing", notes or "nothing", not notes)

    def moved(self) -> None:
        """Go on from a checkpoint of four ranks on two, that share each matrix."""
        source = self.folder / "run" / f"step_{DROPOUT_STEPS:08d}"
        with self.train("moved", "moved", f"--resume={source}", "--tp=2", world=2) as job:
            job.wait(TIMEOUT_S)
        whole, moved = self.journal("whole").losses, self.journal("moved")
        steps = range(DROPOUT_STEPS + 1, STEPS + 1)
        worst = max(abs(whole[step] - moved.losses[step]) for step in steps)
        self.check(
            f"resume from step {DROPOUT_STEPS} on 2, FSDP2 x TP",
            f"losses within {TOLERANCE}",
            f"{worst:.1e} apart, {len(steps)} steps",
            moved.loaded["step"] == DROPOUT_STEPS and worst <= TOLERANCE,
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


PARTS = (Demo.uninterrupted, Demo.killed, Demo.resumed, Demo.moved, Demo.one_process)


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
