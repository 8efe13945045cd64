from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

import reknit
from reknit.cli.export import parse_size

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Command


def test_sizes_are_understood_and_what_is_none_is_refused() -> None:
    sizes = {"5GB": 5 * 10**9, "5gb": 5 * 10**9, "4GiB": 4 << 30, "500 MB": 5 * 10**8, "1.5KiB": 1536}
    sizes |= {"12": 12, "7B": 7, "2T": 2 * 10**12}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "GB", "-5GB", "5 apples", "0", "0.5B", "1e9", "5iB", "9" * 400 + "GB"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_size(text)


def test_a_path_that_is_too_long_is_one_message(command: Command, path: Path) -> None:
    for out in ("a" * 300, "a/" * 3_000, "a" * 5_000):
        ran = command("export", "hf", path, path.parent / out)
        assert (ran.code, ran.out) == (4, "")
        assert "File name too long (ENAMETOOLONG)" in ran.err


@pytest.fixture
def path(tmp_path: Path) -> Path:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    net[1].weight = net[0].weight
    big = {"w": torch.full((3,), 1e6)}
    reknit.save(tmp_path / "c", {"model": net, "big": big})
    return tmp_path / "c"


def test_an_export_tells_what_it_wrote_and_left_out(command: Command, path: Path, tmp_path: Path) -> None:
    ran = command("export", "hf", path, tmp_path / "out")
    assert (ran.code, ran.err) == (0, "")
    assert str(tmp_path / "out") in ran.out
    assert "1.weight = 0.weight" in ran.out
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"0.weight", "0.bias", "1.bias"}


def test_options_reach_the_export(command: Command, path: Path, tmp_path: Path) -> None:
    options = ("--dtype", "bfloat16", "--max-shard-size", "32B", "--keep-tied")
    ran = command("export", "hf", path, tmp_path / "out", *options)
    assert ran.code == 0
    assert "converted to bfloat16: 4 tensors" in ran.out
    assert len(list((tmp_path / "out").glob("model-*-of-00004.safetensors"))) == 4
    ran = command("export", "hf", path, tmp_path / "out", "--item", "big")
    assert ran.code == 2
    assert "not empty" in ran.err
    assert "pass --overwrite" in ran.err
    ran = command("export", "hf", path, tmp_path / "out", "--item", "big", "--overwrite")
    assert ran.code == 0
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"w"}


def test_json_tells_what_was_exported_and_warnings_go_beside_it(
    command: Command, path: Path, tmp_path: Path
) -> None:
    facts = command("export", "hf", path, tmp_path / "out", "--json").json
    assert facts["files"] == ["model.safetensors"]
    assert (facts["num_tensors"], facts["tied"]) == (3, {"1.weight": "0.weight"})
    ran = command("export", "hf", path, tmp_path / "big", "--item", "big", "--dtype", "float16", "--json")
    assert ran.json["overflowed"] == {"w": 3}
    assert ran.err == "reknit: warning: 3 numbers of w are too large for float16 and became infinite\n"


def test_what_cannot_be_is_wrong_usage(command: Command, path: Path, tmp_path: Path) -> None:
    for option, wrong in (("--item", "other"), ("--dtype", "int8"), ("--max-shard-size", "many")):
        ran = command("export", "hf", path, tmp_path / "out", option, wrong)
        assert ran.code == 2, option
        assert wrong in ran.err
        assert not (tmp_path / "out").exists(), option


def test_a_whole_state_is_exported_verified_and_told(command: Command, path: Path, tmp_path: Path) -> None:
    for name, out in (("torch", "out.pt"), ("dcp", "out"), ("npz", "out.npz")):
        ran = command("export", name, path, tmp_path / out, "--verify")
        assert (ran.code, ran.err) == (0, ""), name
        assert "big, model" in ran.out or "model, big" in ran.out, name
        assert "verified" in ran.out, name
        facts = command("export", name, path, tmp_path / f"json-{out}", "--item", "big", "--json").json
        assert (facts["format"], facts["items"], facts["num_tensors"]) == (name, ["big"], 1)
        assert (facts["verified"], facts["left_out"]) == (False, {}), name
        again = command("export", name, path, tmp_path / out)
        assert again.code == 2, name
        assert "not empty" in again.err or "is there already" in again.err, name
        assert command("export", name, path, tmp_path / "x", "--item", "modle").code == 4, name


def test_weights_left_out_are_told(command: Command, path: Path, tmp_path: Path) -> None:
    ran = command("export", "huggingface", path, tmp_path / "out", "--verify")
    assert "big -- only the item 'model' is exported" in ran.out
    assert command("export", "hf", path, tmp_path / "json", "--json").json["left_out"].keys() == {"big"}


def test_rules_come_from_a_file_or_a_module(command: Command, path: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.py"
    rules.write_text(
        "from reknit import transforms\n"
        "LIST = [transforms.rename('0.{p}', 'first.{p}')]\n"
        "def function():\n    return LIST\n"
    )
    for name in ("LIST", "function"):
        ran = command("export", "hf", path, tmp_path / name, "--transforms", f"{rules}:{name}")
        assert ran.code == 0
        found = load_file(tmp_path / name / "model.safetensors")
        assert set(found) == {"first.weight", "first.bias", "1.bias"}
    for text in ("rules", f"{rules}:OTHER", f"{tmp_path}/absent.py:LIST", "no_such_module:LIST"):
        ran = command("export", "hf", path, tmp_path / "x", "--transforms", text)
        assert ran.code == 2
        assert "rules" in ran.err


def test_a_file_is_replaced_with_the_flag_that_the_error_names(
    command: Command, path: Path, tmp_path: Path
) -> None:
    (tmp_path / "out.npz").write_text("mine")
    assert "--overwrite" in command("export", "npz", path, tmp_path / "out.npz").err
    assert command("export", "npz", path, tmp_path / "out.npz", "--overwrite").code == 0


def test_a_missing_extra_is_named(
    command: Command, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "orbax", None)
    ran = command("export", "orbax", path, tmp_path / "out")
    assert ran.code == 2
    assert "pip install 'reknit[orbax]'" in ran.err
    assert not (tmp_path / "out").exists()
