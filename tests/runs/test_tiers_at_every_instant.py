"""Wherever a run with tiers dies, the next goes on from the newest whole step, and each tier catches up."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING

import pytest

import reknit
from reknit import Checkpointer, Tier
from reknit.engine.stored.notes import held_by
from reknit.errors import StorageError
from reknit.policies import latest
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from tests.running.examples import thinned
from tests.runs.pieces import damage, state
from tests.runs.test_at_every_instant import QUICK, SCHEME, life, open_mortal, whole

if TYPE_CHECKING:
    from pathlib import Path

ENDLESS = 1 << 30


def tiers_of(root: Path, paces: list[tuple[int, int | None]]) -> list[Tier]:
    return [
        Tier(f"{SCHEME}://{root}/{at}", every=every, keep=None if keep is None else latest(keep))
        for at, (every, keep) in enumerate(paces)
    ]


def live(root: Path, paces: list[tuple[int, int | None]], rng: random.Random) -> int | None:
    """Resume and train until death, or for some steps; return the last step that was saved."""
    life.left = rng.randrange(2, 120)
    saved = None
    try:
        with Checkpointer(tiers=tiers_of(root, paces), wait=True, options=QUICK) as run:
            first = run.resume(state())
            for step in range(first, first + rng.randrange(1, 12)):
                if run.save(step, state(float(step))) is not None:
                    saved = step
    except StorageError as error:
        if "dead" not in error.message:
            raise
    return saved


def behind(root: Path, paces: list[tuple[int, int | None]]) -> list[tuple[int, int]]:
    """Return the steps that a tier should have, by the newer steps below it, with the tier's number."""
    found = []
    for tier, (every, _) in enumerate(paces[1:], start=1):
        newest = max(whole(root / str(tier)), default=0)
        below = set().union(*(whole(root / str(at)) for at in range(tier)))
        found += [(step, tier) for step in below if step // every > newest // every]
    return found


def free(root: Path) -> list[int]:
    """Return the steps without a pin or a lease; a run that dies leaves the lease of a promotion."""
    steps = [(each.step, LocalStorage(each.path)) for each in reknit.steps(root)]
    return [step for step, folder in steps if step is not None and held_by(folder, None) is None]


@pytest.mark.parametrize("seed", thinned(range(20, 24), 4))
def test_a_whole_step_is_always_there_and_each_tier_catches_up(tmp_path: Path, seed: int) -> None:
    register(SCHEME, open_mortal)
    rng = random.Random(seed)
    paces = [(1, rng.choice((1, 2))), (rng.choice((2, 3)), rng.choice((1, 2, None)))]
    if rng.random() < 0.7:
        paces.append((rng.choice((4, 5)), rng.choice((1, None))))
    last = None
    for _ in range(6):
        saved = live(tmp_path, paces, rng)
        last = saved if saved is not None else last
        there = [whole(tmp_path / str(at)) for at in range(len(paces))]
        assert last is None or last in set().union(*there)
        fate = rng.random()
        if fate < 0.2 and any(there[1:]):
            shutil.rmtree(tmp_path / "0", ignore_errors=True)  # the host is gone, and its memory
            there[0] = set()
        elif fate < 0.4 and there[0] and any(there[1:]):
            damage(tmp_path / "0" / f"step_{max(there[0]):08d}")
            there[0] -= {max(there[0])}
        newest = last = max(set().union(*there), default=None)
        life.left = ENDLESS
        held = state()
        with Checkpointer(tiers=tiers_of(tmp_path, paces), wait=True, options=QUICK) as run:
            assert run.resume(held) == (0 if newest is None else newest + 1)
        assert newest is None or held["model"]["w"][0] == newest
        assert not behind(tmp_path, paces)
        for at, (_, keep) in enumerate(paces):
            older = [step for step in free(tmp_path / str(at)) if newest is not None and step <= newest]
            assert keep is None or fate < 0.4 or len(older) <= keep
