"""Wherever in its saves and removals a run dies, the next one goes on from the last step that was saved."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeVar

import pytest

import reknit
from reknit import Checkpointer, SaveOptions
from reknit.errors import StorageError
from reknit.policies import at, best, every, latest
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from reknit.storage.wrappers.forwarding import ForwardingStorage
from tests.running.examples import thinned
from tests.runs.pieces import damage, numbers, state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.options import Durability
    from reknit.storage.base import Storage
    from reknit.storage.wrappers.forwarding import Half

T = TypeVar("T")

SCHEME = "mortal"
KEEP = (latest(1), latest(2), best(1, "loss"), every(4), at(3), latest(1) | best(2, "loss"))
CHANGES = ("create", "write", "finish", "put", "commit", "delete")
QUICK = SaveOptions(durability="process", threads=1)


class Life:
    """How many changes on disk a run still makes before it dies; after that it does nothing any more."""

    left = 0

    def goes_on(self, name: str) -> bool:
        """Count an operation, and return whether the run lives to do it."""
        self.left -= name in CHANGES
        return self.left >= 0


life = Life()


class Mortal(ForwardingStorage):
    """A folder of a process that dies: from then on no clean-up changes it."""

    def around(self, inner: Storage, path: str) -> Mortal:
        """Return a store below."""
        return Mortal(inner)

    def intercept(self, name: str, path: str, nbytes: int, whole: Callable[[], T], half: Half = None) -> T:
        """Do the operation as long as the process lives."""
        if life.goes_on(name):
            return whole()
        raise StorageError("dead", path=path)


def open_mortal(url: str, durability: Durability) -> Mortal:
    return Mortal(LocalStorage(url.partition("://")[2], durability=durability))


def whole(root: Path) -> set[int]:
    """Return the steps of which every byte is as it was saved."""
    found = {each.step: each.path for each in reknit.steps(root)}
    return {step for step, path in found.items() if step is not None and reknit.verify(path, "data").ok}


def live(root: Path, rng: random.Random) -> int | None:
    """Resume and train until death, or until enough is saved; return the last step that was saved."""
    life.left = rng.randrange(2, 70)
    saved, keep = None, rng.choice(KEEP)
    try:
        with Checkpointer(f"{SCHEME}://{root}", keep=keep, wait=True, options=QUICK) as run:
            step = run.resume(state())
            while len(numbers(root)) < 9:
                step += rng.randrange(3)
                run.save(step, state(float(step)), {"loss": rng.random()})
                saved = step
                step += 1
                if rng.random() < 0.5:
                    run.wait()
    except StorageError as error:
        if "dead" not in error.message:
            raise
    return saved


def expire(root: Path) -> None:
    """Let the leases and removals of a process that has died end; others would wait for a minute."""
    for note in (*root.glob("*/.notes/lease.*"), *root.glob("*/.notes/removal.*")):
        note.unlink()


@pytest.mark.parametrize("seed", thinned((12, 14, 13, 15), 2))
def test_the_last_step_that_was_saved_and_is_whole_is_what_the_next_run_goes_on_from(
    tmp_path: Path, seed: int
) -> None:
    register(SCHEME, open_mortal)
    rng, root, last = random.Random(seed), tmp_path / "run", None
    for _ in range(8):
        saved = live(root, rng)
        expire(root)
        there = whole(root)
        last = last if saved is None else saved
        assert last is None or last in there
        if len(there) > 1 and rng.random() < 0.4:
            damage(root / f"step_{max(there):08d}")
            there -= {max(there)}
        if there:
            held = state()
            with Checkpointer(root) as run:
                assert run.resume(held) == max(there) + 1
            assert held["model"]["w"][0] == max(there)
        last = max(there, default=None)
