from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import reknit
from reknit import transforms
from reknit.integrations.hugging_face.export import export_hf, files_of
from tests.integrations.formats.checkpoints import every_dtype, same, save_training

if TYPE_CHECKING:
    from pathlib import Path

LACKING = ("complex32", "complex128", "float4_e2m1fn_x2")


def test_rules_give_the_names_and_cuts_of_another_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {
        "gate_up": torch.randn(6, 5),
        "e.0.w": torch.randn(2, 3),
        "e.1.w": torch.randn(2, 3),
        "vocabulary": torch.randn(8, 2),
        "turned": torch.randn(3, 4),
        "norm": torch.randn(3).to(torch.bfloat16),
    }
    reknit.save(tmp_path / "c", {"model": state})
    rules = [
        transforms.split("gate_up", ["gate", "up"]),
        transforms.stack("e.{n}.w", "experts", over="n"),
        transforms.trim("vocabulary", 5),
        transforms.pad("norm", 4),
        transforms.transpose("turned"),
        transforms.rename("norm", "model.norm.weight"),
    ]
    report = export_hf(tmp_path / "c", tmp_path / "out", transforms=rules, verify=True, dtype="float16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = {
        "gate": state["gate_up"][:3],
        "up": state["gate_up"][3:],
        "experts": torch.stack([state["e.0.w"], state["e.1.w"]]),
        "vocabulary": state["vocabulary"][:5],
        "model.norm.weight": torch.cat([state["norm"], torch.zeros(1, dtype=torch.bfloat16)]),
        "turned": state["turned"].T,
    }
    assert found.keys() == wanted.keys()
    assert all(same(found[name], one.to(torch.float16)) for name, one in wanted.items())
    assert (report.verified, report.tied) == (True, {})


def test_rules_are_the_same_as_those_of_a_load_for_pieces_of_a_large_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reknit.integrations.formats import export as tensor_stream

    qkv = torch.randn(12, 40)
    reknit.save(tmp_path / "c", {"model": {"qkv": qkv}})
    rules = [transforms.split("qkv", ["q", "k", "v"], parts=(4, 1, 1), repeat=2)]
    monkeypatch.setattr(tensor_stream, "_BATCH", 1)
    export_hf(tmp_path / "c", tmp_path / "out", transforms=rules)
    target = {"model": {name: torch.empty(n, 40) for name, n in (("q", 8), ("k", 2), ("v", 2))}}
    reknit.load(tmp_path / "c", target, options=reknit.LoadOptions(transforms=rules))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(same(found[name], one) for name, one in target["model"].items())


def test_whole_names_change_before_other_rules(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"module": {"a.w": torch.ones(2)}})
    rules: list[Any] = [transforms.names({"module/": "model/"}), transforms.rename("a.w", "b.w")]
    export_hf(tmp_path / "c", tmp_path / "out", transforms=rules)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"b.w"}


def test_ties_survive_new_names_but_not_cuts(tmp_path: Path) -> None:
    embedding, head = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    head.weight = embedding.weight
    reknit.save(tmp_path / "c", {"model": torch.nn.ModuleDict({"z": embedding, "a": head})})
    rules = [transforms.rename("z.weight", "embed"), transforms.rename("a.weight", "head")]
    assert export_hf(tmp_path / "c", tmp_path / "one", transforms=rules).tied == {"head": "embed"}
    rules = [transforms.rename("z.weight", "embed"), transforms.transpose("a.weight", "head")]
    assert export_hf(tmp_path / "c", tmp_path / "two", transforms=rules).tied == {}
    found = load_file(tmp_path / "two" / "model.safetensors")
    assert same(found["head"], found["embed"].T)


def test_a_rule_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"model": {"weight": torch.ones(2)}})
    with pytest.raises(reknit.MismatchError, match="wieght"):
        export_hf(tmp_path / "c", tmp_path / "out", transforms=[transforms.rename("wieght", "w")])


def test_states_of_an_optimizer_and_other_items_are_left_out_by_name(tmp_path: Path) -> None:
    net, optimizer = save_training(tmp_path / "c")
    report = export_hf(tmp_path / "c", tmp_path / "out", verify=True)
    assert set(report.left_out) == {"optimizer", "schedule", "values", "rng"}
    with pytest.raises(reknit.UsageError, match=r"states of an optimizer.*\n.*torch or dcp"):
        export_hf(tmp_path / "c", tmp_path / "other", item="optimizer")
    reknit.save(tmp_path / "both", {"train": {"net": net, "optimizer": optimizer}})
    report = export_hf(tmp_path / "both", tmp_path / "weights", item="train")
    assert report.left_out["optimizer.state.0.bias.exp_avg"] == "it is a state of an optimizer"
    assert set(load_file(tmp_path / "weights" / "model.safetensors")) == {
        f"net.{name}" for name in net.state_dict() if name != "1.weight"
    }


def test_every_dtype_of_safetensors_is_verified(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"model": every_dtype(without=LACKING)})
    assert export_hf(tmp_path / "c", tmp_path / "out", verify=True).verified


def test_configuration_and_tokenizer_are_copied_and_weights_are_not(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    for name in ("config.json", "tokenizer.model", "merges.txt", "x.index.json", "model.safetensors", "a.py"):
        (given / name).write_text(name)
    reknit.save(tmp_path / "c", {"model": {"w": torch.ones(2)}})
    report = export_hf(tmp_path / "c", tmp_path / "out", config_from=given)
    assert report.passed == ("config.json", "merges.txt", "tokenizer.model")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*report.passed, "model.safetensors"}
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"w"}


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(reknit.UsageError, match="no configuration"):
        files_of(tmp_path)
    with pytest.raises(reknit.UsageError, match="not a folder"):
        files_of(tmp_path / "absent")


def test_an_adapter_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"model": {"w": torch.ones(2)}})
    with pytest.raises(reknit.MismatchError, match="adapter 'default'"):
        export_hf(tmp_path / "c", tmp_path / "out", adapter="default")
