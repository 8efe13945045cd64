"""Numbers that are loaded into 0-d tensors, and back, in values that differ between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit
from reknit.errors import MismatchError
from reknit.frameworks.same_value import same_value
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


@table(
    ("saved", "present", "expected"),
    [
        (0.1, torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)),
        (0.25, torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(0.25, dtype=torch.bfloat16)),
        (3, torch.tensor(0), torch.tensor(3)),
        (3, np.array(0.0), np.array(3.0)),
        (torch.tensor(0.25), 0.5, 0.25),
        (torch.tensor(0.25, dtype=torch.bfloat16), 0.5, 0.25),
        (np.array(7), 0, 7),
        (np.float64(0.1), 0.5, 0.1),
    ],
)
def test_a_number_takes_the_form_that_the_value_of_a_rank_has(
    saved: Any, present: Any, expected: Any, tmp_path: Path
) -> None:
    reknit.save(tmp_path / "saved", {"m": reknit.PerRank(saved)})
    target = reknit.PerRank(present)
    reknit.load(tmp_path / "saved", {"m": target})
    assert same_value(target.value, expected)
    assert not isinstance(present, (torch.Tensor, np.ndarray)) or target.value is present


@table(
    ("saved", "present"),
    [
        (0.1, torch.tensor(0.5)),
        (0.5, torch.tensor(0)),
        (True, torch.tensor(0)),
        (1, torch.tensor(False)),
        (torch.tensor(1), True),
        (torch.tensor(True), 1),
        (torch.tensor(0.5), 1),
    ],
)
def test_a_number_that_does_not_fit_the_value_of_a_rank_is_mismatched(
    saved: Any, present: Any, tmp_path: Path
) -> None:
    reknit.save(tmp_path / "saved", {"m": reknit.PerRank(saved)})
    target = reknit.PerRank(present)
    with pytest.raises(MismatchError, match="in the checkpoint"):
        reknit.load(tmp_path / "saved", {"m": target})
    reknit.load(tmp_path / "saved", {"m": target}, strict=False)
    assert target.value is present
