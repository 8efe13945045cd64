"""Only manifests of reknit make a checkpoint: a file of another program with that name is left alone."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.engine.stored import recognising
from reknit.engine.stored.at_path import is_committed, manifest_in
from reknit.engine.stored.recognising import find_manifest, is_of_others
from reknit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatError,
    UsageError,
    VersionError,
)
from reknit.format.checksum import digest
from reknit.storage.registry import open_storage, register
from reknit.testing.faulty_storage import FaultyStorage
from tests.cli.command import Command
from tests.running.cases import one_by_one
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.storage.base import Storage

STATE: dict[str, Any] = {"model": {"w": np.arange(10.0)}, "step": 5}

FOREIGN = {
    "a site": b'{"name": "App", "icons": [{"src": "a.png"}], "start_url": "."}',
    "a list": b'["index.html", "app.js"]',
    "another format": b'{"format":"parquet","format_version":1,"requires":[]}',
    "reknit inside": b'{"files": [{"path": "a", "format":"reknit"}], "format":"reknit"}',
    "a table": b"name,nbytes\na,1\n",
    "large": b'{"rows": [' + b'{"a": 1}, ' * 100_000 + b"{}]}",
    "empty": b"",
    "zeros": bytes(1000),
    "binary": bytes(range(256)),
}


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "step_00000005"
    reknit.save(path, STATE, step=5)
    return path


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    """Return a checkpoint."""
    shutil.copytree(saved, tmp_path / "runs" / "step_00000005")
    return tmp_path / "runs" / "step_00000005"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=["a site", "large", "empty"])
def foreign(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder of another program, below one that may hold checkpoints."""
    folder = tmp_path / "runs" / "site"
    (folder / "assets").mkdir(parents=True)
    (folder / "assets" / "app.js").write_text("1")
    (folder / "manifest.json").write_bytes(FOREIGN[request.param])
    return folder


DEEDS: dict[str, tuple[type[Exception], Callable[[Path], object]]] = {
    "save": (UsageError, lambda path: reknit.save(path, STATE)),
    "overwrite": (UsageError, lambda path: reknit.save(path, STATE, overwrite=True)),
    "promote": (UsageError, lambda path: reknit.promote(path.parent.parent / "one", path, overwrite=True)),
    "cool": (UsageError, lambda path: reknit.cool(path.parent.parent / "one", path)),
    "load": (CheckpointNotFoundError, lambda path: reknit.load(path, dict(STATE))),
    "open": (CheckpointNotFoundError, reknit.open),
    "verify": (CheckpointNotFoundError, reknit.verify),
    "delete": (CheckpointNotFoundError, reknit.delete),
    "drop": (CheckpointNotFoundError, lambda path: reknit.delete(path, items=["model"])),
    "pin": (CheckpointNotFoundError, reknit.pin),
}


def test_another_programs_manifest_is_no_checkpoint_and_stays(
    foreign: Path, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "one")
    before = content(tmp_path)
    for deed, (kind, call) in DEEDS.items():
        with pytest.raises(kind, match="nothing shows") as caught:
            call(foreign)
        assert not isinstance(caught.value, CheckpointExistsError), deed
        assert getattr(caught.value, "remedy", None), deed
        assert content(tmp_path) == before, deed


def test_nothing_but_a_manifest_of_reknit_counts_as_one() -> None:
    for content in one_by_one(FOREIGN.values()):
        place = ProcessMemory("content")
        place.put("manifest.json", content, if_absent=False)
        place.put("assets/00000.safetensors", b"1", if_absent=False)
        assert is_of_others(place)
        assert manifest_in(place) is None


