"""Notes on a committed checkpoint: pins and leases keep it, metrics are added to it."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pytest

import reknit
from reknit.engine.stored import notes, removals
from reknit.engine.stored.at_path import committed
from reknit.engine.stored.delete import delete
from reknit.engine.stored.recognising import manifest_exists
from reknit.errors import CheckpointNotFoundError, StoragePermissionError, UsageError
from reknit.events.phase import CLOCK
from reknit.policies import latest
from reknit.runs.retention import Retention
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import open_storage
from reknit.testing.faulty_storage import Fault, FaultyStorage
from tests.at_operation import AtOperation

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.storage.base import Storage


class SteppedClock:
    """The clocks of this process, set ahead by `step`."""

    ahead_s = 0.0

    def __enter__(self) -> SteppedClock:
        self._token = CLOCK.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        CLOCK.reset(self._token)

    def time(self) -> float:
        return time.time() + self.ahead_s

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def step(self, seconds: float, url: str = "") -> None:
        """Let time pass, also for the notes about a checkpoint in a local folder."""
        self.ahead_s += seconds
        for note in Path(url, ".notes").iterdir() if url.startswith("/") else ():
            then = note.stat().st_mtime - seconds
            os.utime(note, (then, then))


STATE: dict[str, Any] = {"model": {"w": np.arange(10.0)}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        reknit.save(tmp_path / f"step_{step}", STATE, step=step)
    return tmp_path


def write_id(path: Path | str) -> str:
    return committed(open_storage(path)).write_id


def hold(path: Path | str, lease_s: float = 60.0) -> notes.Hold:
    return notes.Hold(open_storage(path), write_id(path), lease_s)


def pruned(root: Path, keep: Any) -> list[int | None]:
    return [each.step for each in Retention(open_storage(root), keep).prune()]


def test_a_pinned_checkpoint_is_not_removed_until_it_is_unpinned(root: Path) -> None:
    reknit.pin(root / "step_1", "the paper's figure 3")
    with pytest.raises(UsageError, match='has to stay: it is pinned: "the paper\'s figure 3"'):
        reknit.delete(root / "step_1")
    assert [each.step for each in Retention(open_storage(root), latest(1)).surplus()] == [2]
    assert pruned(root, latest(1)) == [2]
    assert reknit.unpin(root / "step_1")
    assert not reknit.unpin(root / "step_1")
    assert pruned(root, latest(1)) == [1]
    assert not (root / "step_1").exists()


def test_a_checkpoint_that_is_being_read_is_not_removed(root: Path) -> None:
    one, other = hold(root / "step_1"), hold(root / "step_1")
    assert pruned(root, latest(1)) == [2]
    one.release()
    with pytest.raises(UsageError, match=r"process \d+ of \S+ reads it"):
        reknit.delete(root / "step_1")
    other.release()
    reknit.delete(root / "step_1")


def kept(act: Callable[[], object]) -> bool:
    """Return whether an act succeeded; it may fail because the checkpoint is removed or kept by others."""
    try:
        act()
    except (CheckpointNotFoundError, UsageError):
        return False
    return True


@pytest.mark.parametrize("kind", ["lease", "pin"])
@pytest.mark.parametrize("inside", ["the removal", "the holding"])
def test_nobody_removes_what_another_begins_to_hold_at_any_moment(
    tmp_path: Path, kind: str, inside: str
) -> None:
    path, done = tmp_path / "one", dict[str, bool]()
    number, over = 0, False
    while not over:
        number += 1
        reknit.save(path, STATE, overwrite=True)
        place = open_storage(path)
        written = write_id(path)

        def remove(storage: Storage) -> None:
            done["removed"] = kept(lambda: delete(storage))

        def keep(storage: Storage, written: str = written) -> None:
            how = {"lease": lambda: notes.Hold(storage, written, 60.0), "pin": lambda: notes.pin(storage, "")}
            done["held"] = kept(how[kind])

        outer, inner = (remove, keep) if inside == "the removal" else (keep, remove)
        watched = AtOperation(place, number, partial(inner, place))
        outer(watched)
        over = not watched.happened
        if not over:
            assert not (done["removed"] and done["held"]), number
            exists = (path / "manifest.json").exists()
            assert done["removed"] != exists, number
            if exists:
                assert reknit.verify(path, "data").ok
    assert number > 4


@pytest.fixture(params=["dates of the store", "clocks of the hosts"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the place of a checkpoint in a store with dates, and in one without."""
    local = request.param == "dates of the store"
    url = f"{tmp_path}/step_1" if local else f"memory://{uuid4().hex}/step_1"
    reknit.save(url, STATE, step=1)
    return url


