"""Refusals of an import by the processes of a Ray cluster; `integrations/test_ray.py` has the imports."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from reknit.errors import MissingExtraError, UsageError
from reknit.integrations.ray import import_on_ray

if TYPE_CHECKING:
    from pathlib import Path


def test_an_impossible_number_and_a_missing_ray_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (0, -1, 1.5):
        with pytest.raises(UsageError, match="the number of ranks on Ray is a whole number"):
            import_on_ray(tmp_path / "a", tmp_path / "b", number)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match="Ray is not installed"):
        import_on_ray(tmp_path / "a", tmp_path / "b", 1)
