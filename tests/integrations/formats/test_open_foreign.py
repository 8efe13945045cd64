"""Checkpoints of other programs, opened in place: every value as it was, and slices without the rest."""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

import reknit
from reknit.cli.main import main
from reknit.errors import FormatError
from reknit.integrations.formats.entries import MAX_NODES
from reknit.integrations.formats.open import read_foreign
from reknit.storage.registry import following, open_storage
from reknit.testing.metered import MeteredStorage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WEIGHTS = {
    "layers.0.w": torch.arange(40, dtype=torch.float32).reshape(8, 5),
    "layers.0.b": torch.randn(3).to(torch.bfloat16),
    "f8": torch.randn(9).to(torch.float8_e4m3fn),
    "scales": torch.ones(3).to(torch.float8_e8m0fnu),
    "complex": torch.randn(2, dtype=torch.complex64),
    "numbers": torch.arange(-3, 3),
    "bits": torch.tensor([True, False, True]),
    "zero": torch.tensor(2.5, dtype=torch.float64),
    "nothing": torch.empty(0, 4),
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have equal shape, dtype and bits."""
    flat = [one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*flat)


def save_dcp(state: dict[str, Any], path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def save_sharded(path: Path) -> Path:
    path.mkdir()
    names = list(WEIGHTS)
    where: dict[str, str] = {}
    for number, part in enumerate((names[:3], names[3:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: WEIGHTS[name] for name in part}, path / file)
        where |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (path / "config.json").write_text('{"hidden_size": 5}')
    return path


def save_single(path: Path, name: str = "model.safetensors") -> Path:
    path.mkdir()
    save_file(WEIGHTS, path / name)
    return path


def save_bin(path: Path) -> Path:
    path.mkdir()
    torch.save(dict(list(WEIGHTS.items())[:2]), path / "pytorch_model-00001-of-00002.bin")
    torch.save(dict(list(WEIGHTS.items())[2:]), path / "pytorch_model-00002-of-00002.bin")
    where = {name: f"pytorch_model-0000{1 + (n > 1)}-of-00002.bin" for n, name in enumerate(WEIGHTS)}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    return path


def save_alone(path: Path) -> Path:
    save_file(WEIGHTS, path)
    return path


def save_pt(path: Path) -> Path:
    torch.save(WEIGHTS, path)
    return path


def save_old(path: Path) -> Path:
    torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False)
    return path


SAVERS: dict[str, Callable[[Path], Path]] = {
    "DCP": lambda path: save_dcp({"model": WEIGHTS}, path),
    "DCP without levels": lambda path: save_dcp(dict(WEIGHTS), path),
    "Hugging Face": save_single,
    "Hugging Face in shards": save_sharded,
    "Hugging Face in old shards": save_bin,
    "PEFT": lambda path: save_single(path, "adapter_model.safetensors"),
    "safetensors": save_alone,
    "torch.save": save_pt,
    "torch.save without an archive": save_old,
}


@pytest.mark.parametrize("name", SAVERS)
def test_every_tensor_is_read_bit_for_bit_and_in_part(name: str, tmp_path: Path) -> None:
    path = SAVERS[name](tmp_path / "saved")
    with reknit.open(path) as checkpoint:
        assert "model" in checkpoint.items
        whole = checkpoint.read_all(["model"])["model"]
        assert whole.keys() == WEIGHTS.keys()
        assert all(same(whole[key], WEIGHTS[key]) for key in WEIGHTS)
        part = checkpoint.read("model", "layers.0.w", (slice(2, 5), slice(1, 3)), framework="torch")
        assert same(part, WEIGHTS["layers.0.w"][2:5, 1:3])
    target = {key: torch.zeros_like(one) for key, one in WEIGHTS.items()}
    report = reknit.load(path, {"model": target})
    assert all(same(target[key], WEIGHTS[key]) for key in WEIGHTS)
    assert report.unchecked is not None
    assert "no digests" in report.unchecked
    for options in (reknit.LoadOptions(verify="full"), reknit.LoadOptions(transforms=())):
        reknit.load(path, {"model": target}, options=options)


def test_a_model_and_its_optimizer_are_loaded_from_dcp(tmp_path: Path) -> None:
    def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        return model, optimizer

    (model, optimizer), (other, empty) = trained(), trained()
    states = get_state_dict(model, optimizer)
    state = {
        "model": states[0],
        "optimizer": states[1],
        "step": 7,
        "more": {"a": [1, "x"], "t": (torch.ones(2),)},
    }
    path = save_dcp(state, tmp_path / "dcp")
    empty.param_groups[0]["lr"] = 1.0
    report = reknit.load(path, {"model": other, "optimizer": empty})
    assert report.step == 7
    assert all(same(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    assert empty.param_groups[0]["lr"] == 0.25
    for one, two in zip(optimizer.state.values(), empty.state.values(), strict=True):
        assert all(same(one[name], two[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    with reknit.open(path) as checkpoint:
        assert checkpoint.values["more"]["a"] == [1, "x"]
        assert same(checkpoint.read("more", "t/0", framework="torch"), torch.ones(2))


def test_views_parameters_and_values_of_a_file_are_read(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "model": {
            "turned": base.t(),
            "columns": base[:, 1:3],
            "spread": torch.ones(1).expand(3, 2),
            "rows": base[1:3],
            "one": torch.nn.Parameter(base[2, 3]),
            "last": base.to(memory_format=torch.contiguous_format).reshape(1, 4, 6, 1),
        },
        "rng": {"numpy": np.random.default_rng(0).integers(9, size=3), "torch": torch.get_rng_state()},
        "epoch": 2,
        "args": {"lr": 1e-3, "betas": (0.9, 0.95), "dtype": torch.bfloat16, "names": {"a", "b"}},
    }
    torch.save(state, tmp_path / "a.pt")
    with reknit.open(tmp_path / "a.pt") as checkpoint:
        whole = checkpoint.read_all()
        for name, tensor in state["model"].items():  # type: ignore[attr-defined]
            assert same(whole["model"][name], tensor.detach()), name
        part = checkpoint.read("model", "turned", (slice(2, 4), 1), framework="torch")
        assert same(part, base.t()[2:4, 1])
        assert same(whole["rng"]["torch"], state["rng"]["torch"])  # type: ignore[index]
        assert whole["args"]["dtype"] is torch.bfloat16
        assert whole["args"]["betas"] == (0.9, 0.95)
        assert checkpoint.values["epoch"][""] == 2


def test_arrays_of_numpy_are_read_stored_and_packed(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "w": np.arange(6000.0).reshape(60, 100),
        "f": np.asfortranarray(np.arange(12, dtype=np.int16).reshape(3, 4)),
        "n": np.array(3),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    np.savez_compressed(tmp_path / "c.npz", **arrays)
    np.save(tmp_path / "a.npy", arrays["w"])
    for name in ("a.npz", "c.npz"):
        with reknit.open(tmp_path / name) as checkpoint:
            for key, array in arrays.items():
                assert np.array_equal(checkpoint.read("model", key), array)
            part = checkpoint.read("model", "w", (slice(20, 30), slice(7, 9)))
            assert np.array_equal(part, arrays["w"][20:30, 7:9])
        assert reknit.verify(tmp_path / name, "data").ok
    with reknit.open(tmp_path / "a.npy") as checkpoint:
        assert np.array_equal(checkpoint.read("model", "array"), arrays["w"])


def test_a_slice_reads_hardly_more_than_its_bytes(tmp_path: Path) -> None:
    big = {"w": torch.randn(1024, 1024), "v": torch.randn(1024, 1024)}
    save_dcp(dict(big), tmp_path / "dcp")
    save_file(big, tmp_path / "a.safetensors")
    torch.save(big, tmp_path / "a.pt")
    for name in ("dcp", "a.safetensors", "a.pt"):
        out = {"w": torch.zeros(1024, 1024), "v": torch.zeros(1024, 1024)}
        report = reknit.load(tmp_path / name, {"model": out})
        assert report.nbytes_read <= 1.05 * report.nbytes_wanted
        storage = MeteredStorage(following(open_storage(tmp_path / name)))
        assert read_foreign(storage) is not None
        figures = storage.meter.figures
        assert sum(each.nbytes for each in figures.values()) <= 64 << 10


def test_a_file_that_changed_is_noticed_by_its_checksum(tmp_path: Path) -> None:
    path = save_pt(tmp_path / "a.pt")
    assert reknit.verify(path).unread is not None
    report = reknit.verify(path, "data")
    assert report.ok
    assert "checksums of all members" in (report.unchecked or "")
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        start = next(each.header_offset for each in archive.infolist() if each.filename.endswith("data/0"))
    data[start + 150] ^= 1
    path.write_bytes(data)
    assert not reknit.verify(path, "data").ok


def test_commands_show_and_compare_what_other_programs_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = save_single(tmp_path / "hf"), save_dcp({"model": WEIGHTS}, tmp_path / "dcp")
    own = reknit.save(tmp_path / "own", {"model": WEIGHTS}).path
    assert main(["show", str(a)]) == 0
    assert "Hugging Face" in capsys.readouterr().out
    assert main(["verify", str(b)]) == 0
    assert "no digests" in capsys.readouterr().out
    for other in (b, own, save_pt(tmp_path / "a.pt")):
        assert main(["diff", "--data", str(a), str(other)]) == 0, capsys.readouterr()
    changed = {**WEIGHTS, "numbers": WEIGHTS["numbers"] + 1}
    save_dcp({"model": changed}, tmp_path / "changed")
    capsys.readouterr()
    assert main(["diff", "--data", "--json", str(a), str(tmp_path / "changed")]) == 1
    (difference,) = json.loads(capsys.readouterr().out)["differences"]
    assert difference["name"] == "model/numbers"


class Evil:
    """An object whose pickle makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    torch.save({"model": WEIGHTS, "x": Evil(canary)}, tmp_path / "a.pt")
    save_dcp({"model": WEIGHTS, "x": Evil(canary)}, tmp_path / "dcp")
    if canary.exists():  # torch makes a copy
        canary.rmdir()
    for name in ("a.pt", "dcp"):
        for call in (reknit.open, lambda path: reknit.load(path, {"model": dict(WEIGHTS)})):
            with pytest.raises(FormatError, match=r"posix\.mkdir"):
                call(tmp_path / name)
        assert not reknit.verify(tmp_path / name).ok
    assert not canary.exists()


def test_lists_that_hold_each_other_at_many_places_are_refused(tmp_path: Path) -> None:
    bomb: list[Any] = []
    for _ in range(40):
        bomb = [bomb, bomb]
    torch.save({"x": bomb}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match=str(MAX_NODES)):
        reknit.open(tmp_path / "a.pt")
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    torch.save({"x": deep}, tmp_path / "b.pt")
    with pytest.raises(FormatError, match="nested deeper"):
        reknit.open(tmp_path / "b.pt")


@pytest.mark.parametrize("name", ["a.pt", "a.npz", "c.npz", "a.safetensors", "a.npy"])
def test_a_file_with_bytes_lost_or_changed_is_refused_or_read_whole(name: str, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"w": np.arange(64.0).reshape(8, 8)}
    path = tmp_path / name
    if name == "a.pt":
        torch.save({"w": torch.arange(64.0).reshape(8, 8)}, path)
    elif name == "a.safetensors":
        save_file({"w": torch.arange(64.0).reshape(8, 8)}, path)
    elif name == "a.npy":
        np.save(path, arrays["w"])
    else:
        (np.savez if name[0] == "a" else np.savez_compressed)(path, **arrays)
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for number in range(150):
        data = bytearray(good[: rng.integers(len(good))] if number % 3 == 0 else good)
        for at in rng.integers(len(data) or 1, size=number % 4):
            if data:
                data[at] = rng.integers(256)
        path.write_bytes(data)
        try:
            with reknit.open(path) as checkpoint:
                checkpoint.read_all(framework="numpy")
        except reknit.ReknitError:
            pass
