"""A folder of steps belongs to the run that opened it last; saves of earlier runs are shut out."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit import Checkpointer, CheckpointExistsError, Tier
from reknit.comm.group import SoloGroup
from reknit.engine.stored.commit import put_manifest
from reknit.engine.stored.marker import Marker, take_marker
from reknit.engine.stored.run_record import (
    Branch,
    Line,
    Run,
    folder_above,
    newest_record,
    open_run,
    read_line,
)
from reknit.errors import (
    FencedError,
    MismatchError,
    StateError,
    StorageError,
    StorageNotFoundError,
    StoragePermissionError,
    UsageError,
)
from reknit.format import paths
from reknit.runs import folder as run_folder
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import open_storage
from tests.running.examples import thinned
from tests.runs.owners import act_as
from tests.runs.pieces import saving
from tests.servers import new_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from reknit.storage.base import Listed, Storage


def newest_run(root: Storage) -> int:
    """Return the generation of the run that has opened a folder last, -1 if none has."""
    record = newest_record(root)
    return -1 if record is None else Run(lambda: root, record).generation


def state(value: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": np.full(4, float(value))}}


def held(path: Path | str) -> float:
    found = state(-1)
    reknit.load(path, found)
    return float(found["model"]["w"][0])


def steps(root: Path | str) -> list[int | None]:
    return [step.step for step in reknit.steps(root)]


@pytest.mark.parametrize(("wait", "resumes"), [(True, False), (False, True)])
def test_an_earlier_run_commits_nothing_once_a_later_one_has_opened_the_folder(
    tmp_path: Path, wait: bool, resumes: bool
) -> None:
    old = Checkpointer(tmp_path, wait=wait)
    old.save(1, state(1))
    old.wait()
    with Checkpointer(tmp_path, wait=wait) as new:
        if resumes:
            assert new.resume(state()) == 2
        saving(new, 2, state(2)).result()
        with pytest.raises(FencedError, match=r"a newer run .* has opened .*process") as caught:
            saving(old, 3, state(-3)).result()
        assert "evaluation reads with `load`" in (caught.value.remedy or "")
        new.save(3, state(3))
        new.wait()
    with nullcontext() if wait else pytest.raises(FencedError):
        old.close()
    assert steps(tmp_path) == [1, 2, 3]
    assert held(tmp_path / "step_00000003") == 3


def test_a_save_whose_marker_is_up_before_another_run_opens_the_folder_does_not_commit(
    tmp_path: Path,
) -> None:
    root = LocalStorage(str(tmp_path))
    old = Run(lambda: LocalStorage(str(tmp_path)), open_run(root, 5))
    late, passed = (
        (root.sub(f"step_{step:08d}"), Marker(old.generation, paths.new_write_id(), run=old))
        for step in (2, 0)
    )
    for place, mine in (late, passed):
        take_marker(place, mine, overwrite=False)
    reknit.save(tmp_path / "step_00000001", state(), step=1)
    with Checkpointer(tmp_path, wait=True) as new:
        assert new.resume(state()) == 2
        for place, mine in (late, passed):
            with pytest.raises(FencedError):
                put_manifest(place, mine, b"{}", overwrite=False)
            assert paths.MANIFEST_PATH not in [listed.path for listed in place.list()]
        new.save(2, state())
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("kind", thinned(["local", "mem", "s3", "memory", "hdfs", "gcs", "azure"], 2))
def test_a_save_that_begins_after_another_run_opened_the_folder_is_shut_out(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = new_folder(kind, tmp_path, monkeypatch)
    with Checkpointer(url, wait=True) as run:
        run.save(1, state(1))
    root = open_storage(url)
    old, before = newest_record(root), newest_run(root)
    assert old is not None
    new = open_run(root, 0)
    assert newest_run(root) == before + 1
    for generation, record, wanted in ((before, old, FencedError), (before + 1, new, None)):
        mine = Marker(generation, paths.new_write_id(), run=Run(lambda: open_storage(url), record))
        step = root.sub("step_00000009")
        if wanted is None:
            take_marker(step, mine, overwrite=False)
            continue
        with pytest.raises(wanted):
            take_marker(step, mine, overwrite=False)
        assert list(step.list()) == []


def test_generations_ascend_whatever_clocks_say(tmp_path: Path) -> None:
    root = LocalStorage(str(tmp_path))
    found = [paths.run_generation(open_run(root, at_least)) for at_least in (100, 7, 0, 200, 1)]
    assert found == [100, 101, 102, 200, 201]
    (record,) = [path for path in (each.path for each in root.list()) if paths.run_generation(path) == 201]
    assert {each.path for each in root.list()} == {record, paths.sign_path(record, "beat")}


def test_of_runs_that_open_a_folder_at_once_each_has_a_generation_of_its_own(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    root = LocalStorage(str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: paths.run_generation(open_run(root, n % 3)), range(16)))
    assert len(set(found)) == 16
    assert newest_run(root) == max(filter(None, found))


class Replacing(LocalStorage):
    """A folder in which others replace their records during some of the listings, which then lack them."""

    def __init__(self, root: Path, *gaps: int) -> None:
        super().__init__(str(root))
        self.gaps, self.listings = gaps, 0
        self.others = {listed.path for listed in super().list()}

    def list(self, prefix: str = "") -> Iterator[Listed]:
        self.listings += 1
        lost = self.others if self.listings in self.gaps else ()
        return (listed for listed in super().list(prefix) if listed.path not in lost)


def test_a_run_sees_others_whose_records_are_replaced_while_it_lists(tmp_path: Path) -> None:
    for case, gaps in enumerate([(), (1, 2), (1, 2, 3), (3,), (1,)]):
        folder = tmp_path / str(case)
        assert paths.run_generation(open_run(LocalStorage(str(folder)), 7)) == 7
        found = paths.run_generation(open_run(Replacing(folder, *gaps), 7, lambda _: Line()))
        assert found == 8, gaps


def test_a_record_that_is_replaced_during_a_listing_is_found(tmp_path: Path) -> None:
    open_run(LocalStorage(str(tmp_path)), 7, lambda _: Line([Branch(5, 3, 1)]))
    for gaps in ((), (1,)):
        assert newest_run(Replacing(tmp_path, *gaps)) == 7
        generation, line = read_line(Replacing(tmp_path, *gaps))
        assert (generation, line.branches) == (7, (Branch(5, 3, 1),))


def test_a_run_goes_above_the_generation_of_steps_that_a_clock_ahead_has_saved(tmp_path: Path) -> None:
    ahead = 1 << 50
    reknit.save(tmp_path / "step_00000005", state(5), step=5, options=_as_generation(ahead))
    with Checkpointer(tmp_path, wait=True, group=SoloGroup(3)) as run:
        run.load(state(), 5)
        run.save(5, state(6))
    assert held(tmp_path / "step_00000005") == 6
    assert newest_run(LocalStorage(str(tmp_path))) == ahead + 1


def _as_generation(generation: int) -> reknit.SaveOptions:
    return reknit.SaveOptions(comm=reknit.CommOptions(generation=generation))


def test_promotions_of_an_earlier_run_are_shut_out_of_each_tier(tmp_path: Path) -> None:
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    with Checkpointer(tiers=[Tier(hot), Tier(cold)], wait=True) as old:
        old.save(1, state(1))
        with Checkpointer(cold, wait=True) as new:
            assert new.resume(state()) == 2
        with pytest.raises(FencedError, match="cold"):
            old.save(2, state(2))
    assert (steps(hot), steps(cold)) == ([1, 2], [1])


def test_steps_of_an_earlier_run_are_named_where_a_new_one_would_begin_before_them(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        reknit.save(tmp_path / f"step_{step:08d}", state(step), step=step)
    with (
        Checkpointer(tmp_path, wait=True) as run,
        pytest.raises(
            CheckpointExistsError, match=r"has steps 2-3 of an earlier run, .* with step 2"
        ) as caught,
    ):
        run.save(2, state())
    assert "resume(state)" in (caught.value.remedy or "")
    assert "after step 3" in (caught.value.remedy or "")
    assert newest_run(LocalStorage(str(tmp_path))) == -1  # a run at work there goes on
    with Checkpointer(tmp_path, wait=True) as run:
        run.save(4, state(4))
    assert steps(tmp_path) == [1, 2, 3, 4]


def _earlier(root: Path, *numbers: int) -> None:
    for step in numbers:
        reknit.save(root / f"step_{step:08d}", state(step), step=step)


@pytest.mark.parametrize(("later_steps", "wait"), [("move", False), ("replace", True)])
def test_steps_of_an_earlier_run_give_way_once_a_step_is_committed_if_asked_for(
    tmp_path: Path, later_steps: Any, wait: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _earlier(tmp_path, 1, 2, 3, 4)
    reknit.save(tmp_path / "pretrained", state(7), step=100)
    reknit.note(tmp_path / "step_00000003", {"loss": 0.5})
    with caplog.at_level(logging.WARNING), Checkpointer(tmp_path, wait=wait, later_steps=later_steps) as run:
        run.save(2, state(-2))
    assert steps(tmp_path) == [1, 2, 100]
    assert [held(tmp_path / f"step_{n:08d}") for n in (1, 2)] == [1, -2]
    assert held(tmp_path / "pretrained") == 7
    (aside,) = tmp_path.glob("aside-*") if later_steps == "move" else [None]
    if aside is not None:
        assert [(step.step, dict(step.metrics or {})) for step in reknit.steps(aside)] == [
            (2, {}),
            (3, {"loss": 0.5}),
            (4, {}),
        ]
        assert held(aside / "step_00000002") == 2
    assert sum("is removed" in record.message for record in caplog.records) == 2


def test_steps_of_an_earlier_run_stay_as_long_as_nothing_is_saved(tmp_path: Path) -> None:
    class Bad:
        """An object that cannot be saved."""

    _earlier(tmp_path, 1, 2)
    with Checkpointer(tmp_path, wait=True, later_steps="move") as run:
        for bad in ([1, 2], {"model": Bad()}):
            with pytest.raises((UsageError, StateError)):
                run.save(1, bad)  # type: ignore[arg-type]
        assert steps(tmp_path) == [1, 2]
        run.save(1, state(-1))
    assert steps(tmp_path) == [1]
    assert held(tmp_path / "step_00000001") == -1


def test_a_step_that_somebody_needs_keeps_all_where_they_are(tmp_path: Path) -> None:
    _earlier(tmp_path, 1, 2, 3)
    reknit.pin(tmp_path / "step_00000002", "mine")
    (tmp_path / "step_00000003" / "manifest.json").write_bytes(b"{")
    with (
        Checkpointer(tmp_path, wait=True, later_steps="replace") as run,
        pytest.raises(UsageError, match=r"(?s)nothing was changed: .*step_00000003: .*step_00000002: .*mine"),
    ):
        run.save(1, state())
    assert [path.name for path in sorted(tmp_path.glob("[!.]*"))] == [f"step_{n:08d}" for n in (1, 2, 3)]
    reknit.open(tmp_path / "step_00000001").close()


def test_steps_give_way_also_after_a_resume_that_failed(tmp_path: Path) -> None:
    _earlier(tmp_path, 1)
    with Checkpointer(tmp_path, wait=True, later_steps="replace") as run:
        with pytest.raises(MismatchError):
            run.resume({"model": {"other": np.zeros(3)}})
        run.save(0, state(5))
    assert steps(tmp_path) == [0]


def test_a_save_that_stood_still_below_steps_that_gave_way_does_not_commit(tmp_path: Path) -> None:
    root = LocalStorage(str(tmp_path))
    old = Run(lambda: LocalStorage(str(tmp_path)), open_run(root, 5))
    mine = Marker(old.generation, paths.new_write_id(), run=old)
    take_marker(root.sub("step_00000002"), mine, overwrite=False)
    _earlier(tmp_path, 3)
    with Checkpointer(tmp_path, wait=True, later_steps="replace") as run:
        run.save(1, state())
        with pytest.raises(StorageNotFoundError):
            root.sub("step_00000002").commit(paths.MANIFEST_PATH, b"{}", pending=mine.path, if_absent=False)
        run.save(2, state(2))
    assert steps(tmp_path) == [1, 2]


def test_later_steps_is_one_of_three(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="later_steps is 'refuse', 'move' or 'replace', not 'keep'"):
        Checkpointer(tmp_path, later_steps="keep")  # type: ignore[arg-type]


def test_a_run_that_only_reads_opens_nothing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, wait=True) as old:
        old.save(1, state(1))
        with Checkpointer(tmp_path) as reader:
            found = state()
            reader.load(found)
            assert reader.latest() == 1
        old.save(2, state(2))
    assert steps(tmp_path) == [1, 2]


def test_a_folder_that_may_only_be_read_is_resumed_from_and_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path, wait=True) as old:
        old.save(1, state(1))

    def refuse(root: Any, *_: Any) -> str:
        raise StoragePermissionError("not here", path=root.url)

    monkeypatch.setattr(run_folder, "open_run", refuse)
    found = state()
    with caplog.at_level(logging.INFO), Checkpointer(tmp_path, wait=True) as reader:
        assert reader.resume(found) == 2
        with pytest.raises(StoragePermissionError, match="not here"):
            reader.save(2, found)
    assert found["model"]["w"][0] == 1
    assert any("is read, and not opened for writing: not here" in each.message for each in caplog.records)


def test_the_folder_above_a_step_keeps_the_options_of_its_url() -> None:
    for url, above in (
        ("/step_1", "/"),
        ("file:///step_1", "file:///"),
        ("/a/run/step_1", "/a/run"),
        ("s3://bucket/run/step_1?x=1", "s3://bucket/run?x=1"),
        ("mem://run/step_1", "mem://run"),
    ):
        assert folder_above(url) == above


def test_a_save_to_a_path_that_a_later_generation_wrote_is_decided_by_the_record(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, wait=True) as run:
        run.save(1, state(1))
        reknit.save(tmp_path / "step_00000002", state(9), step=2, options=_as_generation(1 << 50))
        run.load(state(), 1)
        run.save(2, state(2))
    assert held(tmp_path / "step_00000002") == 2


def test_a_run_that_was_overtaken_has_the_folder_again_after_a_resume(tmp_path: Path) -> None:
    one, other = (Checkpointer(tmp_path, wait=True) for _ in range(2))
    one.save(1, state(1))
    assert other.resume(state()) == 2
    assert one.resume(state()) == 2
    one.save(2, state(2))
    with pytest.raises(FencedError):
        other.save(2, state(3))


def test_two_runs_of_one_generation_do_not_both_own_the_folder(tmp_path: Path) -> None:
    root = LocalStorage(str(tmp_path))
    mine = open_run(root, 5)
    root.put(paths.run_path(5, "00000000"), b"{}", if_absent=True)  # where a store cannot prevent it
    with pytest.raises(FencedError):
        Run(lambda: root, mine).check()
    assert paths.run_generation(open_run(root, 5)) == 6


def test_a_tier_that_cannot_be_reached_does_not_keep_a_run_from_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def some(root: Any, *others: Any) -> str:
        if root.url.endswith("cold"):
            raise StorageError("cold is away", path=root.url)
        return open_run(root, *others)

    monkeypatch.setattr(run_folder, "open_run", some)
    tiers = [Tier(tmp_path / "hot"), Tier(tmp_path / "cold", every=1000)]
    with Checkpointer(tiers=tiers, wait=True) as run:
        run.save(1, state(1))
    assert steps(tmp_path / "hot") == [1]
    assert any("cold is away" in record.message for record in caplog.records)


def test_two_tiers_that_are_one_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    tiers = [Tier(tmp_path / "a"), Tier(tmp_path / "b")]
    with Checkpointer(tiers=tiers, wait=True) as run, pytest.raises(UsageError, match="are one folder"):
        run.save(1, state())


def test_roots_of_promotions_belong_to_the_run_too(tmp_path: Path) -> None:
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    options = reknit.SaveOptions(promote_to=cold)
    with Checkpointer(cold, wait=True) as before:
        before.save(9, state())
    with Checkpointer(hot, wait=True, options=options) as run:
        run.save(1, state(1))
    assert steps(cold) == [1, 9]
    with pytest.raises(FencedError):
        before.save(10, state())


def test_what_an_earlier_checkpointer_of_this_process_left_to_agents_is_promoted(tmp_path: Path) -> None:
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    options = reknit.SaveOptions(exit_wait_s=0)
    for step in (1, 2):
        with Checkpointer(tiers=[Tier(hot), Tier(cold)], options=options) as run:
            run.save(step, state(step))
    assert reknit.close(30)
    assert (steps(hot), steps(cold)) == ([1, 2], [1, 2])


def test_a_run_that_takes_a_folder_over_says_from_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    here = socket.gethostname()
    for host, pid, level in (
        ("elsewhere", 7, logging.WARNING),
        (here, 1, logging.WARNING),
        (here, ended.pid, 20),
    ):
        with monkeypatch.context() as patch:
            act_as(patch, host, pid)
            old = Checkpointer(tmp_path, wait=True)
            old.resume(state())
        caplog.clear()
        new = Checkpointer(tmp_path, wait=True, other_run="take_over")
        with caplog.at_level(logging.INFO, "reknit"), new:
            new.resume(state())
        (line,) = [each for each in caplog.records if "this run takes" in each.message]
        assert line.levelno == level
        assert f"this run takes {tmp_path} over" in line.message
        assert f"process {pid} of {host}, at 20" in line.message
        with Checkpointer(tmp_path, wait=True) as again, caplog.at_level(logging.INFO, "reknit"):
            caplog.clear()
            again.resume(state())
        assert "this run takes" not in caplog.text, "one process may begin a run twice"
    with pytest.raises(FencedError, match=rf"process {os.getpid()} of {here}, at 20.* UTC"):
        old.save(9, state())
