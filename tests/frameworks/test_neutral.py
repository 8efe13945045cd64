"""Devices of torch in plain values: the current one comes back as the current one, and others by number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from reknit.errors import FormatError
from reknit.frameworks.neutral import from_neutral, to_neutral
from reknit.testing.world import run_ranks
from reknit.types.shard import Tagged
from tests.devices import every_simulated_device

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.group import Group


class Average:
    """An object that keeps its device."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device

    def state_dict(self) -> dict[str, Any]:
        return {"device": self.device}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.device = state["device"]


@every_simulated_device
def test_the_device_of_each_rank_comes_back_as_the_device_of_each_rank(
    device_type: str, tmp_path: Path
) -> None:
    module = torch.get_device_module(device_type)
    torch.ones(1, device=device_type)

    def rank(group: Group) -> None:
        here = torch.device(device_type, group.rank)
        with module.device(group.rank):
            state: dict[str, Any] = {
                "average": Average(here),
                "options": {"device": here, "host": torch.device("cpu")},
            }
            reknit.save(tmp_path / "x", state, group=group)
        with module.device(1 - group.rank):
            state = {"average": Average(None), "options": {"device": None, "host": None}}
            reknit.load(tmp_path / "x", state, group=group)
        other = torch.device(device_type, 1 - group.rank)
        assert state["options"] == {"device": other, "host": torch.device("cpu")}
        assert state["average"].device == other

    run_ranks(2, rank)
    with module.device(1):  # on another number of ranks, too
        state: dict[str, Any] = {"average": Average(None), "options": {"device": None, "host": None}}
        reknit.load(tmp_path / "x", state)
    assert state["options"]["device"] == state["average"].device == torch.device(device_type, 1)


@every_simulated_device
def test_a_device_that_is_not_the_current_one_keeps_its_number(device_type: str) -> None:
    torch.ones(1, device=device_type)
    module = torch.get_device_module(device_type)
    found = [torch.device(device_type, 1), torch.device(device_type), torch.device(device_type, 0)]
    saved = to_neutral(found, "x")
    assert [one.value for one in saved] == [f"{device_type}:1", device_type, f"{device_type}:current"]
    with module.device(1):
        assert from_neutral(saved) == [*found[:2], found[0]]


def test_the_current_device_of_a_kind_that_is_not_here_has_no_number() -> None:
    assert from_neutral(Tagged("torch.device", "xpu:current")) == torch.device("xpu")
    with pytest.raises(FormatError, match=r"is not a torch\.device"):
        from_neutral(Tagged("torch.device", "abacus:current"))
