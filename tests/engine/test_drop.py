"""Items of a checkpoint are removed, and the others stay loadable at every moment."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.engine.stored import manifest_content, notes
from reknit.engine.stored.at_path import committed
from reknit.engine.stored.delete import drop
from reknit.errors import DroppedError, MismatchError, ReknitError, UsageError
from reknit.policies import latest, without
from reknit.runs.retention import Retention
from reknit.storage.registry import open_storage
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.testing.world import run_ranks
from tests.at_operation import AtOperation

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.group import Group


def state(fill: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": np.full(5000, fill), "n": fill}, "optimizer": {"m": np.full(5000, -fill)}}


def model(path: Path) -> float:
    """Load the model, whose numbers are all the same, and return that number."""
    loaded = {"model": state()["model"]}
    reknit.load(path, loaded)
    (value,) = set(loaded["model"]["w"].tolist())
    assert loaded["model"]["n"] == value
    return float(value)


def files(path: Path) -> list[str]:
    return sorted(file.relative_to(path).parts[0] for file in path.rglob("*") if file.is_file())


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint whose index lists its files, as if they were many."""
    monkeypatch.setattr(manifest_content, "MAX_LISTED_FILES", -1)
    reknit.save(tmp_path / "step_00000003", state(3.0), step=3, metadata={"metrics": {"loss": 0.5}})
    return tmp_path / "step_00000003"


def test_an_item_goes_and_all_else_stays_as_it_was(path: Path) -> None:
    (before,) = reknit.steps(path.parent)
    reknit.note(path, {"score": 1.0})
    would = reknit.delete(path, items=["optimizer"], dry_run=True)
    assert "optimizer" in files(path)
    assert reknit.delete(path, items=["optimizer"]) == would > 40_000
    assert not {"optimizer", "pending"} & set(files(path))
    assert files(path).count("manifest.json") == 1
    assert len([name for name in files(path) if name.startswith("index")]) == 1
    assert model(path) == 3.0
    assert reknit.verify(path, "data").ok
    (after,) = reknit.steps(path.parent)
    assert (after.items, after.dropped) == (("model",), ("optimizer",))
    assert (after.step, after.created, after.write_id) == (before.step, before.created, before.write_id)
    assert after.metrics == {"loss": 0.5, "score": 1.0}
    assert reknit.delete(path, items=["optimizer"]) == 0
    assert reknit.unpin(path) is False
    reknit.pin(path)
    with pytest.raises(UsageError, match="it is pinned"):
        reknit.delete(path)
    reknit.unpin(path)
    reknit.delete(path)
    assert not path.exists()


def test_who_wants_a_dropped_item_is_told_so_on_all_ranks(path: Path) -> None:
    reknit.delete(path, items=["optimizer"])

    def load(group: Group) -> str:
        with pytest.raises(DroppedError, match=r"was dropped 'optimizer' on \d{4}-\d\d-\d\d") as caught:
            reknit.load(path, state(), group=group)
        return type(caught.value).__name__

    assert run_ranks(2, load) == ["DroppedError"] * 2
    with reknit.open(path) as opened, pytest.raises(DroppedError, match="was dropped"):
        opened.read_all(items=["optimizer"])
    loaded = state()
    reknit.load(path, loaded, strict=False)
    assert loaded["model"]["w"][0] == 3.0


def test_what_was_dropped_comes_back_with_a_save(path: Path) -> None:
    reknit.delete(path, items=["optimizer"])
    reknit.save(path, state(4.0), step=3, overwrite=True)
    assert reknit.steps(path.parent)[0].dropped == ()
    reknit.load(path, state())
    assert reknit.verify(path, "data").ok


def test_a_checkpoint_without_an_item_is_copied_like_any_other(path: Path, tmp_path: Path) -> None:
    reknit.delete(path, items=["optimizer"])
    reknit.promote(path, tmp_path / "copy")
    assert model(tmp_path / "copy") == 3.0
    assert reknit.verify(tmp_path / "copy", "data").ok


def test_what_cannot_be_dropped_is_told_before_anything_has_changed(path: Path) -> None:
    with pytest.raises(MismatchError, match="no item 'typo'"):
        reknit.delete(path, items=["typo"])
    with pytest.raises(UsageError, match="all that the checkpoint"):
        reknit.delete(path, items=["model", "optimizer"])
    with pytest.raises(UsageError, match="list of names"):
        reknit.delete(path, items="optimizer")
    (path.parent / "link").symlink_to(path)
    with pytest.raises(UsageError, match="is a link"):
        reknit.delete(path.parent / "link", items=["optimizer"])
    reknit.load(path, state())


