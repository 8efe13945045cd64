"""A checkpoint moves to a cold place, and loads from its path at every moment."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.cli.main import main
from reknit.engine.stored import manifest_content
from reknit.engine.stored.moving import delete_moved, move
from reknit.engine.stored.promote import Promotion
from reknit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptError,
    StorageError,
    UsageError,
    VersionError,
)
from reknit.events.phase import Recorder
from reknit.format import checksum
from reknit.integrations.hugging_face.export import export_hf
from reknit.options import LoadOptions, SaveOptions
from reknit.storage.registry import open_storage, register
from reknit.testing.world import run_ranks
from tests.at_operation import AtOperation
from tests.runs.pieces import damage
from tests.runs.test_at_every_instant import SCHEME, life, open_mortal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.comm.group import Group


ALONE = LoadOptions(threads=1)


def state(fill: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": np.full(5000, fill), "n": fill}, "extra": {"m": np.full(100, -fill)}}


def value(path: Path | str, **options: Any) -> float:
    loaded = state()
    reknit.load(path, loaded, **options)
    (found,) = set(loaded["model"]["w"].tolist())
    assert loaded["model"]["n"] == found
    return float(found)


def files(path: Path) -> list[str]:
    return sorted(file.relative_to(path).parts[0] for file in path.rglob("*") if file.is_file())


@pytest.fixture
def hot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint whose index lists its files, as if they were many."""
    monkeypatch.setattr(manifest_content, "MAX_LISTED_FILES", -1)
    path = tmp_path / "hot" / "step_00000003"
    reknit.save(path, state(3.0), step=3, metadata={"metrics": {"loss": 0.5}})
    return path


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold" / "step_00000003"


