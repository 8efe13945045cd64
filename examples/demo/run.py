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
  7. Four ranks with worker processes read documents into token buffers, and are all killed in their second
     save.  Two ranks go on from the first.  Every document must have been consumed exactly once, those of a
     source in their order.

A table shows what was expected and what was measured; the exit status is 0 only if all of it is true.  Where
it is not, the last lines of all ranks of that part are printed.  The last checkpoint is kept.  Takes about a
minute on two cores.  Needs no GPU and no network.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from checks import table
from parts import PARTS, Demo
from ranks import JobFailed

KEPT = Path(__file__).resolve().parents[2] / "build" / "demo"
"""Where the last checkpoint stays, unless all is kept elsewhere."""

SHOWN = """\
What was shown
  - A save is written while training goes on, and is finished even when all trainers are dead.
  - A lost rank is an error on all others within seconds, and the checkpoint before it stays whole.
  - Four ranks resume bit for bit; two ranks with tensor parallelism go on from the same files.
  - Four ranks read documents, two go on, and each document is read exactly once.
  - One flipped bit is noticed, and its file is named."""


def run(folder: Path) -> int:
    """Run all parts in `folder`, print the table, and return the exit status."""
    demo = Demo(folder)
    start = time.monotonic()
    for number, (title, part) in enumerate(PARTS.items(), 1):
        print(f"{time.monotonic() - start:5.1f} s  {number} of {len(PARTS)}: {title}", flush=True)
        num_checks, num_jobs = len(demo.checks), len(demo.jobs)
        stopped = False
        try:
            part(demo)
        except JobFailed as error:
            demo.check(title, "done", str(error), False)
            stopped = True
        if not all(check.ok for check in demo.checks[num_checks:]):
            print(*(job.last_words() for job in demo.jobs[num_jobs:]), sep="\n", file=sys.stderr, flush=True)
        if stopped:  # the parts that follow go on from what this one leaves
            break
    print(f"{time.monotonic() - start:5.1f} s  done\n\n{table(demo.checks)}\n")
    wrong = sum(not check.ok for check in demo.checks)
    print(f"{wrong} of {len(demo.checks)} are not true" if wrong else f"all {len(demo.checks)} are true")
    return 1 if wrong else 0


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of the last part that saved one with a model."""
    return max((path.parent for path in folder.glob("moved/step_*/manifest.json")), default=None)


def keep(checkpoint: Path) -> Path:
    """Move a checkpoint to where it stays until the demo is run again; return its new folder."""
    KEPT.mkdir(parents=True, exist_ok=True)
    kept = KEPT / checkpoint.name
    shutil.rmtree(kept, ignore_errors=True)
    return Path(shutil.move(checkpoint, kept))


def ending(checkpoint: Path) -> str:
    """Return what was shown, where the checkpoint lies, and the commands that look at it."""
    place = shlex.quote(os.path.relpath(checkpoint))
    command = shlex.quote(os.path.relpath(Path(sys.executable).with_name("reknit")))
    return "\n".join(
        (
            f"\n{SHOWN}\n\nThe last checkpoint, of two ranks, lies in {place}.  Look at it:\n",
            f"    {command} show {place} --tensors 'model/*'",
            f"    {command} verify {place} --data",
            f"    {command} export hf {place} weights",
        )
    )


def main() -> int:
    """Parse the command line, make the folder, and keep what is wanted of it."""
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
    folder = folder.resolve()
    try:
        status = run(folder)
        checkpoint = last_checkpoint(folder)
        if checkpoint is not None and status == 0:
            print(ending(checkpoint if args.keep else keep(checkpoint)))
    except KeyboardInterrupt:
        return 130
    else:
        return status
    finally:
        if args.keep:
            print(f"\nCheckpoints, journals and the output of all ranks are in {args.keep}.")
        else:
            shutil.rmtree(folder)


if __name__ == "__main__":
    raise SystemExit(main())
