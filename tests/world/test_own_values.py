"""Values of ranks' own: nothing is replaced without an error or a report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from reknit.testing.world import run_ranks
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.group import Group


def test_different_values_under_one_coordinate_are_a_warning_and_equal_ones_are_not() -> None:
    ProcessMemory.clear("places")

    def rank(group: Group) -> tuple[str, ...]:
        place = {"dp": group.rank // 2}
        state: dict[str, Any] = {
            "drifted": reknit.PerRank({"v": group.rank}, coordinate=place),
            "same": reknit.PerRank({"v": group.rank // 2}, coordinate=place),
        }
        return reknit.save("process://places/step", state, group=group).result().warnings

    for warnings in run_ranks(4, rank):
        assert len(warnings) == 2
        assert all("different values of drifted under one coordinate" in w for w in warnings)


def test_values_of_a_rank_of_its_own_are_among_the_restored() -> None:
    ProcessMemory.clear("own")

    def rank(group: Group) -> tuple[str, ...]:
        state: dict[str, Any] = {"rng": reknit.RngState(), "lag": {"seconds": group.rank}, "step": 3}
        reknit.save("process://own/step", state, group=group)
        return reknit.load("process://own/step", state, group=group).restored

    for restored in run_ranks(2, rank):
        assert set(restored) == {"rng", "lag/seconds", "step"}


def test_dense_targets_are_read_into_directly(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", {"m": {"w": np.arange(300_000)}})
    target = np.zeros(300_000, np.int64)
    low, high = target.ctypes.data, target.ctypes.data + target.nbytes
    seen: list[int] = []

    class Spying(LocalStorage):
        def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
            seen.extend(np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers)
            super().read_into(path, start, buffers)

    register("spied", lambda url, _: Spying(url.removeprefix("spied://")))
    reknit.load(f"spied://{tmp_path}/x", {"m": {"w": target}})
    assert np.array_equal(target, np.arange(300_000))
    assert any(low <= address < high for address in seen)


class Endless:
    """An object whose state contains itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"self": self.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is loaded")


@pytest.mark.parametrize("wait", [True, False])
def test_what_stops_one_rank_while_it_looks_at_its_state_is_heard_by_all(wait: bool) -> None:
    ProcessMemory.clear("endless")

    def rank(group: Group) -> list[str]:
        reknit.save("process://endless/sound", {"v": [1]}, group=group)
        state = {"v": Endless() if group.rank else [1]}
        reported = []
        with pytest.raises(reknit.ReknitError) as caught:
            reknit.save("process://endless/x", state, group=group, wait=wait).result()
        reported.append(f"{type(caught.value).__name__}: {caught.value}")
        with pytest.raises(reknit.ReknitError) as caught:
            reknit.load("process://endless/sound", state, group=group)
        reported.append(f"{type(caught.value).__name__}: {caught.value}")
        return reported

    others, own = run_ranks(2, rank)
    assert own[0].startswith("StateError: v (Endless) could not be saved: RecursionError")
    assert others[0].startswith("StateError: v (Endless) could not be saved: RecursionError")
    assert "rank 1" in others[0]
