"""Files are taken over from the last checkpoint, if and only if they have its bytes."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reknit
from reknit.engine.loading.load import load
from reknit.engine.saving.here import EarlierSaves
from reknit.engine.saving.reuse import earlier_files
from reknit.engine.stored.verify import verify
from reknit.errors import ReknitError
from reknit.format import paths
from reknit.options import LoadOptions, SaveOptions
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from reknit.storage.wrappers.retrying import RetryingStorage, RetryPolicy
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.testing.metered import Meter, MeteredStorage
from reknit.testing.world import run_ranks
from reknit.types.box import Box
from reknit.types.shard import Holdings, Shard, TensorSpec
from reknit.types.wanted import Wanted
from tests.engine.held import save_held, task_at
from tests.running.cases import one_by_one_in
from tests.running.examples import examples
from tests.storage.process_memory import ProcessMemory
from tests.world.jobs import planned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.group import Group
    from reknit.engine.reports import SaveReport
    from reknit.storage.base import Storage

SIZE = 3
ROWS = 1 << 8
FROZEN, TRAINED = TensorSpec((SIZE * ROWS, 1024), "float32"), TensorSpec((300,), "float32")
MIB = 1 << 20


BASE = np.arange(FROZEN.numel, dtype=np.float32).reshape(FROZEN.shape)


class Run:
    """Three ranks that save step after step to one folder; each has rows of the frozen tensor."""

    def __init__(self, store: Callable[[str], Storage], frozen: np.ndarray[Any, Any] = BASE) -> None:
        self.store, self.frozen = store, frozen
        self.earlier = [EarlierSaves() for _ in range(SIZE)]

    def shards(self, rank: int, frozen: Any, trained: Any) -> list[Shard]:
        rows = Box((ROWS * rank, 0), (ROWS, 1024))
        return [
            Shard("model", "base", FROZEN, rows, (rank,), frozen[rows.slices()], frozen=True),
            Shard("model", "lora", TRAINED, Box.whole(TRAINED.shape), (0, 1, 2), trained),
        ]

    def save(self, step: int, **options: Any) -> list[SaveReport]:
        def rank(group: Group) -> SaveReport:
            shards = self.shards(group.rank, self.frozen, np.full(300, step, np.float32))
            task = task_at(
                self.store(f"step_{step}"),
                group,
                SaveOptions(timeout_s=30, threads=2, **options),
                step=step,
                overwrite=True,
            )
            held = Holdings(("model",), tuple(shards), ())
            return save_held(lambda: held, task, self.earlier[group.rank]).report()

        return run_ranks(SIZE, rank)

    def check(self, step: int, frozen: np.ndarray[Any, Any] | None = None) -> None:
        """Load a step with a full check, and compare its values."""
        storage, into, trained = self.store(f"step_{step}"), np.zeros_like(BASE), np.zeros(300, np.float32)
        report = verify(storage, "data", LoadOptions())
        assert report.ok, report.problems

        def rank(group: Group) -> None:
            wanted = Wanted(("model",), tuple(self.shards(group.rank, into, trained)), ())
            options = LoadOptions(timeout_s=30)
            load(planned(group, storage, lambda _: wanted, ("model",), options=options))

        run_ranks(SIZE, rank)
        np.testing.assert_array_equal(into, self.frozen if frozen is None else frozen)
        assert (trained == step).all()


def reused(reports: Sequence[SaveReport]) -> list[int]:
    """Return the MiB that each rank took over from the last checkpoint."""
    return [report.reused_nbytes // MIB for report in reports]


def in_folder(tmp_path: Path) -> Callable[[str], Storage]:
    return lambda step: LocalStorage(tmp_path / step, durability="process")


def test_what_is_frozen_is_written_once_and_every_step_is_whole_by_itself(tmp_path: Path) -> None:
    meter = Meter()
    run = Run(lambda step: MeteredStorage(LocalStorage(tmp_path / step, durability="process"), meter))
    assert reused(run.save(1)) == [0, 0, 0]
    first = meter.figures["write"].nbytes
    assert reused(run.save(2)) == [1, 1, 1]
    assert meter.figures["write"].nbytes - first < 0.03 * first
    assert meter.figures["copy_from"].count == SIZE
    shutil.rmtree(tmp_path / "step_1")
    assert reused(run.save(3)) == [1, 1, 1], "a file that was taken over is as good as one that was written"
    run.check(2)
    shutil.rmtree(tmp_path / "step_2")
    run.check(3)


@pytest.mark.timeout(30)
def test_a_save_without_anything_to_write_waits_for_no_first_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reknit.engine.memory.write._BEGIN_S", 3600)
    state = {"model": {"w": torch.zeros(3 << 20)}}  # of three blocks, since a small save has one thread
    for step in range(2):
        reknit.save(tmp_path / str(step), state)
    first, second = ({file.stat().st_ino for file in tmp_path.glob(f"{k}/model/*")} for k in range(2))
    assert first == second


@settings(max_examples=examples(12))
@given(st.integers(0, FROZEN.numel - 1))
def test_a_frozen_tensor_that_changed_all_the_same_is_written(place: int) -> None:
    changed = BASE.copy()
    changed.view(np.uint32).reshape(-1)[place] ^= 1
    with TemporaryDirectory() as folder:
        run = Run(in_folder(Path(folder)))
        run.save(1)
        run.frozen = changed
        rank = place // (ROWS * 1024)
        assert reused(run.save(2)) == [0 if number == rank else 1 for number in range(SIZE)]
        run.check(2)


def test_what_was_deleted_meanwhile_is_written(tmp_path: Path) -> None:
    run = Run(in_folder(tmp_path))
    run.save(1)
    os.remove(next((tmp_path / "step_1" / "model").glob("00001.????????.safetensors")))
    assert reused(run.save(2)) == [1, 0, 1]
    shutil.rmtree(tmp_path / "step_1")
    run.check(2)
    shutil.rmtree(tmp_path / "step_2")
    assert reused(run.save(3)) == [0, 0, 0]
    run.check(3)


def test_what_was_cut_short_meanwhile_is_written(tmp_path: Path) -> None:
    run = Run(in_folder(tmp_path))
    run.save(1)
    os.truncate(next((tmp_path / "step_1" / "model").glob("00002.????????.safetensors")), 5000)
    assert reused(run.save(2)) == [1, 1, 0]
    run.check(2)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EMLINK])
def test_where_no_link_can_be_files_are_written(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(in_folder(tmp_path))
    run.save(1)

    link = os.link

    def refuse(source: str, name: str, **more: Any) -> None:
        if name.endswith(".safetensors"):
            raise OSError(code, os.strerror(code))
        link(source, name, **more)

    with monkeypatch.context() as patched:
        patched.setattr("os.link", refuse)
        assert reused(run.save(2)) == [0, 0, 0]
    run.check(2)
    assert reused(run.save(3)) == [1, 1, 1]


def test_a_store_that_copies_no_files_gets_all_bytes() -> None:
    ProcessMemory.clear("no-copies")
    run = Run(ProcessMemory("no-copies").sub)
    assert reused(run.save(1)) == reused(run.save(2)) == [0, 0, 0]
    run.check(2)


def test_nothing_is_taken_over_where_that_is_not_wanted(tmp_path: Path) -> None:
    run = Run(in_folder(tmp_path))
    run.save(1)
    assert reused(run.save(2, reuse=False)) == [0, 0, 0]
    assert all(path.stat().st_nlink == 1 for path in tmp_path.rglob("*.safetensors"))
    assert reused(run.save(3)) == [1, 1, 1]


def test_an_overwritten_checkpoint_keeps_what_it_takes_over(tmp_path: Path) -> None:
    run = Run(lambda _: LocalStorage(tmp_path / "last", durability="process"))
    run.save(1)
    assert reused(run.save(2)) == [1, 1, 1]
    run.check(2)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 4


class Restarted(Run):
    """A run of which every save is the first of its process."""

    def save(self, step: int, **options: Any) -> list[SaveReport]:
        self.earlier = [EarlierSaves() for _ in range(SIZE)]
        return super().save(step, **options)


def test_after_a_restart_the_files_of_the_newest_step_are_taken_over(tmp_path: Path) -> None:
    run = Restarted(in_folder(tmp_path))
    assert [reused(run.save(step)) for step in (1, 2, 10)] == [[0, 0, 0], [1, 1, 1], [1, 1, 1]]
    shutil.rmtree(tmp_path / "step_1")  # the headers of all files have its write id
    run.frozen = BASE + 1
    assert reused(run.save(11)) == [0, 0, 0]
    assert reused(run.save(12)) == [1, 1, 1]
    shutil.rmtree(tmp_path / "step_11")
    run.check(12)
    run.check(10, BASE)


@pytest.mark.parametrize("spoil", [b"{", b'{"format":"reknit","format_version":99,"requires":[],'])
def test_after_a_restart_a_checkpoint_that_cannot_be_read_costs_only_writes(
    spoil: bytes, tmp_path: Path
) -> None:
    run = Restarted(in_folder(tmp_path))
    run.save(1)
    (tmp_path / "step_1/manifest.json").write_bytes(spoil)
    assert reused(run.save(2)) == [0, 0, 0]
    run.check(2)


def test_after_a_restart_files_that_are_gone_or_have_another_header_are_written(tmp_path: Path) -> None:
    run = Restarted(in_folder(tmp_path))
    run.save(1)
    os.remove(next((tmp_path / "step_1" / "model").glob("00001.????????.safetensors")))
    with next((tmp_path / "step_1" / "model").glob("00002.????????.safetensors")).open("r+b") as file:
        file.write(bytes(512))
    assert reused(run.save(2)) == [1, 0, 0]
    run.check(2)


def look_at_earlier_names(name: str, others: list[str], found: list[str], tmp_path: Path) -> None:
    class Noting(FaultyStorage):
        def sub(self, path: str) -> Storage:
            looked.append(path)
            return super().sub(path)

    looked: list[str] = []
    for other in others:
        (tmp_path / other).mkdir()
    place = LocalStorage(tmp_path / name)
    assert earlier_files(AboveOnly(place, Noting(LocalStorage(tmp_path)))) == {}
    assert looked == [name, *found]


def test_only_names_that_differ_in_their_last_number_are_looked_at(tmp_path: Path) -> None:
    cases: list[tuple[str, list[str], list[str]]] = [
        ("step_7", ["step_9", "step_10", "note_11", "step_10.old", "steps"], ["step_10", "step_9"]),
        ("run2-step8-x", ["run2-step5-x", "run2-step6-y", "run3-step7-x"], ["run2-step5-x"]),
        ("last", ["last2", "step_1"], []),
        ("3", ["1", "2", "003", "a4"], ["003", "2"]),
    ]
    for (name, others, found), folder in one_by_one_in(tmp_path, cases):
        look_at_earlier_names(name, others, found, folder)


def test_an_earlier_checkpoint_that_cannot_be_read_costs_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = LocalStorage(tmp_path / "step_2")
    assert earlier_files(place) == {}
    assert caplog.messages == []
    reknit.save(tmp_path / "step_1", {"m": {"w": np.ones(4)}})
    manifest = tmp_path / "step_1" / paths.MANIFEST_PATH
    manifest.write_bytes(manifest.read_bytes()[:-9] + bytes(9))
    caplog.clear()
    assert earlier_files(place) == {}
    (line,) = caplog.messages
    assert line.startswith(f"{place.url}: the save writes all files")
    assert "cannot be read" in line


class AboveOnly(FaultyStorage):
    """A store whose folder above is another one."""

    def __init__(self, inner: LocalStorage, holder: Storage) -> None:
        super().__init__(inner)
        self.above = lambda: (holder, os.path.basename(inner.url))


class Layers:
    """A model of three layers, all trained, that is saved step after step; each has a file of its own."""

    layer_nbytes = 18 * MIB

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("reknit.planner.save.PART_NBYTES", self.layer_nbytes)
        self.folder = folder
        self.tensors = {name: np.full(self.layer_nbytes, ord(name), np.uint8) for name in "012"}

    def save(self, step: int, *, wait: bool) -> float:
        """Save, and return the number of layers of which the bytes were written."""
        options = SaveOptions(durability="process")
        report = reknit.save(
            self.folder / f"step_{step}", {"m": self.tensors}, wait=wait, options=options
        ).result()
        return round((report.nbytes - report.reused_nbytes) / self.layer_nbytes, 2)

    def check(self, step: int) -> None:
        found = {name: np.zeros_like(tensor) for name, tensor in self.tensors.items()}
        reknit.load(self.folder / f"step_{step}", {"m": found})
        assert all(np.array_equal(found[name], tensor) for name, tensor in self.tensors.items())
        assert reknit.verify(self.folder / f"step_{step}", "data").ok


@pytest.mark.parametrize("wait", [True, False])
def test_of_trained_layers_only_the_changed_ones_are_written(
    wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Layers(tmp_path, monkeypatch)
    assert [job.save(step, wait=wait) for step in (1, 2)] == [3, 0]
    job.tensors["1"][-1] ^= 1  # all pieces but the last are equal
    assert job.save(3, wait=wait) == 1
    job.check(3)
    reknit.close()
    assert job.save(4, wait=wait) == 0, "a new agent is a restart"
    for tensor in job.tensors.values():
        tensor[0] ^= 1
    assert job.save(5, wait=wait) == 3
    job.check(5)
    reknit.close()


FAULTS = [("error", "copy_from"), ("lost", "copy_from"), ("error", "commit")]


@pytest.mark.parametrize(("kind", "operation"), FAULTS)
def test_a_save_that_fails_leaves_neither_links_nor_damage(kind: Any, operation: str, tmp_path: Path) -> None:
    run = Run(in_folder(tmp_path))
    run.save(1)
    before = {path: path.stat().st_nlink for path in tmp_path.rglob("*.*")}
    sound = run.store
    run.store = lambda step: FaultyStorage(sound(step), plan=[Fault(kind, 1, operation)])
    with pytest.raises(ReknitError, match="injected"):
        run.save(2)
    assert {path: path.stat().st_nlink for path in tmp_path.rglob("*.*")} == before
    run.store = sound
    assert reused(run.save(3)) == [1, 1, 1], "files are taken over from the last committed checkpoint"
    run.check(3)


@pytest.mark.parametrize("kind", ["unheard"])
def test_a_copy_of_which_no_answer_came_is_asked_for_again(kind: Any, tmp_path: Path) -> None:
    policy = RetryPolicy(deadline_s=20, first_s=0.001, longest_s=0.002)
    run = Run(
        lambda step: RetryingStorage(
            FaultyStorage(
                LocalStorage(tmp_path / step, durability="process"), plan=[Fault(kind, 1, "copy_from")]
            ),
            policy,
        )
    )
    run.save(1)
    assert reused(run.save(2)) == [1, 1, 1]
    run.check(2)


class Tuned(torch.nn.Module):
    """A frozen layer, and one that is trained."""

    def __init__(self, nbytes: int = 20 * MIB) -> None:
        super().__init__()
        self.base = torch.nn.Linear(1024, nbytes // 4096, bias=False).requires_grad_(False)
        self.head = torch.nn.Linear(8, 8)


@pytest.mark.parametrize("wait", [True, False])
def test_a_frozen_module_is_taken_over_by_whoever_writes(wait: bool, tmp_path: Path) -> None:
    model = Tuned()
    options = SaveOptions(durability="process")
    for step in range(3):
        report = reknit.save(tmp_path / f"{step}", {"m": model}, wait=wait, options=options).result()
        assert (report.reused_nbytes > 20 * MIB) == (step > 0)
        assert reknit.verify(tmp_path / f"{step}", "data").ok
    with torch.no_grad():
        model.base.weight[-1, -1] += 1
    report = reknit.save(tmp_path / "changed", {"m": model}, wait=wait, options=options).result()
    assert report.reused_nbytes == 0
    loaded = Tuned()
    reknit.load(tmp_path / "changed", {"m": loaded})
    assert torch.equal(loaded.base.weight, model.base.weight)
    reknit.close()


def test_what_is_staged_through_a_ring_is_written(tmp_path: Path) -> None:
    register("ring", lambda url, _: in_folder(tmp_path)(url.removeprefix("ring://")))
    model, options = Tuned(72 * MIB), SaveOptions(host_nbytes=64 * MIB, timeout_s=20)
    for step in range(2):
        report = reknit.save(f"ring://{step}", {"m": model}, wait=False, options=options).result()
        assert (report.streamed, report.reused_nbytes) == (True, 0)
    assert reknit.verify("ring://1", "data").ok
    reknit.close()
