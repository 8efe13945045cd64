"""Fixtures of the tests in this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.nursery import Nursery

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Return a process that forks others."""
    with Nursery() as one:
        yield one