def test_a_removal_whose_process_died_holds_nobody_back_for_long(place: str) -> None:
    with SteppedClock() as clock:
        died = removals.Removal(open_storage(place), write_id(place))
        with pytest.raises(CheckpointNotFoundError, match=r"is being removed by 'process \d+"):
            hold(place)
        with pytest.raises(CheckpointNotFoundError, match="is being removed"):
            reknit.pin(place)
        reknit.note(place, {"score": 1.0})
        clock.step(removals.REMOVAL_S + 61.0, place)
        hold(place).release()
        with pytest.raises(UsageError, match="before it began"):
            died.check()
        reknit.delete(place)
    assert not manifest_exists(open_storage(place))


def test_on_a_full_disk_it_can_be_removed(root: Path) -> None:
    faulty = FaultyStorage(open_storage(root / "step_1"), plan=[Fault("full", 1, "put")])
    delete(faulty)
    assert faulty.fired
    assert not (root / "step_1").exists()


def test_a_lease_ends_by_itself_and_lasts_as_long_as_it_is_renewed(place: str) -> None:
    with SteppedClock() as clock:
        held = hold(place, 100.0)
        clock.step(90.0, place)
        held.renew()
        with pytest.raises(UsageError, match=r"reads it, for (9\d|1\d\d)(\.\d+)? s more"):
            reknit.delete(place)
        clock.step(90.0, place)
        with pytest.raises(UsageError, match="reads it"):
            reknit.delete(place)
        clock.step(80.0, place)
        reknit.delete(place)
        with pytest.raises(CheckpointNotFoundError, match="was removed or replaced"):
            held.renew()
    assert not manifest_exists(open_storage(place))


class InTwoSteps(LocalStorage):
    """A store that deletes a file before it puts another content there, with a call in between."""

    between: Callable[[], object]

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        self.delete(path)
        self.between()
        return super().put(path, data, if_absent=if_absent)


def test_nobody_removes_a_checkpoint_while_the_lease_on_it_is_replaced(root: Path) -> None:
    path, renewals = root / "step_1", 3
    store, looks = InTwoSteps(str(path)), 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks > 1:
            with pytest.raises(UsageError, match="reads it"):
                reknit.delete(path)

    store.between = look
    held = notes.Hold(store, write_id(path), 100.0)
    for _ in range(renewals):
        held.renew()
    assert looks == renewals + 1
    held.release()
    assert not (path / ".notes").exists()
    reknit.delete(path)


@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0])
def test_a_lease_of_a_host_whose_clock_is_wrong_lasts_no_longer_and_no_shorter(
    root: Path, ahead_s: float
) -> None:
    path = str(root / "step_1")
    with SteppedClock() as clock:
        clock.ahead_s = ahead_s
        hold(path, 100.0)
        removals.Removal(open_storage(root / "step_2"), write_id(root / "step_2"))
    with pytest.raises(UsageError, match=r"reads it, for (9\d|10\d|10\d\.\d+|9\d\.\d+) s more"):
        reknit.delete(path)
    with pytest.raises(CheckpointNotFoundError, match="is being removed"):
        hold(root / "step_2")
    for each in (path, str(root / "step_2")):
        SteppedClock().step(103.0, each)
    reknit.delete(path)
    hold(root / "step_2").release()


def test_a_lease_of_an_earlier_version_ends_by_the_clock_of_its_holder(root: Path) -> None:
    path = root / "step_1"
    hold(path, 100.0)
    (note,) = (path / ".notes").iterdir()
    about = json.loads(note.read_text())
    del about["seconds"]
    note.write_text(json.dumps(about))
    with pytest.raises(UsageError, match="reads it"):
        reknit.delete(path)
    note.write_text(json.dumps(about | {"until": time.time() - 61.0}))
    reknit.delete(path)


def test_nobody_holds_what_is_gone_or_was_replaced(root: Path) -> None:
    before = write_id(root / "step_1")
    reknit.save(root / "step_1", STATE, step=1, overwrite=True)
    with pytest.raises(CheckpointNotFoundError, match="was removed or replaced"):
        notes.Hold(open_storage(root / "step_1"), before, 60.0)
    reknit.delete(root / "step_1")
    assert not (root / "step_1").exists()  # the lease was taken back