def test_runs_and_commands_pass_another_programs_folder_over(
    foreign: Path, path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    root = foreign.parent
    assert reknit.latest(root) == str(path)
    assert [step.path for step in reknit.steps(root)] == [str(path)]
    listed = command("ls", root, "--json")
    assert [row["name"] for row in listed.json] == [path.name]
    before = content(foreign)
    assert command("rm", foreign).code != 0
    assert command("gc", root, "--older-than", "0", "--delete").code == 0
    assert command("prune", root, "--keep-last", "1").code == 0
    assert content(foreign) == before
    assert not caplog.records


def test_a_root_with_such_a_file_is_a_folder_of_checkpoints_all_the_same(foreign: Path, saved: Path) -> None:
    assert reknit.latest(foreign) is None
    shutil.copytree(saved, foreign / saved.name)
    assert reknit.latest(foreign) == str(foreign / saved.name)
    with reknit.Checkpointer(foreign, wait=True) as run:
        assert run.resume({"model": {"w": np.zeros(10)}, "step": 0}) == 6


def test_a_run_passes_over_a_step_folder_of_another_program(path: Path) -> None:
    other = path.parent / "step_00000007"
    other.mkdir()
    (other / "manifest.json").write_bytes(FOREIGN["a site"])
    with reknit.Checkpointer(path.parent, wait=True) as run:
        assert run.resume({"model": {"w": np.zeros(10)}, "step": 0}) == 6
        with pytest.raises(UsageError, match="nothing shows"):
            run.save(7, STATE, force=True)
    assert content(other) == {"manifest.json": FOREIGN["a site"]}


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"format":"reknit","for'])
def test_a_damaged_manifest_beside_files_of_a_save_can_be_replaced_and_removed(
    path: Path, tmp_path: Path, damage: bytes
) -> None:
    (path / "manifest.json").write_bytes(damage)
    with pytest.raises(CheckpointExistsError):
        reknit.save(path, STATE)
    with pytest.raises(FormatError):
        reknit.load(path, dict(STATE))
    shutil.copytree(path, tmp_path / "again")
    reknit.save(path, STATE, overwrite=True)
    assert reknit.verify(path, "data").ok
    reknit.delete(tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_manifest_whose_beginning_is_damaged_names_the_files_beside_it(path: Path) -> None:
    data = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(b'{"fprmat"' + data[9:])
    reknit.save(path, STATE, overwrite=True)
    assert reknit.verify(path, "data").ok


def test_another_programs_manifest_among_files_of_a_save_stays(path: Path) -> None:
    for name in one_by_one(["a site", "a list", "another format"]):
        (path / "manifest.json").write_bytes(FOREIGN[name])
        before = content(path)
        with pytest.raises(UsageError, match="nothing shows"):
            reknit.save(path, STATE, overwrite=True)
        with pytest.raises(CheckpointNotFoundError):
            reknit.delete(path)
        assert content(path) == before


def test_a_file_that_another_program_puts_there_during_a_save_stays(tmp_path: Path) -> None:
    class Disturbed(FaultyStorage):
        def create(self, path: str, nbytes: int) -> Any:
            (tmp_path / "one" / "manifest.json").write_bytes(FOREIGN["a site"])
            return super().create(path, nbytes)

    register("disturbed", lambda url, _: Disturbed(open_storage(url.removeprefix("disturbed://"))))
    for overwrite in (True, False):
        shutil.rmtree(tmp_path / "one", ignore_errors=True)
        with pytest.raises(UsageError, match="nothing shows"):
            reknit.save(f"disturbed://{tmp_path}/one", STATE, overwrite=overwrite)
        assert (tmp_path / "one" / "manifest.json").read_bytes() == FOREIGN["a site"]


def test_a_checkpoint_of_a_newer_version_is_neither_replaced_nor_removed(path: Path) -> None:
    manifest = path / "manifest.json"
    data = manifest.read_bytes()
    for old, new in ((b'"format_version":1', b'"format_version":2'), (b'"requires":[', b'"requires":["x"')):
        body, key, _ = data.replace(old, new, 1).rpartition(b',"digest":"')
        manifest.write_bytes(body + key + f'{digest(body):016x}"}}'.encode())
        before = content(path)
        with pytest.raises(VersionError):
            reknit.save(path, STATE, overwrite=True)
        with pytest.raises(VersionError) as caught:
            reknit.delete(path)
        assert str(manifest) in str(caught.value)
        with pytest.raises(CheckpointExistsError):
            reknit.save(path, STATE)
        assert content(path) == before


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_folder_or_pipe_of_that_name_is_said_before_anything_is_written(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    place = folder / "manifest.json"
    place.mkdir() if kind == "folder" else os.mkfifo(place)
    for overwrite in (True, False):
        with pytest.raises(UsageError, match="nothing shows"):
            reknit.save(folder, STATE, overwrite=overwrite)
    assert os.listdir(folder) == ["manifest.json"]
    assert reknit.latest(folder.parent) is None


@pytest.mark.parametrize("url", ["process://", "mem://test_recognising", "memory://test_recognising"])
def test_every_store_tells_them_apart_by_a_short_look(url: str, path: Path) -> None:
    pytest.importorskip("fsspec") if url.startswith("memory") else None
    with_storage: Storage = ProcessMemory("recognising") if url == "process://" else open_storage(url)
    storage = FaultyStorage(with_storage)
    for listed in list(storage.list()):
        storage.delete(listed.path)
    assert find_manifest(storage) is None
    storage.put("manifest.json", FOREIGN["large"], if_absent=True)
    storage.operations.clear()
    found = find_manifest(storage)
    assert found is not None
    assert not found.ours
    assert len(found.head) == 4096
    assert "get" not in {operation.name for operation in storage.operations}
    assert is_committed(storage, "0" * 32) is False
    storage.put("manifest.json", (path / "manifest.json").read_bytes(), if_absent=False)
    assert (found := find_manifest(storage)) is not None
    assert found.ours
    storage.delete("manifest.json")


def test_many_files_of_another_program_cost_a_bounded_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognising, "MOST_BESIDE", 9)
    place = ProcessMemory("many")
    place.put("manifest.json", b"", if_absent=False)
    for number in range(30):
        place.put(f"a/{number:05d}", b"", if_absent=False)
    seen = 0

    class Counted(FaultyStorage):
        def list(self, prefix: str = "") -> Any:
            nonlocal seen
            for listed in super().list(prefix):
                seen += 1
                yield listed

    found = find_manifest(Counted(place))
    assert found is not None
    assert not found.ours
    assert seen == 10
    ProcessMemory.clear("many")


def test_a_folder_of_verl_is_named_with_the_command_that_merges_it(tmp_path: Path) -> None:
    actor = tmp_path / "global_step_5" / "actor"
    actor.mkdir(parents=True)
    torch = pytest.importorskip("torch")
    torch.save({"rng": 1}, actor / "extra_state_world_size_1_rank_0.pt")
    (actor / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(
        CheckpointNotFoundError, match="it is a checkpoint of verl with shards of FSDP"
    ) as caught:
        reknit.open(actor)
    assert f"verl.model_merger merge --backend fsdp --local_dir '{actor}'" in (caught.value.remedy or "")
    with pytest.raises(CheckpointNotFoundError) as caught:
        reknit.open(tmp_path)
    assert f"pass a folder in {tmp_path}/global_step_5, such as actor" in (caught.value.remedy or "")
