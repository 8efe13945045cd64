from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit
from reknit.events.progress import amount
from reknit.format.index import decode_index, encode_index
from reknit.types.manifest import Index
from tests.cli.command import damage
from tests.integrations.formats.checkpoints import columns, save_in_boxes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.command import Command


@pytest.fixture
def path(tmp_path: Path) -> Path:
    one, two = torch.nn.Linear(20, 20), torch.nn.Linear(20, 20)
    two.weight = one.weight
    state = {
        "model": torch.nn.Sequential(one, two),
        "extra": {"lr": 0.5, "z": np.ones((2, 2), np.complex128), "none": np.ones((0, 3))},
    }
    reknit.save(tmp_path / "c", state)
    return tmp_path / "c"


def index_of(path: Path) -> Path:
    (index,) = path.glob("index.*.parquet")
    return index


def test_what_was_not_read_is_said_with_the_command_that_reads_it(command: Command, path: Path) -> None:
    place = path.rename(path.with_name("a run"))
    nbytes = sum(file.stat().st_size for file in place.glob("*/*.safetensors"))
    whole = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    ran = command("verify", place)
    assert (ran.code, ran.err) == (0, "")
    checked, unread = ran.out.splitlines()
    assert checked.startswith("no problems in the metadata of 5 files (")
    assert unread == (
        f"the tensors in 2 data files ({amount(nbytes)}) were not read; this reads them: "
        f"reknit verify '{place}' --data"
    )
    facts = command("verify", place, "--json").json
    assert (facts["num_unread"], facts["nbytes_unread"], facts["unread"]) == (2, nbytes, unread)
    assert facts["nbytes_checked"] == whole - nbytes
    (read,) = command("verify", *shlex.split(unread)[-2:]).out.splitlines()
    assert read.startswith(f"no problems in 5 files ({amount(whole)}")


def test_the_report_says_what_was_not_read_and_the_call_that_reads_it(path: Path) -> None:
    report, deeper = reknit.verify(path), reknit.verify(path, "data")
    assert (report.level, deeper.level) == ("metadata", "data")
    assert report.unread is not None
    assert report.unread.endswith(f"were not read; reknit.verify({str(path)!r}, 'data') reads them")
    assert f"unread: {report.unread[:40]}" in repr(report)
    assert (deeper.num_unread, deeper.nbytes_unread, deeper.unread) == (0, 0, None)
    assert reknit.verify(path, "structure") == report, "its name in version 0.1"  # type: ignore[arg-type]
    with pytest.raises(reknit.UsageError, match="level is 'metadata' or 'data', not 'all'"):
        reknit.verify(path, "all")  # type: ignore[arg-type]


def test_a_flipped_bit_is_one_line_and_exit_code_one(command: Command, path: Path) -> None:
    (file,) = (path / "model").glob("*.safetensors")
    damage(file)
    assert command("verify", path).code == 0
    ran = command("verify", path, "--data")
    assert ran.code == 1
    (line,) = ran.out.splitlines()
    assert f"model/{file.name}" in line


def test_every_problem_is_told(command: Command, path: Path) -> None:
    for file in path.glob("*/*"):
        file.unlink()
    ran = command("verify", path)
    assert ran.code == 1
    assert len(ran.out.splitlines()) >= 3


def test_a_folder_without_a_manifest_is_not_found(command: Command, path: Path) -> None:
    (path / "manifest.json").unlink()
    ran = command("verify", path, "--rebuild-index")
    assert (ran.code, ran.out) == (3, "")
    assert "never committed" in ran.err


def test_a_damaged_manifest_is_a_problem(command: Command, path: Path) -> None:
    damage(path / "manifest.json", at=30)
    ran = command("verify", path)
    assert ran.code == 1
    assert ran.out.startswith("manifest.json: ")


