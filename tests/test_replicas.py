"""Loading what is damaged here, and whole elsewhere."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

import reknit

if TYPE_CHECKING:
    from pathlib import Path

SAVED: dict[str, Any] = {"a": np.arange(3 << 20, dtype=np.float32), "b": np.arange(1000, dtype=np.int64)}


@pytest.mark.parametrize("verify", ["touched", "off"])
@pytest.mark.parametrize("damage", ["longer", "shorter", "missing", "changed"])
def test_a_file_that_is_not_what_was_saved_is_taken_from_its_replica(
    tmp_path: Path, damage: str, verify: Literal["touched", "off"]
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
        if verify == "off":
            return  # nobody looks
    target = {name: np.zeros_like(array) for name, array in SAVED.items()}
    with pytest.raises(reknit.CorruptError):
        reknit.load(here, {"model": target}, options=reknit.LoadOptions(verify=verify))
    options = reknit.LoadOptions(verify=verify, on_corrupt="replica", replicas=(there,))
    reknit.load(here, {"model": target}, options=options)
    for name, array in SAVED.items():
        assert np.array_equal(target[name], array)
    with reknit.open(here, options=options) as checkpoint:
        assert np.array_equal(checkpoint.read("model", "a", (slice(5, 10),)), SAVED["a"][5:10])


def test_where_no_copy_is_whole_the_error_says_which_were_tried(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    reknit.save(here, {"model": SAVED})
    shutil.copytree(here, there)
    for place in (here, there):
        (file,) = place.glob("model/*.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    options = reknit.LoadOptions(on_corrupt="replica", replicas=(there,))
    target = {name: np.zeros_like(array) for name, array in SAVED.items()}
    with pytest.raises(reknit.CorruptError, match=r"no replica has them.*there"):
        reknit.load(here, {"model": target}, options=options)
