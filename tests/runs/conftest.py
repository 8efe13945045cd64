"""Each test of a run ends its agents, so that others see only their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import reknit

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def agents_end() -> Iterator[None]:
    yield
    assert reknit.close(60)
