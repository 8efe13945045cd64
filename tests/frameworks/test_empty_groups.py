"""Groups of an optimizer without a parameter on this rank: their options are saved and loaded, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import reknit
from reknit.errors import MismatchError
from reknit.frameworks.registry import collect, wanted
from reknit.integrations.torch_save.export import export_torch
from tests.frameworks.checkpoint import Checkpoint, assemble, load, save
from tests.ranks import run
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

Groups = list[dict[str, Any]]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def build(*groups: str, lr: float = 0.1, kind: Any = torch.optim.AdamW) -> dict[str, Any]:
    """Return a model, and an optimizer with a group for each text: "a", "b" or "ab" are its two layers."""
    model: Any = net()
    layers = {"a": model[0], "b": model[1]}
    made: Groups = [{"params": [p for name in group for p in layers[name].parameters()]} for group in groups]
    return {"model": model, "optimizer": kind(made, lr=lr)}


def stepped(*groups: str) -> dict[str, Any]:
    """Return such a state, with other options in each group."""
    state = build(*groups)
    for number, group in enumerate(state["optimizer"].param_groups):
        group |= {"lr": 0.5**number, "weight_decay": 0.25 * number, "betas": (0.5, number / 8)}
    return state


def options(state: dict[str, Any]) -> Groups:
    return [{k: v for k, v in g.items() if k != "params"} for g in state["optimizer"].param_groups]


@table("groups", [("ab", ""), ("", "ab"), ("a", "", "b", ""), ("",), ("", "")])
def test_options_of_groups_without_parameters_are_loaded(groups: tuple[str, ...]) -> None:
    state = stepped(*groups)
    fresh = build(*groups)
    load(fresh, save(state))
    assert options(fresh) == options(state)


def test_a_second_save_has_the_options_of_that_time(tmp_path: Path) -> None:
    state = stepped("ab", "")
    for step in range(3):  # from the second save on, the results of the last walk are reused
        state["optimizer"].param_groups[1]["lr"] = 10.0 + step
        reknit.save(tmp_path / str(step), state)
        fresh = build("ab", "")
        reknit.load(tmp_path / str(step), fresh)
        assert options(fresh) == options(state)


def test_a_group_that_has_parameters_here_gets_their_options_and_not_those_of_the_empty_group() -> None:
    fresh = build("a", "b")
    want = load(fresh, save(stepped("ab", "")))
    assert [group["lr"] for group in options(fresh)] == [1.0, 1.0]
    assert not want.notes


def test_a_group_that_is_empty_only_here_keeps_its_options_and_the_report_says_so() -> None:
    state = stepped("a", "b")
    fresh = build("ab", "")
    for group in state["optimizer"].param_groups:
        group.update(lr=1.0, weight_decay=0.0, betas=(0.5, 0.5))
    want = load(fresh, save(state))
    assert [group["lr"] for group in options(fresh)] == [1.0, 0.1]
    assert [(note[:2], "its own stay" in note[2]) for note in want.notes] == [
        (("optimizer", "empty_groups/1"), True)
    ]


def test_a_saved_empty_group_without_a_counterpart_is_left_out_and_noted(tmp_path: Path) -> None:
    state = stepped("ab", "")
    reknit.save(tmp_path / "c", state)
    fresh = build("ab")
    report = reknit.load(tmp_path / "c", fresh)
    assert "empty_groups/1" in str(report.notes)


def test_options_of_another_optimizer_are_refused_for_an_empty_group_too() -> None:
    state = build("", kind=torch.optim.SGD)
    fresh = build("")
    want = wanted(fresh, save(state).catalog(), 0, 1)
    assert [why for _, _, why in want.mismatched if "torch.optim.SGD saved it" in why]
    assert "momentum" not in options(fresh)[0]


def test_a_raw_state_dict_has_the_options_of_its_empty_group() -> None:
    state, fresh = stepped("ab", ""), build("ab", "")
    names = [name for name, _ in state["model"].named_parameters()]

    def raw(one: dict[str, Any]) -> dict[str, Any]:
        taken = one["optimizer"].state_dict()
        taken["param_groups"][0]["param_names"] = names
        taken["param_groups"][1]["param_names"] = []
        return {"optimizer": taken}

    target = raw(fresh)
    load(target, save(raw(state)))
    fresh["optimizer"].load_state_dict(target["optimizer"])
    named = [{**group, "param_names": own} for group, own in zip(options(state), (names, []), strict=True)]
    assert options(fresh) == named


@table("named", [False, True])
def test_a_file_of_torch_save_has_the_options_of_an_empty_group(tmp_path: Path, named: bool) -> None:
    state = stepped("ab", "")
    state["model"](torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    saved = {name: part.state_dict() for name, part in state.items()}
    if named:  # as an optimizer that is made of named parameters records them
        for group, names in zip(saved["optimizer"]["param_groups"], ([*saved["model"]], []), strict=True):
            group["param_names"] = names
    torch.save(saved, tmp_path / "c.pt")
    fresh = build("ab", "")
    reknit.load(tmp_path / "c.pt", fresh)
    assert options(fresh) == options(state)


@table("groups", [("ab", ""), ("", "ab"), ("", "")])
def test_an_exported_file_loads_with_its_empty_groups(tmp_path: Path, groups: tuple[str, ...]) -> None:
    state = stepped(*groups)
    reknit.save(tmp_path / "c", state)
    export_torch(tmp_path / "c", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [group["lr"] for group in found] == [group["lr"] for group in options(state)]
    assert [bool(group["params"]) for group in found] == [bool(group) for group in groups]


def _stage(checkpoint: Checkpoint | None) -> Any:
    """Save or load a stage of a pipeline: rank 0 has layer a, and nothing in the second group."""
    rank = torch.distributed.get_rank()
    groups = ("a", "") if rank == 0 else ("", "b")
    if checkpoint is None:
        state = stepped(*groups)
        state = {"model": nn.ModuleDict({"ab"[rank]: state["model"][rank]}), "optimizer": state["optimizer"]}
        return collect(state, rank, 2)
    fresh = build(*groups)
    fresh = {"model": nn.ModuleDict({"ab"[rank]: fresh["model"][rank]}), "optimizer": fresh["optimizer"]}
    load(fresh, checkpoint, rank, 2)
    return options(fresh)


def test_a_rank_without_parameters_of_a_group_has_the_options_of_the_group() -> None:
    checkpoint = assemble(run(2, _stage, None))
    assert run(2, _stage, checkpoint) == [options(stepped("a", "b"))] * 2


def test_an_old_checkpoint_without_options_of_empty_groups_still_loads() -> None:
    checkpoint = save(stepped("ab", ""))
    checkpoint.shared = {name: v for name, v in checkpoint.shared.items() if "empty_groups" not in name[1]}
    fresh = build("ab", "")
    load(fresh, checkpoint)
    assert [group["lr"] for group in options(fresh)] == [1.0, 0.1]


def test_a_state_that_the_owner_took_out_of_its_groups_is_refused() -> None:
    state = build("ab")
    state["optimizer"].state[state["model"][0].weight] = {"exp_avg": torch.ones(4, 3)}
    state["optimizer"].param_groups[0]["params"] = []
    with pytest.raises(reknit.ReknitError, match="has no parameters: its owner"):
        save(state)


def test_a_mismatched_option_of_an_empty_group_is_refused_before_anything_changes(tmp_path: Path) -> None:
    state, fresh = stepped("ab", ""), build("ab", "")
    state["optimizer"].param_groups[1]["lr"] = torch.ones(3)
    fresh["optimizer"].param_groups[1]["lr"] = torch.ones(2)
    reknit.save(tmp_path / "c", state)
    with pytest.raises(MismatchError, match="empty_groups/1"):
        reknit.load(tmp_path / "c", fresh)
    assert options(fresh)[0]["lr"] == 0.1
