from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

import reknit
from reknit.interop.safetensors_export import cut_files, export_hf
from reknit.interop.safetensors_file import Stored
from reknit.interop.weights import plain_name
from reknit.types.shard import TensorSpec
from tests.interop.checkpoints import columns, save_in_boxes


def exported(out: Path) -> dict[str, torch.Tensor]:
    """Read all weights of a folder the way Hugging Face libraries find them."""
    if (out / "model.safetensors").exists():
        assert not (out / "model.safetensors.index.json").exists()
        return load_file(out / "model.safetensors")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = {name: load_file(out / name) for name in set(index["weight_map"].values())}
    assert {name: file for file in files for name in files[file]} == index["weight_map"]
    found = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert {path.name for path in out.glob("*.safetensors")} == set(files)
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit."""
    bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3).to(torch.bfloat16)
    )


@pytest.mark.parametrize("limit", [1, 100, 250, 10**9])
def test_exported_weights_equal_the_state_dict(tmp_path: Path, limit: int) -> None:
    net = module()
    reknit.save(tmp_path / "c", {"model": net})
    report = export_hf(tmp_path / "c", tmp_path / "out", max_shard_nbytes=limit)
    found, wanted = exported(tmp_path / "out"), net.state_dict()
    assert found.keys() == wanted.keys()
    assert all(same(found[name], wanted[name]) for name in wanted)
    assert report.num_tensors == len(wanted)
    assert report.nbytes == sum(tensor.nbytes for tensor in wanted.values())
    assert set(report.files) == {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert (len(report.files) == 1) == (limit == 10**9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "out"]


def test_every_file_says_that_it_is_for_torch(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"model": module()})
    export_hf(tmp_path / "c", tmp_path / "out", max_shard_nbytes=100)
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_weights_saved_in_many_chunks_come_out_whole(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    arrays: dict[str, Any] = {
        "a": random.standard_normal((40, 60)).astype(np.float32),
        "b": random.standard_normal((16, 8)).astype(ml_dtypes.float8_e4m3fn),
        "s": np.float64(1.5).reshape(()),
        "none": np.zeros((3, 0), np.int64),
    }
    save_in_boxes(tmp_path / "c", arrays, {"a": columns((40, 60), 7), "b": columns((16, 8), 8)})
    export_hf(tmp_path / "c", tmp_path / "out")
    found = exported(tmp_path / "out")
    assert {name: (tuple(t.shape), str(t.dtype)) for name, t in found.items()} == {
        name: (array.shape, f"torch.{array.dtype}") for name, array in arrays.items()
    }
    for name, array in arrays.items():
        assert found[name].reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16"])
def test_cast_rounds_as_torch_does(tmp_path: Path, source: str, target: Any) -> None:
    torch.manual_seed(0)
    special = [0.0, -0.0, 1e-7, 6e-8, 2.0**-24, 2.0**-25 * 1.5, 6e4, 1.00390625, 1.01171875, np.inf]
    values = torch.cat([torch.randn(5000, dtype=torch.float64), torch.tensor(special, dtype=torch.float64)])
    w = values.to(getattr(torch, source))
    state = {"w": w, "ids": torch.arange(5), "mask": torch.tensor([True]), "z": torch.tensor([1 + 2j])}
    reknit.save(tmp_path / "c", {"model": state})
    report = export_hf(tmp_path / "c", tmp_path / "out", dtype=target)
    found = exported(tmp_path / "out")
    assert same(found["w"], w.to(getattr(torch, target)))
    assert all(same(found[name], state[name]) for name in ("ids", "mask", "z"))
    assert report.cast == (() if source == target else ("w",))
    assert not report.overflowed


def test_numbers_that_become_infinite_are_counted(tmp_path: Path) -> None:
    w = torch.tensor([1.0, 70000.0, -1e30, float("inf"), float("nan")])
    reknit.save(tmp_path / "c", {"model": {"w": w, "v": torch.ones(2)}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = export_hf(tmp_path / "c", tmp_path / "out", dtype="float16")
    assert report.overflowed == {"w": 2}
    assert torch.equal(
        exported(tmp_path / "out")["w"].isinf(), torch.tensor([False, True, True, True, False])
    )


def test_quantized_values_are_not_cast(tmp_path: Path) -> None:
    w = torch.randn(4, 4).to(torch.float8_e4m3fn)
    reknit.save(tmp_path / "c", {"model": {"w": w, "scale": torch.ones(1)}})
    report = export_hf(tmp_path / "c", tmp_path / "out", dtype="bfloat16")
    assert same(exported(tmp_path / "out")["w"], w)
    assert report.cast == ()


class Tied(torch.nn.Module):
    """A head that shares its weight with the embedding, and sorts before it by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 4)
        self.body = torch.nn.Linear(4, 4)
        self.a_head = torch.nn.Linear(4, 11, bias=False)
        self.a_head.weight = self.embed.weight


