"""Tests of JAX in one process with four devices: each test is a function that runs there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.jax.job import checks

if TYPE_CHECKING:
    from pathlib import Path

    from tests.jax.job import Job


MODULES = ("trees", "arrays", "records", "memory", "optional", "refusals", "beside_torch", "exact")
WITH_TORCH = ("beside_torch", "exact")


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in MODULES for name in checks(module)]
)
def test_of_one_process(alone: Job, tmp_path: Path, module: str, name: str) -> None:
    if module in WITH_TORCH:
        pytest.importorskip("torch", reason="torch is not installed")
    alone.call(f"{module}.check_{name}", tmp_path / "checkpoint")
