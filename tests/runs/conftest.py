"""Each test of a run ends its agents, so that others see only their own; and waits that take no time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import reknit
from reknit.engine.stored import heartbeat
from reknit.events.phase import CLOCK
from tests.runs.owners import LONG_S, Waits

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def agents_end() -> Iterator[None]:
    yield
    assert reknit.close(60)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """Replace the clock of this process, and let no thread beat by itself."""
    found = Waits()
    monkeypatch.setattr(heartbeat, "EVERY_S", LONG_S)
    monkeypatch.setattr("reknit.engine.stored.heartbeat.time", SimpleNamespace(sleep=found.sleep))
    token = CLOCK.set(found)
    yield found
    CLOCK.reset(token)