def test_a_tied_weight_is_written_once_under_the_name_that_came_first(tmp_path: Path) -> None:
    net = Tied()
    reknit.save(tmp_path / "c", {"model": net})
    report = export_hf(tmp_path / "c", tmp_path / "out")
    assert report.tied == {"a_head.weight": "embed.weight"}
    assert set(exported(tmp_path / "out")) == {"embed.weight", "body.weight", "body.bias"}


def test_a_tensor_without_elements_does_not_hide_the_name_that_came_first(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.z = torch.nn.Parameter(torch.arange(4.0))
    model.a = model.z
    model.register_buffer("b", torch.zeros(0))
    reknit.save(tmp_path / "c", {"model": model})
    assert export_hf(tmp_path / "c", tmp_path / "out").tied == {"a": "z"}


def test_tied_weights_are_written_twice_on_request(tmp_path: Path) -> None:
    net = Tied()
    reknit.save(tmp_path / "c", {"model": net})
    report = export_hf(tmp_path / "c", tmp_path / "out", keep_tied=True)
    found = exported(tmp_path / "out")
    assert report.tied == {}
    assert found.keys() == net.state_dict().keys()
    assert same(found["a_head.weight"], net.embed.weight)


def test_equal_weights_that_are_not_tied_are_all_written(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"model": {"a": torch.ones(3), "b": torch.ones(3)}})
    assert export_hf(tmp_path / "c", tmp_path / "out").tied == {}
    assert set(exported(tmp_path / "out")) == {"a", "b"}


def test_names_of_nested_mappings_are_joined_by_dots(tmp_path: Path) -> None:
    state = {"layers": {"0": {"w": torch.ones(1)}, "x/y~": torch.ones(2)}}
    reknit.save(tmp_path / "c", {"model": state})
    export_hf(tmp_path / "c", tmp_path / "out")
    assert set(exported(tmp_path / "out")) == {"layers.0.w", "layers.x/y~"}
    assert plain_name("a/~20/b~1c") == "a.0.b/c"


def test_two_tensors_of_one_plain_name_are_refused(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"model": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}})
    with pytest.raises(reknit.MismatchError, match=r"a\.b"):
        export_hf(tmp_path / "c", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dtype_that_safetensors_lacks_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    state = {"fine": torch.ones(1), "odd": torch.ones(2, dtype=torch.complex128)}
    reknit.save(tmp_path / "c", {"model": state})
    with pytest.raises(reknit.MismatchError, match=r"'odd', a complex128\[2\]"):
        export_hf(tmp_path / "c", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_an_unknown_item_is_an_error_that_names_the_others(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"net": {"w": torch.ones(1)}, "lr": 0.1})
    for item in ("model", "lr"):
        with pytest.raises(reknit.UsageError, match="'net'"):
            export_hf(tmp_path / "c", tmp_path / "out", item=item)


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"model": module()})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(reknit.UsageError, match="not empty"):
        export_hf(tmp_path / "c", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"model": module()})
    (tmp_path / "out").mkdir()
    export_hf(tmp_path / "c", tmp_path / "out")
    assert len(exported(tmp_path / "out")) == len(module().state_dict())


@pytest.mark.parametrize(("first", "second"), [(100, 10**9), (10**9, 100), (100, 250), (10**9, 10**9)])
def test_overwrite_replaces_weights_and_keeps_other_files(tmp_path: Path, first: int, second: int) -> None:
    reknit.save(tmp_path / "old", {"model": {"w": torch.ones(100), "v": torch.ones(50)}})
    reknit.save(tmp_path / "new", {"model": {"w": torch.zeros(100), "u": torch.ones(30)}})
    export_hf(tmp_path / "old", tmp_path / "out", max_shard_nbytes=first)
    (tmp_path / "out" / "config.json").write_text("{}")
    report = export_hf(tmp_path / "new", tmp_path / "out", max_shard_nbytes=second, overwrite=True)
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == set(report.files)
    found = exported(tmp_path / "out")
    assert set(found) == {"w", "u"}
    assert not found["w"].any()
    assert (tmp_path / "out" / "config.json").exists()


