"""`reknit export orbax`: Orbax restores the tensors and values of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.jax.job import Job, checks
from tests.optional import needs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs("orbax", "Orbax")


@pytest.mark.parametrize("name", checks("orbax_export_runs"))
def test_orbax_restores_an_export(alone: Job, tmp_path: Path, name: str) -> None:
    alone.call(f"orbax_export_runs.check_{name}", str(tmp_path))
