"""Power that goes off while a checkpoint is saved: ``python -m tests.nightly.power_cut --cuts 20``.

A machine of user-mode Linux saves without pause to a disk of its own, or to an NFS that it serves itself.  It
is killed at a random moment, which loses all bytes that its kernel had not written to the disk.  It is
started again with that disk.  Each checkpoint must then load bit-equal or not exist, and exist if its save
had returned.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import reknit
from reknit.errors import CheckpointNotFoundError
from tests.nightly.machine import Machine

PLACES = {"ext4": "$DISK", "NFS 3": "$VIEWS/a-v3", "NFS 4.2": "$VIEWS/b-v4"}
STEPS = 60
REPLACED = "replaced"
"""The folder of the checkpoint that every other save replaces; the others go to folders of their own."""
_LATEST_S = 3.0
_RECORD = Path("/run/spool/told")


def state(number: int) -> dict[str, Any]:
    """Return the state of save number `number`."""
    rng = np.random.default_rng(number)
    return {
        "model": {f"w{k}": rng.standard_normal(200_000) for k in range(3)},
        "optimizer": {f"w{k}": rng.integers(0, 256, 300_000, np.uint8) for k in range(2)},
        "own": {"number": number, "text": "x" * 1000},
    }


def place(number: int) -> str:
    """Return the name of the folder of save number `number`."""
    return REPLACED if number % 2 else f"step-{number}"


def save(root: Path, durability: Any) -> None:
    """Save one after another, and record the beginning and the return of each."""
    options = reknit.SaveOptions(durability=durability)
    with open(_RECORD, "w", encoding="utf-8") as record:
        for number in range(STEPS):
            for word in ("begun", "saved"):
                if word == "saved":
                    reknit.save(
                        root / place(number), state(number), options=options, overwrite=bool(number % 2)
                    )
                record.write(f"{word} {number}\n")
                record.flush()
                os.fsync(record.fileno())  # it must be outside before the power is gone


def found(path: Path) -> int | None:
    """Return the number of the save of a checkpoint, None without one.  Raises an error if it is damaged."""
    target = state(0)
    try:
        reknit.load(path, target)
    except CheckpointNotFoundError:
        return None
    number = int(target["own"]["number"])
    wanted = state(number)
    assert target["own"] == wanted["own"], path
    for item in ("model", "optimizer"):
        for name, value in wanted[item].items():
            assert np.array_equal(target[item][name], value), (path, item, name)
    return number


def check(root: Path, begun: int, saved: int) -> None:
    """Check all checkpoints after save number `begun` was begun, and number `saved` had returned."""
    steps = [number for number in range(0, STEPS, 2) if found(root / place(number)) is not None]
    replaced = found(root / REPLACED)
    print(f"save {begun} was begun, {saved} had returned; found {steps} and, replaced, {replaced}")
    wrong = [number for number in steps if found(root / place(number)) != number or number > begun]
    lost = [number for number in range(0, saved + 1, 2) if number not in steps]
    last = saved if saved % 2 else saved - 1
    if last > 0 and (replaced is None or not last <= replaced <= begun):
        lost.append(last)
    if wrong or lost:
        sys.exit(f"FAILED: lost {lost}, wrong {wrong}")
    # The next save to the place of an interrupted one deletes its files.
    for number in range(begun + 1):
        if found(root / place(number)) is None:
            reknit.save(root / place(number), state(number))
            assert found(root / place(number)) == number
            assert reknit.verify(root / place(number)).ok


def cut_once(machine: Machine, name: str, kind: str, rng: random.Random, durability: str) -> str:
    """Save, cut, and check; return the outcome of the save that was cut short."""
    record = Path(machine.spool, "told")
    record.unlink(missing_ok=True)
    root, module = f'"{PLACES[kind]}/{name}"', "tests.nightly.power_cut"
    machine.start(f"{machine.python(module, '--durability', durability, '--save')} {root}")
    end = time.monotonic() + 60
    while not (record.exists() and "saved 0" in record.read_text()):
        if time.monotonic() > end:
            raise TimeoutError("the machine does not save")
        time.sleep(0.01)
    time.sleep(rng.random() * _LATEST_S)
    machine.cut()
    last = dict(line.split() for line in record.read_text().splitlines())
    fsck = shutil.which("e2fsck", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    done = subprocess.run(
        [str(fsck), "-f", "-y", str(machine.disk)], capture_output=True, text=True, check=False
    )
    if done.returncode & ~1:
        raise RuntimeError(f"the disk is damaged: {done.stdout}{done.stderr}")
    machine.boot()
    begun, saved = int(last["begun"]), int(last["saved"])
    order = f"{machine.python(module, '--begun', begun, '--saved', saved, '--check')} {root} && rm -rf {root}"
    code, said = machine.run(order)
    print(f"{kind:8} {said.strip()}", flush=True)
    if code:
        return "FAILED"
    return "between two" if begun == saved else "during a save"


def main() -> int:
    """Cut the power many times; fail when a checkpoint is lost or damaged."""
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.power_cut", description=__doc__)
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86_400)
    parser.add_argument("--durability", default="power", help="'process' shows the losses without syncs")
    inside = parser.add_argument_group("inside of the machine")
    inside.add_argument("--save", type=Path)
    inside.add_argument("--check", type=Path)
    inside.add_argument("--begun", type=int)
    inside.add_argument("--saved", type=int)
    arguments = parser.parse_args()
    if arguments.save:
        save(arguments.save, arguments.durability)
        return 0
    if arguments.check:
        check(arguments.check, arguments.begun, arguments.saved)
        return 0
    rng, machine, outcomes = random.Random(arguments.seed), Machine(), Counter[str]()
    print(f"seed {arguments.seed}")
    machine.down()  # to begin with an empty disk
    machine.up()
    try:
        for number in range(arguments.cuts):
            kind = list(PLACES)[number % len(PLACES)]
            outcomes[cut_once(machine, f"run-{number}", kind, rng, arguments.durability)] += 1
    finally:
        machine.down()
    print(f"{arguments.cuts} cuts: {dict(outcomes)}")
    return 1 if outcomes["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
