"""Flipped, cut, swapped and missing bytes anywhere in a checkpoint are found, and the file is named."""

from __future__ import annotations

import random
import re
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit

if TYPE_CHECKING:
    from pathlib import Path


def state(value: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(int(value))
    weights = {f"layers.{n}.weight": rng.standard_normal((300, 70)).astype(np.float32) for n in range(3)}
    return {"model": weights, "extra": {"epoch": int(value), "rng": reknit.PerRank({"key": [value] * 5})}}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pristine") / "step_1"
    reknit.save(path, state(), step=1)
    assert reknit.verify(path, "data").ok
    return path


def files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def noticed(path: Path, name: str) -> None:
    """Assert that verify names the file and that load refuses it."""
    try:
        report = reknit.verify(path, "data")
    except reknit.CheckpointNotFoundError:
        assert name == "manifest.json"
        return
    assert not report.ok
    assert any(name in problem for problem in report.problems), report.problems
    target = state(2.0)
    with pytest.raises(reknit.ReknitError) as caught:
        reknit.load(path, target)
    assert isinstance(caught.value, reknit.errors.FormatError), caught.value
    assert name in str(caught.value)


def places(size: int, count: int, rng: random.Random) -> list[int]:
    edges = [0, 7, 8, 9, size // 2, size - 2, size - 1]
    return sorted({p for p in edges if 0 <= p < size} | {rng.randrange(size) for _ in range(count)})


def test_every_flipped_bit_is_found_and_names_its_file(pristine: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    for file in files(pristine):
        name = str(file.relative_to(pristine))
        content = file.read_bytes()
        copy = tmp_path / "copy"
        shutil.copytree(pristine, copy)
        for place in places(len(content), 8, rng):
            flipped = bytearray(content)
            flipped[place] ^= 1 << rng.randrange(8)
            (copy / name).write_bytes(flipped)
            noticed(copy, name)
        shutil.rmtree(copy)


def cut(content: bytes) -> list[bytes]:
    return [b"", content[:1], content[: len(content) // 2], content[:-1], content + b"\0"]


def test_every_truncated_or_extended_file_is_found(pristine: Path, tmp_path: Path) -> None:
    for file in files(pristine):
        name = str(file.relative_to(pristine))
        copy = tmp_path / "copy"
        shutil.copytree(pristine, copy)
        for content in cut(file.read_bytes()):
            (copy / name).write_bytes(content)
            noticed(copy, name)
        shutil.rmtree(copy)


def test_every_missing_file_is_found(pristine: Path, tmp_path: Path) -> None:
    for file in files(pristine):
        name = str(file.relative_to(pristine))
        copy = tmp_path / "copy"
        shutil.copytree(pristine, copy)
        (copy / name).unlink()
        noticed(copy, name)
        shutil.rmtree(copy)


def role(file: Path) -> str:
    """Return a file's name without its write id, in its item's folder."""
    folder = "" if file.suffix in (".json", ".parquet") else file.parent.name
    return f"{folder}/{re.sub('[.][0-9a-f]{8}[.]', '.', file.name)}"


def test_files_swapped_with_those_of_another_checkpoint_are_found(pristine: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    reknit.save(other, state(3.0))
    mine = {role(file): file for file in files(pristine)}
    theirs = {role(file): file for file in files(other)}
    assert set(mine) == set(theirs)
    for kind, file in mine.items():
        if file.name == "manifest.json":
            continue  # the manifest of another checkpoint names files that are not here
        copy = tmp_path / "copy"
        shutil.copytree(pristine, copy)
        name = str(file.relative_to(pristine))
        shutil.copyfile(theirs[kind], copy / name)
        noticed(copy, name)
        shutil.rmtree(copy)


def spoil_target(path: Path) -> str:
    file = next(p for p in files(path) if p.suffix == ".safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 0x40
    file.write_bytes(data)
    return str(file.relative_to(path))


def test_a_flipped_bit_names_file_and_tensor_and_says_that_the_target_is_partly_written(
    pristine: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(pristine, copy)
    name = spoil_target(copy)
    with pytest.raises(reknit.CorruptError, match="partly written") as caught:
        reknit.load(copy, state(2.0))
    assert name in str(caught.value)
    assert "model/layers." in str(caught.value)
    assert caught.value.rank == 0


def test_a_missing_or_short_file_is_an_error_before_anything_changes(pristine: Path, tmp_path: Path) -> None:
    for suffix, content in ((".safetensors", None), (".safetensors", b"short"), (".parquet", b"PAR1")):
        copy = tmp_path / "copy"
        shutil.copytree(pristine, copy)
        file = next(p for p in files(copy) if p.suffix == suffix)
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        target = state(2.0)
        before = {name: array.copy() for name, array in target["model"].items()}
        with pytest.raises(reknit.CorruptError):
            reknit.load(copy, target)
        assert all((target["model"][name] == array).all() for name, array in before.items())
        shutil.rmtree(copy)


def test_a_damaged_manifest_says_of_which_checkpoint_it_is(pristine: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(pristine, copy)
    (copy / "manifest.json").write_bytes((pristine / "manifest.json").read_bytes()[:-7])
    for read in (lambda: reknit.open(copy), lambda: reknit.load(copy, state())):
        with pytest.raises(reknit.errors.FormatError) as caught:
            read()
        assert str(copy) in str(caught.value)
        assert "load another checkpoint" in str(caught.value)