def test_damage_that_shows_midway_leaves_the_old_export_and_no_traces(tmp_path: Path) -> None:
    reknit.save(tmp_path / "old", {"model": {"w": torch.ones(100)}})
    export_hf(tmp_path / "old", tmp_path / "out")
    reknit.save(tmp_path / "new", {"model": {"w": torch.zeros(3_000_000), "x": torch.ones(1_000_000)}})
    (file,) = (tmp_path / "new" / "model").glob("*.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[-5] ^= 4
    file.chmod(0o644)
    file.write_bytes(damaged)
    with pytest.raises(reknit.CorruptError):
        export_hf(tmp_path / "new", tmp_path / "out", overwrite=True, max_shard_nbytes=100)
    assert set(exported(tmp_path / "out")) == {"w"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old", "out"]


def cut(original: Any, calls: list[int], out: Path, *arguments: Any, **keywords: Any) -> Any:
    """Fail from the call on that touches `out` when `calls` are used up, as if the process had died."""
    calls[0] -= any(Path(argument).parent == out for argument in arguments)
    if calls[0] < 0:
        raise OSError(5, "cut off here")
    return original(*arguments, **keywords)


@pytest.mark.parametrize("limit", [300, 10**9])
def test_an_overwrite_cut_off_at_any_point_leaves_old_none_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    old = {"w": torch.ones(100), "v": torch.ones(50)}
    new = {"w": torch.zeros(100), "v": torch.zeros(50)}
    reknit.save(tmp_path / "old", {"model": old})
    reknit.save(tmp_path / "new", {"model": new})
    outcomes = set()
    for place in range(20):
        out = tmp_path / f"out{place}"
        export_hf(tmp_path / "old", out, max_shard_nbytes=300)
        calls = [place]

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", partial(cut, os.unlink, calls, out))
            patch.setattr(os, "rename", partial(cut, os.rename, calls, out))
            try:
                export_hf(tmp_path / "new", out, overwrite=True, max_shard_nbytes=limit)
                finished = True
            except reknit.StorageError:
                finished = False
        if not any(out.glob("model.safetensors*")):
            outcomes.add("none")
            continue
        found = exported(out)
        assert any(all(same(found[name], state[name]) for name in state) for state in (old, new))
        outcomes.add("old" if found["w"].any() else "new")
        if finished:
            break
    assert outcomes == {"old", "none", "new"}


@pytest.mark.parametrize("arguments", [{"dtype": "int8"}, {"max_shard_nbytes": 0}])
def test_wrong_arguments_are_refused_before_anything_is_read(tmp_path: Path, arguments: Any) -> None:
    with pytest.raises(reknit.UsageError):
        export_hf(tmp_path / "absent", tmp_path / "out", **arguments)


@pytest.mark.parametrize("out", ["", "mem://x", "s3://bucket/x"])
def test_only_a_local_folder_is_a_place_for_an_export(tmp_path: Path, out: str) -> None:
    with pytest.raises(reknit.UsageError, match="local folder"):
        export_hf(tmp_path / "c", out)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(reknit.UsageError, match="not a folder"):
        export_hf(tmp_path / "c", tmp_path / "out", overwrite=True)
    assert (tmp_path / "out").read_text() == "mine"


def test_a_path_without_a_checkpoint_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(reknit.CheckpointNotFoundError):
        export_hf(tmp_path / "absent", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=20), limit=st.integers(1, 40))
def test_files_keep_the_order_and_the_limit(sizes: list[int], limit: int) -> None:
    tensors = [Stored(str(k), TensorSpec((size,), "uint8")) for k, size in enumerate(sizes)]
    files = cut_files(tensors, limit)
    assert [tensor for file in files for tensor in file] == tensors
    for file in files:
        assert file
        assert len(file) == 1 or sum(tensor.spec.nbytes for tensor in file) <= limit


PEAK = """
import sys
from reknit.interop.safetensors_export import export_hf

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

small, large, out = sys.argv[1:]
export_hf(small, out + "/small", dtype="float16")
before = peak()
export_hf(large, out + "/large", dtype="bfloat16")
assert "torch" not in sys.modules
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_stays_far_below_the_size_of_a_tensor(tmp_path: Path) -> None:
    rows = 4 * 300
    large = np.zeros((rows, 1 << 16), np.float32)
    large[::7] = 1.25
    save_in_boxes(tmp_path / "large", {"w": large}, {"w": columns(large.shape, 3)})
    save_in_boxes(tmp_path / "small", {"w": large[:4]}, {})
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", PEAK, *map(str, (tmp_path / n for n in ("small", "large", "out")))]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(ran.stdout) * 1024 < 200 << 20
    with safe_open(tmp_path / "out" / "large" / "model.safetensors", "pt") as file:
        part = file.get_slice("w")[6:9]
    assert part.dtype == torch.bfloat16
    assert part.float().unique(dim=1).tolist() == [[0.0], [1.25], [0.0]]
