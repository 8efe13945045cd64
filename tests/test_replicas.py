"""Loads of a checkpoint that is damaged here, and whole in another place."""

from __future__ import annotations

import itertools
import shutil
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

import reknit

if TYPE_CHECKING:
    from pathlib import Path

SAVED: dict[str, Any] = {"a": np.arange(3 << 20, dtype=np.float32), "b": np.arange(1000, dtype=np.int64)}


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Path, Path]:
    """Save a checkpoint; return its path, and that of a replica."""
    here, there = tmp_path / "here", tmp_path / "there"
    reknit.save(here, {"model": SAVED, "extra": {"epoch": 7}})
    shutil.copytree(here, there)
    return here, there


def zeros() -> dict[str, Any]:
    return {name: np.zeros_like(array) for name, array in SAVED.items()}


def damaged(data: bytes, damage: str) -> bytes | None:
    """Return the damaged content of a file, None if there is no file any more."""
    found = {
        "longer": b"\0" * 4096 + data,
        "shorter": data[:-1],
        "changed": data[:-1] + bytes([data[-1] ^ 1]),
        "other": b"\0" * (len(data) - 1),
    }
    return found.get(damage)


def replace(file: Path, data: bytes | None) -> None:
    file.unlink(missing_ok=True)
    if data is not None:
        file.write_bytes(data)


def test_a_file_that_is_not_what_was_saved_is_taken_from_its_replica(copies: tuple[Path, Path]) -> None:
    here, there = copies
    (file,) = here.glob("model/*.safetensors")
    whole = file.read_bytes()
    levels: list[Literal["touched", "full", "off"]] = ["touched", "full", "off"]
    for damage, verify in itertools.product(("longer", "other", "missing", "changed"), levels):
        replace(file, damaged(whole, damage))
        options, target = reknit.LoadOptions(verify=verify, replicas=(there,)), zeros()
        if (damage, verify) == ("changed", "off"):  # the load does not check
            reknit.load(here, {"model": target}, options=options)
            assert [name for name in SAVED if not np.array_equal(target[name], SAVED[name])] != []
            continue
        with pytest.raises(reknit.CorruptError):
            reknit.load(here, {"model": target}, options=reknit.LoadOptions(verify=verify))
        reknit.load(here, {"model": target}, options=options)
        for name, array in SAVED.items():
            assert np.array_equal(target[name], array), (damage, verify)
        with reknit.open(here, options=options) as checkpoint:
            part = checkpoint.read("model", "a", (slice(5, 10),))
        assert np.array_equal(part, SAVED["a"][5:10]), (damage, verify)


def changed(folder: Path, at: int) -> None:
    (file,) = folder.glob("model/*.safetensors")
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_full_check_takes_each_block_from_the_copy_that_has_it_and_says_so(
    copies: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    here, there = copies
    changed(here, -1)
    changed(there, 0)
    options, target = reknit.LoadOptions(verify="full", replicas=(there,), only=("model/a",)), zeros()
    reknit.load(here, {"model": target}, options=options)
    assert np.array_equal(target["a"], SAVED["a"])
    assert "a replica has them" in caplog.text


def test_where_no_copy_is_whole_the_error_says_which_were_tried_and_a_full_check_changes_nothing(
    copies: tuple[Path, Path],
) -> None:
    here, there = copies
    changed(here, -1)
    changed(there, -1)
    options, target = reknit.LoadOptions(verify="full", replicas=(there,)), zeros()
    with pytest.raises(reknit.CorruptError, match=r"nothing was changed[\s\S]*no replica has them"):
        reknit.load(here, {"model": target}, options=options)
    assert not any(array.any() for array in target.values())
    with pytest.raises(reknit.CorruptError, match=r"no replica has them.*there"):
        reknit.load(here, {"model": target}, options=reknit.LoadOptions(replicas=(there,)))


def read_back(here: Path, there: Path) -> dict[str, Any]:
    options, target = reknit.LoadOptions(replicas=(there,)), zeros()
    state = {"model": target, "extra": {"epoch": 0}}
    reknit.load(here, state, options=options)
    with reknit.open(here, options=options) as checkpoint:
        assert np.array_equal(checkpoint.read("model", "b"), SAVED["b"])
        assert checkpoint.values["extra"] == {"epoch": 7}
    assert state["extra"] == {"epoch": 7}
    return target


def test_a_manifest_an_index_or_a_value_that_is_damaged_is_taken_from_a_replica(
    copies: tuple[Path, Path],
) -> None:
    here, there = copies
    for name in ("manifest.json", "index.*.parquet", "extra/*.msgpack"):
        (file,) = here.glob(name)
        whole = file.read_bytes()
        for damage in ("missing", "changed", "shorter"):
            replace(file, damaged(whole, damage))
            state: dict[str, Any] = {"model": dict(SAVED), "extra": {"epoch": 0}}
            with pytest.raises((reknit.CorruptError, reknit.CheckpointNotFoundError)):
                reknit.load(here, state)
            for key, array in read_back(here, there).items():
                assert np.array_equal(array, SAVED[key]), (name, damage)
        replace(file, whole)


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
