from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit
from reknit.cli.output import readable
from tests.integrations.formats.checkpoints import columns, save_in_boxes

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Command


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = torch.nn.Linear(30, 20)
    state = {"model": model, "extra": {"lr": 0.5, "ids": np.arange(7)}}
    reknit.save(tmp_path / "c", state, step=12, metadata={"run": "blue", "loss": 0.25})
    return tmp_path / "c"


def test_summary_tells_record_items_and_files(command: Command, path: Path) -> None:
    ran = command("show", path)
    assert ran.code == 0
    fields = dict(line.split(None, 1) for line in ran.out.split("\n\n")[0].splitlines())
    assert fields["path"] == str(path)
    assert fields["step"] == "12"
    assert fields["metadata.run"] == "blue"
    assert fields["origin.world_size"] == "1"
    assert fields["origin.versions"].startswith(f"reknit {version('reknit')}, ")
    assert "{" not in ran.out
    items = ran.out.split("\n\n")[1].splitlines()
    assert [line.split()[:3] for line in items[1:]] == [["model", "2", "620"], ["extra", "1", "7"]]
    for file in path.rglob("*"):
        if file.is_file() and file.name != "manifest.json":
            assert str(file.relative_to(path)) in ran.out


def test_plain_data_is_shown_as_words() -> None:
    assert readable({"loss": 0.5, "at": [1, {"dp": 2}], "no": None}) == "loss 0.5, at (1, (dp 2)), no -"
    assert readable({}) == readable([]) == readable(None) == "-"
    assert readable("a, b") == "a, b"


def test_a_checkpoint_without_tensors_says_so(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "c"
    reknit.save(path, {"lr": 0.5, "names": ["a"]})
    said = "it holds no tensors, only values: lr, names"
    assert command("show", path, "--tensors", "*") == (0, f"{path}: {said}\n", "")
    assert command("show", path, "--tensors", "*", "--json") == (0, "[]\n", "")
    ran = command("show", path, "--tensors", "w*", "--json")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.endswith(f"matches 'w*'\n  -> {said}\n")


def test_json_summary_has_the_same(command: Command, path: Path) -> None:
    facts = command("show", path, "--json").json
    assert facts["step"] == 12
    assert facts["metadata"] == {"run": "blue", "loss": 0.25}
    assert facts["uses_pickle"] is False
    assert [item["item"] for item in facts["items"]] == ["model", "extra"]
    assert facts["items"][0]["elements"] == 620
    model_files = [path / file["path"] for file in facts["files"] if file["path"].startswith("model/")]
    assert facts["items"][0]["nbytes"] == sum(file.stat().st_size for file in model_files)
    assert facts["nbytes"] == sum((path / file["path"]).stat().st_size for file in facts["files"])


def test_tied_weights_count_once(command: Command, tmp_path: Path) -> None:
    one, two = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
    two.weight = one.weight
    reknit.save(tmp_path / "c", {"model": torch.nn.Sequential(one, two), "empty": {"w": np.ones((0, 2))}})
    model, empty = command("show", tmp_path / "c", "--json").json["items"]
    assert (model["tensors"], model["elements"]) == (4, 35)
    assert (empty["tensors"], empty["elements"]) == (1, 0)


def test_tensors_that_match_are_listed(command: Command, path: Path) -> None:
    for pattern, names in [
        ("*", ["extra/ids", "model/bias", "model/weight"]),
        ("w*", ["model/weight"]),
        ("model/*", ["model/bias", "model/weight"]),
    ]:
        ran = command("show", path, "--tensors", pattern)
        assert ran.code == 0, pattern
        assert [line.split()[0] for line in ran.out.splitlines()[1:]] == names


def test_a_pattern_that_matches_nothing_says_what_there_is(command: Command, path: Path) -> None:
    for options in ((), ("--json",)):
        ran = command("show", path, "--tensors", "W*", *options)
        assert (ran.code, ran.out) == (2, ""), options
        assert f"no tensor of {path} matches 'W*'" in ran.err, options
        assert "it has extra/ids, model/bias and 1 more" in ran.err, options
    assert "-> did you mean 'weight'?  it has extra/ids" in command("show", path, "--tensors", "wieght").err


def test_a_listed_tensor_tells_dtype_shape_chunks_and_files(command: Command, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"w": np.zeros((8, 12), np.float16), "v": np.zeros(3)}
    save_in_boxes(tmp_path / "c", arrays, {"w": columns((8, 12), 4)})
    (row,) = command("show", tmp_path / "c", "--tensors", "w", "--json").json
    (file,) = row.pop("files")
    assert (tmp_path / "c" / file).exists()
    assert row == {
        "item": "model",
        "fqn": "w",
        "dtype": "float16",
        "shape": [8, 12],
        "nbytes": 192,
        "chunks": 4,
    }
    table = command("show", tmp_path / "c", "--tensors", "w").out.splitlines()
    assert table[1].split() == ["model/w", "float16", "[8,", "12]", "192", "B", "4", file]


def test_pickled_values_are_told_and_not_loaded(command: Command, tmp_path: Path) -> None:
    state = {"model": {"w": np.ones(1)}, "odd": {"x": Odd()}}
    reknit.save(tmp_path / "c", state, options=reknit.SaveOptions(allow_pickle=True))
    Odd.loaded = 0
    ran = command("show", tmp_path / "c")
    assert ran.code == 0
    assert "pickle" in ran.out
    assert command("show", tmp_path / "c", "--json").json["uses_pickle"] is True
    assert Odd.loaded == 0


class Odd:
    """A type that only pickle can store, and that notices when it is loaded."""

    loaded = 0

    def __setstate__(self, state: object) -> None:
        Odd.loaded += 1

    def __getstate__(self) -> object:
        return {"a": 1}
