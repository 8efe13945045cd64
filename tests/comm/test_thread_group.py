"""The special behaviour of ranks that are threads; the rest is in test_backends.py."""

from __future__ import annotations

import gc

from reknit.comm.tree.thread_group import thread_groups
from reknit.errors import ProtocolError
from tests.comm.worlds import ask, endings


def rounds_in_memory() -> list[object]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found).__name__ == "_Round"]


def test_rounds_that_ended_well_or_badly_are_forgotten() -> None:
    earlier = rounds_in_memory()
    groups = thread_groups(3)
    for _ in range(20):
        assert endings(groups, lambda group: ask(group, request=b"x")) == [b"x"] * 3
        kinds = [type(error) for error in endings(groups, lambda group: ask(group, f"on {group.rank}"))]
        assert kinds == [ProtocolError] * 3
    assert [found for found in rounds_in_memory() if found not in earlier] == []


def test_groups_know_their_rank_and_size() -> None:
    assert [(group.rank, group.size) for group in thread_groups(3)] == [(0, 3), (1, 3), (2, 3)]
