"""Credentials that are renewed while a job runs reach the agents."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reknit
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import open_storage, recipe, register

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from reknit.options import Durability
    from reknit.storage.base import Storage

LIMIT_S = 60.0


def by_token(url: str, durability: Durability) -> Storage:
    """Open the folder that the credentials of this process name."""
    folder = url.partition("://")[2]
    return LocalStorage(f"/{folder}/{os.environ.get('AWS_SESSION_TOKEN', 'none')}", durability="process")


register("by-token", by_token)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    assert reknit.close(LIMIT_S)
    yield
    assert reknit.close(LIMIT_S)


def test_a_token_that_is_renewed_between_saves_is_what_the_agents_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"by-token:/{tmp_path}"
    assert recipe(f"{url}/0").agents_can_open
    for step, token in enumerate(["a", "b", "b", "a", None]):
        if token is None:
            monkeypatch.delenv("AWS_SESSION_TOKEN")
        else:
            monkeypatch.setenv("AWS_SESSION_TOKEN", token)
        state = {"m": {"w": np.full(1000, step)}}
        reknit.save(f"{url}/{step}", state, step=step, wait=False).result(LIMIT_S)
        assert (tmp_path / str(step) / (token or "none") / "manifest.json").exists()
    assert open_storage(f"{url}/4").folders()
