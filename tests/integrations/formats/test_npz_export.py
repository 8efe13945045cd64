from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import reknit
from reknit.integrations.numpy_gguf.export import DTYPES, export_npz
from reknit.types.dtype import numpy_dtype
from tests.integrations.formats.checkpoints import columns, every_dtype, save_in_boxes, save_training

if TYPE_CHECKING:
    from pathlib import Path


def test_numpy_reads_the_bits_of_every_dtype(tmp_path: Path) -> None:
    state = every_dtype()
    reknit.save(tmp_path / "c", {"model": state})
    report = export_npz(tmp_path / "c", tmp_path / "out.npz", verify=True)
    with np.load(tmp_path / "out.npz", allow_pickle=False) as found:
        true = dict(found[DTYPES].tolist())
        for dtype, tensors in state.items():
            for name, tensor in tensors.items():
                array = found[f"model.{dtype}.{name}"]
                assert array.shape == tensor.shape
                assert array.tobytes() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                assert true.get(f"model.{dtype}.{name}", str(array.dtype)) == dtype
        again = found["model.bfloat16.matrix"].view(numpy_dtype("bfloat16"))
    assert again.tobytes() == state["bfloat16"]["matrix"].view(torch.int16).numpy().tobytes()
    assert report.changed["model.bfloat16.matrix"] == "uint16 (bits of bfloat16)"
    assert "model.float32.matrix" not in report.changed
    assert zipfile.ZipFile(tmp_path / "out.npz").testzip() is None


def test_values_are_arrays_and_others_are_left_out_by_name(tmp_path: Path) -> None:
    save_training(tmp_path / "c")
    report = export_npz(tmp_path / "c", tmp_path / "out.npz", verify=True)
    assert {"values.none", "values.set", "rng"} <= set(report.left_out)
    with np.load(tmp_path / "out.npz") as found:
        assert found["values.epoch"] == 3
        assert found["values.text"] == "x"
        assert found["values.mixed.1"] == 2.5
        assert found["optimizer.param_groups.0.lr"] == 0.1
        assert DTYPES not in found.files


def test_tensors_in_chunks_come_out_whole(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((50, 301))
    save_in_boxes(tmp_path / "c", {"w": array}, {"w": columns((50, 301), 7)})
    export_npz(tmp_path / "c", tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as found:
        assert np.array_equal(found["model.w"], array)


def test_a_name_that_an_array_has_already_is_refused(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"m": {"a.b": torch.ones(1), "a": {"b": 2}}})
    with pytest.raises(reknit.MismatchError, match=r"m\.a\.b"):
        export_npz(tmp_path / "c", tmp_path / "out.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
