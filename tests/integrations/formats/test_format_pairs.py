"""An export that is opened in place leaves in any other format: all tensors are equal, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import reknit
from reknit.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

ENDINGS = {"dcp": "", "torch": ".pt", "npz": ".npz", "hf": ""}
WITH_OPTIMIZER = {"dcp", "torch", "npz"}


def save(path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    for name, values in {
        "two_bytes": torch.arange(6, dtype=torch.bfloat16),
        "one_byte": torch.arange(4.0).to(torch.float8_e4m3fn),
        "bits": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }.items():
        model.register_buffer(name, values)
    optimizer = torch.optim.AdamW(model.parameters())
    model[1](model[0](torch.randn(5, 4))).square().sum().backward()
    optimizer.step()
    reknit.save(path, {"model": model, "optimizer": optimizer, "note": {"epoch": 3}})


def bits(path: Path, items: set[str]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of all tensors of some items."""
    with reknit.open(path) as checkpoint:
        names = {(item, name) for item in items for name in checkpoint.tensors[item]}
        arrays = {f"{item}/{name}": np.asarray(checkpoint.read(item, name)) for item, name in names}
    return {name: (str(one.dtype), one.shape, one.tobytes()) for name, one in arrays.items()}


@pytest.mark.parametrize("first", ENDINGS)
def test_a_state_goes_through_two_formats_bit_for_bit(first: str, tmp_path: Path) -> None:
    save(tmp_path / "own")
    once = tmp_path / f"once{ENDINGS[first]}"
    assert main(["export", first, str(tmp_path / "own"), str(once), *_item(first), "--verify"]) == 0
    for second, ending in ENDINGS.items():
        twice = tmp_path / f"{second}{ending}"
        assert main(["export", second, str(once), str(twice), *_item(second), "--verify"]) == 0
        items = {"model", "optimizer"} if {first, second} <= WITH_OPTIMIZER else {"model"}
        expected, found = bits(tmp_path / "own", items), bits(twice, items)
        assert expected.keys() <= found.keys()
        assert {name: found[name] for name in expected} == expected


def _item(name: str) -> list[str]:
    return ["--item", "model"] if name == "hf" else []
