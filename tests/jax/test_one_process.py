"""What holds for JAX in one process of four devices: each test is a function that runs there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.jax.job import checks

if TYPE_CHECKING:
    from pathlib import Path

    from tests.jax.job import Job


@pytest.mark.parametrize("name", checks("trees"))
def test_of_trees(alone: Job, tmp_path: Path, name: str) -> None:
    alone.call(f"trees.check_{name}", tmp_path / "checkpoint")


@pytest.mark.parametrize("name", checks("arrays"))
def test_of_arrays(alone: Job, tmp_path: Path, name: str) -> None:
    alone.call(f"arrays.check_{name}", tmp_path / "checkpoint")


@pytest.mark.parametrize("name", checks("records"))
def test_of_records(alone: Job, tmp_path: Path, name: str) -> None:
    alone.call(f"records.check_{name}", tmp_path / "checkpoint")


@pytest.mark.parametrize("name", checks("memory"))
def test_of_memory(alone: Job, tmp_path: Path, name: str) -> None:
    alone.call(f"memory.check_{name}", tmp_path / "checkpoint")


@pytest.mark.parametrize("name", checks("optional"))
def test_of_optional_parts(alone: Job, tmp_path: Path, name: str) -> None:
    alone.call(f"optional.check_{name}", tmp_path / "checkpoint")


@pytest.mark.parametrize("name", checks("beside_torch"))
def test_of_jax_beside_torch(alone: Job, tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    alone.call(f"beside_torch.check_{name}", tmp_path / "checkpoint")


@pytest.mark.parametrize("name", checks("exact"))
def test_of_values(alone: Job, tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    alone.call(f"exact.check_{name}", tmp_path / "checkpoint")