def test_after_a_fault_anywhere_it_loads_and_the_next_try_ends_it(path: Path) -> None:
    number, fired = 0, True
    while fired:
        number += 1
        reknit.save(path, state(float(number)), step=3, overwrite=True)
        faulty = FaultyStorage(open_storage(path), plan=[Fault("error", number)])
        try:
            drop(faulty, ["optimizer"])
        except ReknitError:
            assert model(path) == number
            if not reknit.steps(path.parent)[0].dropped:
                reknit.load(path, state())
        fired = bool(faulty.fired)
        reknit.delete(path, items=["optimizer"])
        assert model(path) == number
        assert reknit.verify(path, "data").ok
    assert number > 15


def test_what_a_killed_process_has_left_is_removed_by_the_next_run(path: Path) -> None:
    class Killed(BaseException):
        pass

    def die() -> None:
        raise Killed

    reknit.save(path.parent / "step_00000009", state(9.0), step=9)
    number, over = 0, False
    while not over:
        number += 1
        reknit.save(path, state(float(number)), step=3, overwrite=True)
        watched = Dying(open_storage(path), number, die)
        with suppress(Killed):
            drop(watched, ["optimizer"])
        over = not watched.happened
        for file in path.rglob("*.*"):
            os.utime(file, (0, 0))
        for _ in range(2):  # the first call may only remove an old marker
            Retention(open_storage(path.parent), latest(9) & without("optimizer", after_hours=1e-9)).prune()
        assert model(path) == number
        assert reknit.steps(path.parent)[0].dropped == ("optimizer",)
        assert "optimizer" not in files(path)
        assert not any(name.startswith("pending") for name in files(path))
    assert number > 15


class Dying(AtOperation):
    """A store that does no operation after the moment of its fault."""

    def intercept(self, name: str, path: str, nbytes: int, whole: Any, half: Any = None) -> Any:
        if self.happened:
            self._happens()
        return super().intercept(name, path, nbytes, whole, half)


@pytest.mark.parametrize("other", ["save", "hold", "drop", "delete"])
def test_whatever_begins_meanwhile_at_any_moment(tmp_path: Path, other: str) -> None:
    path = tmp_path / "one"
    number, over = 0, False
    done: list[str] = []

    def act(saved: str) -> None:
        place = open_storage(path)
        before = not committed(place).dropped
        try:
            if other == "save":
                reknit.save(path, state(7.0), overwrite=True)
            elif other == "hold":
                notes.Hold(place, saved, 60.0)
            elif other == "drop":
                drop(place, ["optimizer"])
            else:
                reknit.delete(path)
        except ReknitError:
            return
        if other != "hold" or before:
            done.append(other)

    while not over:
        number += 1
        done.clear()
        reknit.save(path, state(3.0), overwrite=True)
        saved = committed(open_storage(path)).save_id
        watched = AtOperation(open_storage(path), number, partial(act, saved))
        try:
            drop(watched, ["optimizer"], saved)
        except ReknitError:
            pass
        else:
            done.append("this")
        over = not watched.happened
        if "delete" in done:
            assert not (path / "manifest.json").exists()
            continue
        if "save" in done:
            reknit.load(path, state())
        if {"hold", "this"} <= set(done):
            assert number == 0, "it was held when items of it were removed"
        assert model(path) == (7.0 if "save" in done else 3.0)
        assert reknit.verify(path, "data").ok
        assert done
    assert number > 15


def test_a_save_that_has_begun_before_the_commit_is_made_way_for(tmp_path: Path) -> None:
    """That save may commit at any moment, and could not see a marker that came after its own."""
    path, theirs, number, refused = tmp_path / "one", f"pending.{9:016x}.{'b' * 8}", 0, 0
    while True:
        number += 1
        reknit.save(path, state(3.0), overwrite=True)
        first: list[bool] = []

        def begin(first: list[bool] = first) -> None:
            dropped = committed(open_storage(path)).dropped
            first.append(not dropped and not list(path.glob("pending.*")))
            (path / theirs).touch()

        watched = AtOperation(open_storage(path), number, begin)
        try:
            drop(watched, ["optimizer"])
        except UsageError:
            refused += 1
        else:
            assert not any(first), number
        if not watched.happened:
            break
        assert (path / theirs).exists()
        (path / theirs).unlink()
        assert not list(path.glob("pending.*"))
        assert model(path) == 3.0
    assert refused > 5