def test_what_is_said_of_a_checkpoint_does_not_hold_for_the_next_at_its_place(root: Path) -> None:
    reknit.pin(root / "step_1")
    reknit.note(root / "step_1", {"score": 1.0})
    hold(root / "step_1")
    reknit.save(root / "step_1", STATE, step=1, overwrite=True)
    assert not reknit.unpin(root / "step_1")
    assert reknit.steps(root)[0].metrics == {}
    reknit.delete(root / "step_1")
    assert not (root / "step_1").exists()


def test_metrics_are_added_and_the_last_of_a_name_counts(tmp_path: Path) -> None:
    with reknit.Checkpointer(tmp_path, wait=True) as run:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            run.save(step, STATE, {"loss": loss})
        run.note(1, {"score": 5})
        run.note(1, {"score": 7, "bleu": float("nan")})
        with pytest.raises(CheckpointNotFoundError, match="there is no step 9"):
            run.note(9, {"score": 1})
    assert reknit.steps(tmp_path)[0].metrics == {"loss": 3.0, "score": 7.0, "bleu": None}
    with pytest.raises(UsageError, match="metrics are numbers by name"):
        reknit.note(tmp_path / "step_00000001", {"score": "high"})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="write_id is that of a SavedStep, not 5"):
        reknit.note(tmp_path / "step_00000001", {"score": 1.0}, write_id=5)  # type: ignore[arg-type]


def test_what_cannot_be_read_keeps_the_checkpoint_and_says_which_file_it_is(root: Path) -> None:
    reknit.pin(root / "step_1")
    (pin,) = (root / "step_1" / ".notes").iterdir()
    pin.write_bytes(b'{"reason":')
    with pytest.raises(UsageError, match=pin.name):
        reknit.delete(root / "step_1")
    reknit.unpin(root / "step_1")
    reknit.note(root / "step_1", {"score": 1.0})
    (note,) = (root / "step_1" / ".notes").iterdir()
    note.write_bytes(b"[" * 100)
    assert reknit.steps(root)[0].metrics == {}
    reknit.delete(root / "step_1")


def test_what_no_reader_would_take_is_refused(root: Path) -> None:
    path = root / "step_1"
    with pytest.raises(UsageError, match="1048576 is the limit"):
        reknit.note(path, {f"metric {number:06d}": 1.0 for number in range(60_000)})
    with pytest.raises(UsageError, match="not valid Unicode"):
        reknit.note(path, {"\ud800": 1.0})
    with pytest.raises(UsageError, match="not valid Unicode"):
        reknit.pin(path, "\ud800")
    with pytest.raises(UsageError, match="at most 4096 characters"):
        reknit.pin(path, "x" * 4097)
    assert reknit.steps(root)[0].metrics == {}
    reknit.delete(path)


def test_notes_in_a_folder_of_another_user_keep_no_checkpoint(root: Path) -> None:
    class Theirs(AtOperation):
        def intercept(
            self, name: str, path: str, nbytes: int, whole: Callable[[], Any], half: Any = None
        ) -> Any:
            if name == "delete" and path.startswith(".notes/"):
                raise StoragePermissionError(f"may not delete {path}", path=self.url)
            return whole()

    path = root / "step_1"
    reknit.note(path, {"score": 1.0})
    assert delete(Theirs(open_storage(path), 0, lambda: None)) > 0
    assert sorted(file.name for file in path.iterdir()) == [".notes"]


def test_what_is_no_checkpoint_is_not_pinned(tmp_path: Path) -> None:
    for call in (reknit.pin, reknit.unpin, lambda path: reknit.note(path, {"score": 1.0})):
        with pytest.raises(CheckpointNotFoundError):
            call(tmp_path / "typo")
    assert list(tmp_path.iterdir()) == []
    reknit.save(tmp_path / "one", STATE)
    with pytest.raises(UsageError, match="reason is a text"):
        reknit.pin(tmp_path / "one", 5)  # type: ignore[arg-type]


def test_a_lease_says_how_long_it_lasts(root: Path) -> None:
    hold(root / "step_1", 1000.0)
    said = notes.held_by(open_storage(root / "step_1"), write_id(root / "step_1"))
    assert said is not None
    assert 1000 < float(said.split(" for ")[1].split(" s")[0]) < 1100
