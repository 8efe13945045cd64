from __future__ import annotations

import os
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import reknit
from reknit.integrations.formats import export as tensor_stream
from reknit.integrations.torch_save.export import export_torch
from tests.integrations.formats.checkpoints import every_dtype, same, save_training, trained
from tests.ranks import run

if TYPE_CHECKING:
    from pathlib import Path


def test_torch_reads_every_dtype_bit_for_bit(tmp_path: Path) -> None:
    state = every_dtype()
    reknit.save(tmp_path / "c", {"model": state})
    report = export_torch(tmp_path / "c", tmp_path / "out.pt", verify=True)
    found = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert all(same(found[dtype][name], one) for dtype, all_ in state.items() for name, one in all_.items())
    assert (report.num_tensors, report.verified, report.left_out) == (3 * len(state), True, {})
    assert zipfile.ZipFile(tmp_path / "out.pt").testzip() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "out.pt"]


def export_without_a_warning(source: str, file: str, folder: str) -> None:
    """Export in a forked process: torch warns once a process, so one that has not yet shows it."""
    from reknit.integrations.dcp.export import export_dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ComplexHalf")
        export_torch(source, file, verify=True)
        export_dcp(source, folder, verify=True)


def test_a_fresh_process_exports_experimental_dtypes_without_a_warning(tmp_path: Path) -> None:
    halves = torch.ones(12, dtype=torch.uint8).view(torch.complex32)
    reknit.save(tmp_path / "c", {"model": {"half": halves}})
    places = [str(tmp_path / name) for name in ("c", "out.pt", "dcp")]
    run(1, export_without_a_warning, *places, joined=False)


def test_a_tensor_of_several_pieces_has_its_bits_and_its_checksum(tmp_path: Path) -> None:
    large = torch.arange(tensor_stream.PIECE_NBYTES * 5 // 32)
    reknit.save(tmp_path / "c", {"model": {"large": large, "small": torch.ones(3)}})
    export_torch(tmp_path / "c", tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["model"]["large"], large)
    assert zipfile.ZipFile(tmp_path / "out.pt").testzip() is None


def test_model_and_optimizer_load_what_torch_reads(tmp_path: Path) -> None:
    net, optimizer = save_training(tmp_path / "c")
    report = export_torch(tmp_path / "c", tmp_path / "out.pt", verify=True)
    assert list(report.left_out) == ["rng"]
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["model"]["0.weight"].data_ptr() == found["model"]["1.weight"].data_ptr()
    assert found["values"]["mixed"] == (1, 2.5)
    other, fresh = trained()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(found["model"])
    set_optimizer_state_dict(other, fresh, found["optimizer"])
    assert all(same(other.state_dict()[name], one) for name, one in net.state_dict().items())
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert all(same(optimizer.state[one][key], fresh.state[two][key]) for key in optimizer.state[one])


def test_values_that_torch_refuses_are_left_out_by_name(tmp_path: Path) -> None:
    from pathlib import PurePosixPath

    reknit.save(tmp_path / "c", {"extra": {"n": 1, "path": PurePosixPath("x"), "list": [range(3), 4]}})
    report = export_torch(tmp_path / "c", tmp_path / "out.pt", verify=True)
    assert set(report.left_out) == {"extra.path", "extra.list.0"}
    assert "weights_only" in report.left_out["extra.path"]
    assert torch.load(tmp_path / "out.pt", weights_only=True) == {"extra": {"n": 1, "list": [None, 4]}}


def test_a_state_without_tensors_and_an_empty_one_are_exported(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"a": {}, "b": 1})
    export_torch(tmp_path / "c", tmp_path / "out.pt", verify=True)
    assert torch.load(tmp_path / "out.pt", weights_only=True) == {"a": {}, "b": 1}


def test_a_file_is_replaced_on_request(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"a": 1})
    (tmp_path / "out.pt").write_text("mine")
    export_torch(tmp_path / "c", tmp_path / "out.pt", overwrite=True)
    assert torch.load(tmp_path / "out.pt", weights_only=True) == {"a": 1}


def test_a_wrong_byte_is_found_when_the_file_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reknit.save(tmp_path / "c", {"model": {"w": torch.arange(1000.0)}})
    whole = torch.load

    def wrong(path: Any, **options: Any) -> Any:
        found = whole(path, **options)
        if "model" in found:
            found["model"]["w"] = found["model"]["w"].clone()
            found["model"]["w"][7] += 1
        return found

    monkeypatch.setattr(torch, "load", wrong)
    with pytest.raises(reknit.CorruptError, match=r"model\.w"):
        export_torch(tmp_path / "c", tmp_path / "out.pt", verify=True)
    assert os.listdir(tmp_path) == ["c"]