def test_all_doors_find_what_has_moved(hot: Path, cold: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reknit.note(hot, {"score": 1.0})
    (before,) = reknit.steps(hot.parent)
    assert reknit.cool(hot, cold) == before.nbytes
    assert [name for name in files(hot) if name != ".notes"] == ["manifest.json"]
    (after,) = reknit.steps(hot.parent)
    assert (after.moved_to, after.write_id, after.metrics) == (str(cold), before.write_id, before.metrics)
    assert (after.nbytes, after.items) == (before.nbytes, before.items)
    assert value(hot) == 3.0
    assert reknit.latest(hot.parent) == str(hot)
    assert reknit.verify(hot, "data").ok
    with reknit.open(hot) as opened:
        assert opened.read("model", "w")[0] == 3.0
    assert next(iter(reknit.watch(hot.parent, idle_s=0.1))).path == str(hot)
    for command in (["ls", str(hot.parent)], ["show", str(hot)], ["verify", "--data", str(hot)]):
        assert main(command) == 0
    assert f"(at {cold})" in capsys.readouterr().out
    assert main(["export", "hf", str(hot), str(hot.parents[1] / "exported"), "--item", "extra"]) == 0
    assert main(["gc", str(hot.parent)]) == 0


def test_ranks_load_together_what_has_moved(hot: Path, cold: Path) -> None:
    reknit.cool(hot, cold)

    def load(group: Group) -> float:
        return value(hot, group=group)

    assert run_ranks(2, load) == [3.0, 3.0]


def test_a_reader_that_has_begun_reads_on(hot: Path, cold: Path) -> None:
    with reknit.open(hot) as opened:
        reknit.cool(hot, cold)
        assert opened.read("model", "w")[0] == 3.0
        assert opened.read("extra", "m")[0] == -3.0


def test_a_checkpoint_goes_with_what_has_moved(hot: Path, cold: Path) -> None:
    reknit.cool(hot, cold)
    with pytest.raises(UsageError, match=r"moved from .*hot/step_00000003"):
        reknit.delete(cold)
    freed = reknit.delete(hot, dry_run=True)
    assert value(hot) == 3.0
    assert reknit.delete(hot) == freed > 40_000
    assert not hot.exists()
    assert not cold.exists()


def test_what_is_missing_is_named_where_it_has_moved_to(hot: Path, cold: Path) -> None:
    reknit.cool(hot, cold)
    shutil.rmtree(cold)
    with pytest.raises(CorruptError, match=rf"is missing .*{cold}"):
        value(hot)


def test_it_comes_back_by_a_promotion(hot: Path, cold: Path) -> None:
    reknit.cool(hot, cold)
    reknit.promote(cold, hot, overwrite=True)
    reknit.unpin(cold)
    reknit.delete(cold)
    assert value(hot) == 3.0
    assert reknit.steps(hot.parent)[0].moved_to is None


def test_a_promotion_copies_the_files_from_where_they_are(hot: Path, cold: Path, tmp_path: Path) -> None:
    reknit.cool(hot, cold)
    reknit.promote(hot, tmp_path / "third")
    with reknit.open(tmp_path / "third") as opened:
        assert opened.manifest.moved_to is None
    reknit.delete(hot)
    assert value(tmp_path / "third") == 3.0


def gc(root: Path) -> None:
    assert main(["gc", "--older-than", "0", "--delete", str(root)]) == 0


@pytest.mark.parametrize("then", ["gc", "move", "remove"])
def test_the_copy_of_what_a_save_has_replaced_goes(hot: Path, cold: Path, then: str) -> None:
    reknit.cool(hot, cold)
    reknit.save(hot, state(4.0), step=3, overwrite=True)
    assert value(hot) == 4.0
    assert value(cold) == 3.0
    if then == "gc":
        gc(hot.parent)
    elif then == "move":
        reknit.cool(hot, cold)
        assert value(cold) == 4.0
    else:
        reknit.delete(hot)
        assert not hot.exists()
    assert cold.exists() is (then == "move")
    assert then == "remove" or value(hot) == 4.0


@pytest.mark.parametrize("then", ["gc", "move", "remove"])
def test_a_copied_folder_does_not_take_the_cold_files_from_the_first(
    hot: Path, cold: Path, tmp_path: Path, then: str
) -> None:
    reknit.cool(hot, cold)
    fork = tmp_path / "fork" / hot.name
    shutil.copytree(hot, fork)
    if then != "remove":
        reknit.save(fork, state(4.0), step=3, overwrite=True)
    if then == "gc":
        gc(fork.parent)
    elif then == "move":
        with pytest.raises(CheckpointExistsError):
            reknit.cool(fork, cold)
    else:
        reknit.delete(fork)
        assert not fork.exists()
    assert value(hot) == 3.0
    reknit.delete(hot)
    assert not cold.exists()


def test_a_damaged_copy_does_not_take_the_place_of_what_is_whole(hot: Path, cold: Path) -> None:
    reknit.promote(hot, cold)
    damage(cold)
    with pytest.raises(CorruptError, match="differs from it, so that the original stays"):
        reknit.cool(hot, cold)
    assert value(hot) == 3.0
    assert reknit.steps(hot.parent)[0].moved_to is None


def test_what_cannot_move_stays(hot: Path, cold: Path, tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="it names an object store")
    reknit.pin(hot)
    with pytest.raises(UsageError, match="pinned"):
        reknit.cool(hot, cold)
    reknit.unpin(hot)
    with pytest.raises(UsageError, match="has options"):
        reknit.cool(hot, "s3://bucket/x?retry_s=1")
    with pytest.raises(CheckpointNotFoundError):
        reknit.cool(tmp_path / "nothing", cold)
    with pytest.raises(UsageError, match="where it is"):
        reknit.cool(hot, hot)
    for nested in (hot.parent, hot / "below"):
        with pytest.raises(UsageError, match="above or below"):
            reknit.cool(hot, nested)
        with pytest.raises(UsageError, match="above or below"):
            reknit.promote(hot, nested)
    reknit.cool(hot, cold)
    with pytest.raises(UsageError, match=r"moved to .* already"):
        reknit.cool(hot, tmp_path / "other")
    with pytest.raises(UsageError, match="none can be dropped"):
        reknit.delete(hot, items=["extra"])
    assert value(hot) == 3.0


def test_who_does_not_know_of_moves_is_told_so(
    hot: Path, cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reknit.cool(hot, cold)
    assert "moved" in json.loads((hot / "manifest.json").read_text())["requires"]
    monkeypatch.setattr(checksum, "FEATURES", checksum.FEATURES - {"moved"})
    with pytest.raises(VersionError, match="does not support: moved"):
        reknit.load(hot, state())


def expire(path: Path) -> None:
    """Let the leases of processes that have died end."""
    for note in (*path.glob(".notes/lease.*"), *path.glob(".notes/removal.*")):
        note.unlink()


def test_killed_anywhere_it_loads_and_the_next_try_ends_it(tmp_path: Path) -> None:
    register(SCHEME, open_mortal)
    number, ended = 0, False
    while not ended:
        number += 1
        hot, cold = tmp_path / str(number) / "hot", tmp_path / str(number) / "cold"
        life.left = 1 << 30
        reknit.save(hot, state(float(number)))
        life.left = number
        job = Promotion(
            open_mortal(f"{SCHEME}://{hot}", "process"),
            open_mortal(f"{SCHEME}://{cold}", "process"),
            False,
            SaveOptions(),
            Recorder("promote"),
        )
        try:
            move(job, str(cold), open_storage)
            ended = life.left >= 0
        except StorageError as error:
            if "dead" not in error.message:
                raise
        assert value(hot) == number
        expire(hot)
        if number % 2:
            gc(hot)  # of the marker
            reknit.delete(hot)
            assert files(hot) == []
            assert files(cold) == []
            continue
        reknit.cool(hot, cold)
        assert [name for name in files(hot) if name != ".notes"] == ["manifest.json"]
        assert value(hot) == number
        reknit.delete(hot)
        assert files(cold) == []
    assert number > 10


def test_a_removal_that_is_killed_anywhere_leaves_it_whole_or_not_there(tmp_path: Path) -> None:
    register(SCHEME, open_mortal)
    number, ended = 0, False
    while not ended:
        number += 1
        hot, cold = tmp_path / str(number) / "hot", tmp_path / str(number) / "cold"
        life.left = 1 << 30
        reknit.save(hot, state(float(number)))
        reknit.cool(hot, cold)
        dying = open_mortal(f"{SCHEME}://{hot}", "process")
        life.left = number
        try:
            delete_moved(dying, lambda place: open_mortal(f"{SCHEME}://{place}", "process"))
            ended = life.left >= 0
        except StorageError as error:
            if "dead" not in error.message:
                raise
        if (hot / "manifest.json").exists():
            assert value(hot) == number
            expire(hot)
            reknit.delete(hot)
        elif hot.exists():
            for place in (hot, cold):
                expire(place)
            gc(hot.parent)
        assert files(hot) == []
        assert files(cold) == []
    assert number > 10


def test_a_save_that_begins_at_any_moment_of_a_move_is_not_harmed(tmp_path: Path) -> None:
    number, happened = 0, True
    while happened:
        number += 1
        hot, cold = tmp_path / str(number) / "hot", tmp_path / str(number) / "cold"
        reknit.save(hot, state(1.0))
        save = partial(reknit.save, hot, state(2.0), overwrite=True)
        at = AtOperation(open_storage(hot), number, save)
        try:
            move(
                Promotion(at, open_storage(cold), False, SaveOptions(), Recorder("promote")),
                str(cold),
                open_storage,
            )
        except reknit.ReknitError:
            assert at.happened
        happened = at.happened
        assert value(hot) == (2.0 if happened else 1.0)
        assert reknit.verify(hot, "data").ok


def opened(path: Path) -> float:
    with reknit.open(path, options=ALONE) as checkpoint:
        return float(checkpoint.read_all()["model"]["w"][0])


def verified(path: Path) -> float:
    assert reknit.verify(path, "data", options=ALONE).ok
    return 3.0


def exported(path: Path) -> float:
    export_hf(path, path.parents[1] / "exported", item="extra", overwrite=True)
    return 3.0


def promoted(path: Path) -> float:
    copy = path.parents[1] / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    reknit.promote(path, copy, options=SaveOptions(threads=1))
    return value(copy)


@pytest.mark.parametrize("door", [partial(value, options=ALONE), opened, verified, exported, promoted])
def test_a_call_during_which_a_checkpoint_moves_at_any_moment_ends_well(
    hot: Path, cold: Path, door: Callable[[Path], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    number, happened, moves = 0, True, list[int]()

    def move() -> None:
        with suppress(UsageError):  # a promotion holds the checkpoint
            moves.append(reknit.cool(hot, cold))

    while happened:
        number += 1
        at = AtOperation(open_storage(hot), number, move)
        with monkeypatch.context() as patched:
            patched.setattr("reknit.api.checks.open_storage", lambda _, at=at: at)
            assert door(hot) == 3.0
        happened = at.happened
        if reknit.steps(hot.parent)[0].moved_to is not None:
            reknit.promote(cold, hot, overwrite=True)
    assert len(moves) > (1 if door is promoted else number - 2)


def test_a_replica_that_has_moved_replaces_what_is_damaged(hot: Path, cold: Path, tmp_path: Path) -> None:
    reknit.promote(hot, tmp_path / "replica")
    reknit.cool(tmp_path / "replica", cold)
    damage(hot)
    with pytest.raises(CorruptError):
        value(hot)
    assert value(hot, options=LoadOptions(replicas=(tmp_path / "replica",))) == 3.0