def test_the_rebuilt_index_agrees_and_is_the_same_file(command: Command, path: Path, tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    ran = command("verify", path, "--rebuild-index", "--output", tmp_path / "rebuilt.parquet")
    assert ran.code == 0
    assert "headers of 2 data files agree" in ran.out
    assert (tmp_path / "rebuilt.parquet").read_bytes() == index_of(path).read_bytes()
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_json_tells_all_that_the_lines_tell(command: Command, path: Path) -> None:
    facts = command("verify", path, "--json").json
    assert facts == {
        "path": str(path),
        "level": "metadata",
        "ok": True,
        "num_files": facts["num_files"],
        "nbytes_checked": facts["nbytes_checked"],
        "num_unread": 2,
        "nbytes_unread": facts["nbytes_unread"],
        "unread": facts["unread"],
        "unchecked": None,
        "problems": [],
        "notes": [],
    }
    index_of(path).unlink()
    lines = command("verify", path, "--data", "--rebuild-index").out.splitlines()
    ran = command("verify", path, "--data", "--rebuild-index", "--json")
    assert (ran.code, ran.json["ok"], ran.json["level"]) == (1, False, "data")
    assert ran.json["problems"] + ran.json["notes"] == lines


def test_a_lost_index_can_be_put_back(command: Command, path: Path, tmp_path: Path) -> None:
    index, output = index_of(path), tmp_path / "rebuilt.parquet"
    whole = index.read_bytes()
    losses: tuple[Callable[[], object], ...] = (index.unlink, lambda: damage(index, at=len(whole) // 2))
    for lose in losses:
        lose()
        ran = command("verify", path, "--rebuild-index", "--output", output)
        assert ran.code == 1
        assert f"byte for byte the lost {index.name}" in ran.out
        assert output.read_bytes() == whole
        output.replace(index)
        assert command("verify", path, "--data", "--rebuild-index").code == 0


def test_an_index_of_many_chunks_is_rebuilt(command: Command, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"w": np.ones((40, 60), np.float32), "v": np.ones(()), "z": np.ones(3, np.uint8)}
    save_in_boxes(tmp_path / "c", arrays, {"w": columns((40, 60), 7)})
    ran = command("verify", tmp_path / "c", "--rebuild-index")
    assert ran.code == 0
    assert "agree" in ran.out


def test_an_index_that_places_tensors_elsewhere_is_told(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(index: Index, *, checked: bool) -> bytes:
        start = index.start.copy()
        start[[0, 1]] = start[[1, 0]]
        columns = (index.tensor, index.offsets, index.lengths, index.file, start, index.nbytes)
        return encode_index(Index(index.tensors, index.files, *columns), checked=checked)

    with monkeypatch.context() as patch:
        patch.setattr("reknit.engine.saving.coordinator.encode_index", swapped)
        reknit.save(tmp_path / "c", {"model": {"a": np.zeros(4), "b": np.ones(4), "c": np.ones(4)}})
    assert decode_index(index_of(tmp_path / "c").read_bytes()).start[0] > 4096
    assert command("verify", tmp_path / "c", "--data").code == 0
    ran = command("verify", tmp_path / "c", "--rebuild-index")
    assert ran.code == 1
    assert [line.split()[-1] for line in ran.out.splitlines()] == ["model/a", "model/b"]


def test_a_damaged_header_is_why_an_index_cannot_be_rebuilt_and_a_damaged_manifest_is_no_obstacle(
    command: Command, path: Path, tmp_path: Path
) -> None:
    damage(path / "manifest.json", at=30)
    ran = command("verify", path, "--rebuild-index", "--output", tmp_path / "rebuilt.parquet")
    assert ran.code == 1
    assert (tmp_path / "rebuilt.parquet").read_bytes() == index_of(path).read_bytes()
    (file,) = (path / "model").glob("*.safetensors")
    damage(file, at=0)
    ran = command("verify", path, "--rebuild-index")
    assert ran.code == 1
    assert "cannot be rebuilt" in ran.out


def test_output_is_for_a_rebuilt_index_and_never_replaces_a_file(
    command: Command, path: Path, tmp_path: Path
) -> None:
    index = index_of(path)
    whole = index.read_bytes()
    ran = command("verify", path, "--rebuild-index", "--output", index)
    assert ran.code == 2
    assert "exists already" in ran.err
    assert index.read_bytes() == whole
    assert command("verify", path, "--output", tmp_path / "x").code == 2
    assert not (tmp_path / "x").exists()
