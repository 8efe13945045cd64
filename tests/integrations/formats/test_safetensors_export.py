from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import reknit
from reknit.integrations.hugging_face.export import export_hf, plain_name
from tests.integrations.formats.checkpoints import columns, damage, same, save_in_boxes


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


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3).to(torch.bfloat16)
    )


def test_exported_weights_equal_the_state_dict_in_files_for_torch(tmp_path: Path) -> None:
    net = module()
    reknit.save(tmp_path / "c", {"model": net})
    for limit in (1, 100, 250, 10**9):
        out = tmp_path / f"out{limit}"
        report = export_hf(tmp_path / "c", out, max_shard_nbytes=limit)
        found, wanted = exported(out), net.state_dict()
        assert found.keys() == wanted.keys()
        assert all(same(found[name], wanted[name]) for name in wanted)
        assert report.num_tensors == len(wanted)
        assert report.nbytes == sum(tensor.nbytes for tensor in wanted.values())
        assert set(report.files) == {path.name for path in out.glob("*.safetensors")}
        assert (len(report.files) == 1) == (limit == 10**9)
        for name in report.files:
            with safe_open(out / name, "pt") as file:
                assert file.metadata() == {"format": "pt"}
    assert len(list(tmp_path.iterdir())) == 5


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


def test_cast_rounds_as_torch_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    special = [0.0, -0.0, 1e-7, 6e-8, 2.0**-24, 2.0**-25 * 1.5, 6e4, 1.00390625, 1.01171875, np.inf]
    values = torch.cat([torch.randn(5000, dtype=torch.float64), torch.tensor(special, dtype=torch.float64)])
    others = {"ids": torch.arange(5), "mask": torch.tensor([True]), "z": torch.tensor([1 + 2j])}
    dtypes = torch.float64, torch.float32, torch.float16, torch.bfloat16
    weights = {str(dtype): values.to(dtype) for dtype in dtypes}
    reknit.save(tmp_path / "c", {"model": weights | others})
    for dtype in dtypes[1:]:
        name = str(dtype).removeprefix("torch.")
        report = export_hf(tmp_path / "c", tmp_path / name, dtype=cast("Any", name))
        found = exported(tmp_path / name)
        assert all(same(found[source], w.to(dtype)) for source, w in weights.items())
        assert all(same(found[other], tensor) for other, tensor in others.items())
        assert set(report.cast) == weights.keys() - {str(dtype)}
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


def test_tied_weights_are_written_once_under_the_name_that_came_first_or_twice_on_request(
    tmp_path: Path,
) -> None:
    net = Tied()
    reknit.save(tmp_path / "c", {"model": net})
    report = export_hf(tmp_path / "c", tmp_path / "once")
    assert report.tied == {"a_head.weight": "embed.weight"}
    assert set(exported(tmp_path / "once")) == {"embed.weight", "body.weight", "body.bias"}
    report = export_hf(tmp_path / "c", tmp_path / "twice", keep_tied=True)
    found = exported(tmp_path / "twice")
    assert report.tied == {}
    assert found.keys() == net.state_dict().keys()
    assert same(found["a_head.weight"], net.embed.weight)


def test_a_tensor_without_elements_does_not_hide_the_name_that_came_first(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.z = torch.nn.Parameter(torch.arange(4.0))
    model.a = model.z
    model.register_buffer("b", torch.zeros(0))
    reknit.save(tmp_path / "c", {"model": model})
    assert export_hf(tmp_path / "c", tmp_path / "out").tied == {"a": "z"}


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


def test_what_a_folder_of_weights_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    odd = {"fine": torch.ones(1), "odd": torch.ones(2, dtype=torch.complex128)}
    states: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
        ({"model": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}}, {}, reknit.MismatchError, r"a\.b"),
        ({"model": odd}, {}, reknit.MismatchError, r"'odd', a complex128\[2\]"),
        ({"net": {"w": torch.ones(1)}, "lr": 0.1}, {}, reknit.UsageError, "'net'"),
        ({"net": {"w": torch.ones(1)}, "lr": 0.1}, {"item": "lr"}, reknit.UsageError, "'net'"),
        ({"model": {}}, {"dtype": "int8"}, reknit.UsageError, "dtype"),
        ({"model": {}}, {"max_shard_nbytes": 0}, reknit.UsageError, "max_shard_nbytes"),
    ]
    for number, (state, options, error, named) in enumerate(states):
        reknit.save(tmp_path / str(number), state)
        with pytest.raises(error, match=named):
            export_hf(tmp_path / str(number), tmp_path / "out", **options)
    assert len(list(tmp_path.iterdir())) == len(states)


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"model": module()})
    (tmp_path / "out").mkdir()
    export_hf(tmp_path / "c", tmp_path / "out")
    assert len(exported(tmp_path / "out")) == len(module().state_dict())


def test_overwrite_replaces_weights_and_keeps_other_files(tmp_path: Path) -> None:
    reknit.save(tmp_path / "old", {"model": {"w": torch.ones(100), "v": torch.ones(50)}})
    reknit.save(tmp_path / "new", {"model": {"w": torch.zeros(100), "u": torch.ones(30)}})
    for first, second in ((100, 10**9), (10**9, 100), (100, 250), (10**9, 10**9)):
        out = tmp_path / f"{first}-{second}"
        export_hf(tmp_path / "old", out, max_shard_nbytes=first)
        (out / "config.json").write_text("{}")
        report = export_hf(tmp_path / "new", out, max_shard_nbytes=second, overwrite=True)
        assert {path.name for path in out.glob("*.safetensors")} == set(report.files)
        found = exported(out)
        assert set(found) == {"w", "u"}
        assert not found["w"].any()
        assert (out / "config.json").exists()


def test_damage_that_shows_midway_leaves_the_old_export_and_no_traces(tmp_path: Path) -> None:
    reknit.save(tmp_path / "old", {"model": {"w": torch.ones(100)}})
    export_hf(tmp_path / "old", tmp_path / "out")
    reknit.save(tmp_path / "new", {"model": {"w": torch.zeros(3_000_000), "x": torch.ones(1_000_000)}})
    damage(tmp_path / "new")
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


PEAK = """
import sys
from reknit.integrations.hugging_face.export import export_hf

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
