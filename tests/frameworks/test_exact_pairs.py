"""A value of any kind, loaded where one of any other is, comes exactly, or is refused before a change."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import reknit
from reknit.errors import ReknitError
from tests import values
from tests.running.examples import is_night
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KINDS: dict[str, Callable[[], Any]] = {
    "int": lambda: 3,
    "large int": lambda: 2**70,
    "float": lambda: 0.1,
    "negative zero": lambda: -0.0,
    "nan": lambda: math.nan,
    "bool": lambda: True,
    "complex": lambda: 2j,
    "text": lambda: "text",
    "none": lambda: None,
    "list": lambda: [1, 2.5],
    "tuple": lambda: (1, 2),
    "dict": lambda: {"a": 1, "b": {"c": 2}},
    "empty dict": dict,
    "ordered": lambda: [OrderedDict(a=1)],
    "counter": lambda: [Counter("aab")],
    "deque": lambda: deque([1], 3),
    "numpy float32": lambda: np.float32(0.1),
    "numpy int": lambda: np.int64(3),
    "numpy 0-d": lambda: np.array(3.0),
    "array": lambda: np.arange(3.0),
    "swapped array": lambda: np.arange(3, dtype=">f4"),
    "dates": lambda: np.array(["2026-01-02"], "M8[D]"),
    "tensor": lambda: torch.arange(3.0),
    "float64 0-d": lambda: torch.tensor(0.1, dtype=torch.float64),
    "float32 0-d": lambda: torch.tensor(0.1),
    "int64 0-d": lambda: torch.tensor(3),
    "one element": lambda: torch.tensor([3.0]),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "no elements": lambda: torch.empty(0, 3),
    "parameter": lambda: nn.Parameter(torch.ones(3)),
    "tensors": lambda: [torch.ones(2), torch.zeros(2)],
    "module": lambda: nn.Linear(2, 2),
    "empty module": nn.ReLU,
    "keeper": lambda: values.Keeper({"a": torch.ones(2), "b": -0.0}),
    "scaler": lambda: torch.amp.GradScaler("cpu"),
    "no scaler": lambda: torch.amp.GradScaler("cpu", enabled=False),
    "own": lambda: reknit.PerRank(5),
}
QUICK = reknit.SaveOptions(durability="process", threads=1)


@table("strict", [True, False])
def test_a_value_comes_in_every_bit_or_is_refused_before_anything_changes(
    tmp_path: Path, strict: bool
) -> None:
    sources = {name: make() for name, make in KINDS.items()}
    reknit.save(tmp_path / "c", {name: {"v": value} for name, value in sources.items()}, options=QUICK)
    wrong = []
    for saved, source in sources.items():
        for target in targets(saved):
            make = KINDS[target]
            state = {saved: {"v": make(), "other": torch.zeros(1)}}
            if strict:
                del state[saved]["other"]
            before = values.observed(state)
            try:
                reknit.load(tmp_path / "c", state, strict=strict)
            except ReknitError as error:
                if values.observed(state) != before:
                    wrong.append(f"{saved} into {target}: changed, {error}")
                if saved not in str(error):
                    wrong.append(f"{saved} into {target}: {error}")
                continue
            except Exception as error:
                wrong.append(f"{saved} into {target}: {error!r}")
                continue
            if target == "no scaler" or (saved, target) == ("own", "empty module"):
                continue  # it loads any state and keeps nothing, and no rank has a value of its own
            found = state[saved]["v"]
            kept = not strict and values.observed(state) == before
            if not kept and not same(source, found):
                wrong.append(f"{saved} into {target}: {found!r}")
    assert wrong == []


def targets(saved: str) -> list[str]:
    """Return the kinds into which to load a value of a kind; by day into every ninth kind, and its own."""
    every = list(KINDS)
    if is_night():
        return every
    at = every.index(saved)
    return sorted({saved, *every[at % 9 :: 9]})


def same(saved: Any, found: Any) -> bool:
    """Return whether a value came with all its bits, perhaps in another kind."""
    return bool(meant(saved) == meant(found))


def meant(value: Any) -> Any:
    """Return the meaning of a value, the same for all kinds."""
    if isinstance(value, reknit.PerRank):
        return meant(value.value)
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.numel() != 1:
            return "tensor", str(value.dtype), value.tolist()
        value = value.item()
    if isinstance(value, (np.ndarray, np.generic)) and value.size == 1:
        value = value.item()
    if isinstance(value, np.ndarray):
        return "tensor", f"torch.{value.dtype.name}", value.tolist()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        whole = isinstance(value, int) or (value.is_integer() and (value or math.copysign(1, value) > 0))
        return ("number", int(value)) if whole else ("number", struct.pack("<d", value))
    if callable(getattr(value, "state_dict", None)):
        return meant(value.state_dict())
    if isinstance(value, dict):
        return [(key, meant(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), [meant(inner) for inner in value]
    return values.observed(value)
