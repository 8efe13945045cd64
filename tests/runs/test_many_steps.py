"""A run of thousands of steps on an object store: how many requests it takes to find them."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import reknit
from reknit.engine.stored.steps import step_name
from reknit.storage.registry import open_storage
from tests.runs.pieces import state
from tests.servers import new_url
from tests.storage.fault_proxy import FaultProxy, before

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 1100


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with before("s3") as proxy:
        yield proxy


def test_the_steps_are_found_with_one_request_for_a_thousand(proxy: FaultProxy) -> None:
    url = new_url("s3")
    reknit.save(f"{url}/{step_name(STEPS)}", state(7.0), step=STEPS)
    root = open_storage(url)
    with ThreadPoolExecutor(16) as threads:
        for step in range(STEPS):
            threads.submit(root.put, f"{step_name(step)}/manifest.json", b"{}", if_absent=False)
    with reknit.Checkpointer(url) as run:
        proxy.spoil(None)
        assert run.latest() == STEPS
        asked = Counter("list" if "list-type" in request else "other" for request in proxy.requests)
        assert asked == {"list": -(-(STEPS + 1) // 1000) + 2, "other": 1}, (
            "the record of the run is listed, too, and an empty listing is repeated"
        )
        proxy.spoil(None)
        assert run.resume(state()) == STEPS + 1
        lists = [request for request in proxy.requests if "list-type" in request]
        # For the opening, begun saves and the newest step: markers, and records, of which some are repeated.
        most = 2 * 3 + 11
        assert len(lists) <= most, lists
        assert len(proxy.requests) < 36
