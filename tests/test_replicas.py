"""Loads of a checkpoint that is damaged here, and whole in another place."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

import reknit

if TYPE_CHECKING:
    from pathlib import Path

SAVED: dict[str, Any] = {"a": np.arange(3 << 20, dtype=np.float32), "b": np.arange(1000, dtype=np.int64)}


@pytest.mark.parametrize("verify", ["touched", "full", "off"])
@pytest.mark.parametrize("damage", ["longer", "shorter", "missing", "changed"])
def test_a_file_that_is_not_what_was_saved_is_taken_from_its_replica(
    tmp_path: Path, damage: str, verify: Literal["touched", "full", "off"]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    reknit.save(here, {"model": SAVED})
    shutil.copytree(here, there)
    (file,) = here.glob("model/*.safetensors")
    data = file.read_bytes()
    if damage == "longer":
        file.write_bytes(b"\0" * 4096 + data)
    elif damage == "shorter":
        file.write_bytes(b"\0" * (len(data) - 1))
    elif damage == "missing":
        file.unlink()
    else:
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    target = {name: np.zeros_like(array) for name, array in SAVED.items()}
    if damage == "changed" and verify == "off":  # the load does not check
        reknit.load(here, {"model": target}, options=reknit.LoadOptions(verify=verify, replicas=(there,)))
        assert [name for name in SAVED if not np.array_equal(target[name], SAVED[name])] != []
        return
    with pytest.raises(reknit.CorruptError):
        reknit.load(here, {"model": target}, options=reknit.LoadOptions(verify=verify))
    options = reknit.LoadOptions(verify=verify, replicas=(there,))
    reknit.load(here, {"model": target}, options=options)
    for name, array in SAVED.items():
        assert np.array_equal(target[name], array)
    with reknit.open(here, options=options) as checkpoint:
        assert np.array_equal(checkpoint.read("model", "a", (slice(5, 10),)), SAVED["a"][5:10])


def changed(folder: Path, at: int) -> None:
    (file,) = folder.glob("model/*.safetensors")
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_full_check_takes_each_block_from_the_copy_that_has_it_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    reknit.save(here, {"model": SAVED})
    shutil.copytree(here, there)
    changed(here, -1)
    changed(there, 0)
    options = reknit.LoadOptions(verify="full", replicas=(there,), only=("model/a",))
    target = {name: np.zeros_like(array) for name, array in SAVED.items()}
    reknit.load(here, {"model": target}, options=options)
    assert np.array_equal(target["a"], SAVED["a"])
    assert "a replica has them" in caplog.text


def test_a_full_check_refuses_a_block_that_no_copy_has_before_anything_changes(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    reknit.save(here, {"model": SAVED})
    shutil.copytree(here, there)
    changed(here, -1)
    changed(there, -1)
    target = {name: np.zeros_like(array) for name, array in SAVED.items()}
    options = reknit.LoadOptions(verify="full", replicas=(there,))
    with pytest.raises(reknit.CorruptError, match=r"nothing was changed[\s\S]*no replica has them"):
        reknit.load(here, {"model": target}, options=options)
    assert not any(array.any() for array in target.values())


def test_where_no_copy_is_whole_the_error_says_which_were_tried(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    reknit.save(here, {"model": SAVED})
    shutil.copytree(here, there)
    for place in (here, there):
        (file,) = place.glob("model/*.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    options = reknit.LoadOptions(replicas=(there,))
    target = {name: np.zeros_like(array) for name, array in SAVED.items()}
    with pytest.raises(reknit.CorruptError, match=r"no replica has them.*there"):
        reknit.load(here, {"model": target}, options=options)


def read_back(here: Path, there: Path) -> dict[str, Any]:
    options = reknit.LoadOptions(replicas=(there,))
    target = {name: np.zeros_like(array) for name, array in SAVED.items()}
    state = {"model": target, "extra": {"epoch": 0}}
    reknit.load(here, state, options=options)
    with reknit.open(here, options=options) as checkpoint:
        assert np.array_equal(checkpoint.read("model", "b"), SAVED["b"])
        assert checkpoint.values["extra"] == {"epoch": 7}
    assert state["extra"] == {"epoch": 7}
    return target


@pytest.mark.parametrize("damage", ["missing", "changed", "shorter"])
@pytest.mark.parametrize("name", ["manifest.json", "index.*.parquet", "extra/*.msgpack"])
def test_a_manifest_an_index_or_a_value_that_is_damaged_is_taken_from_a_replica(
    tmp_path: Path, name: str, damage: str
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    reknit.save(here, {"model": SAVED, "extra": {"epoch": 7}})
    shutil.copytree(here, there)
    (file,) = here.glob(name)
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "changed":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        file.write_bytes(data[:-1])
    state: dict[str, Any] = {"model": dict(SAVED), "extra": {"epoch": 0}}
    with pytest.raises((reknit.CorruptError, reknit.CheckpointNotFoundError)):
        reknit.load(here, state)
    for key, array in read_back(here, there).items():
        assert np.array_equal(array, SAVED[key])


def test_where_the_manifest_is_damaged_in_all_copies_the_error_is_about_the_first(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    reknit.save(here, {"model": SAVED, "extra": {"epoch": 7}})
    shutil.copytree(here, there)
    for place in (here, there):
        (place / "manifest.json").write_bytes(b"{}")
    with pytest.raises(reknit.CorruptError) as caught:
        read_back(here, there)
    assert caught.value.path is not None
    assert str(here) in caught.value.path
