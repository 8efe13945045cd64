"""Two hundred saves in the background leave the trainer and its agent as small as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.async_kills import GONE_S
from tests.faults.nursery import Nursery, wait_until

if TYPE_CHECKING:
    from pathlib import Path

GROWTH_KIB = 6 << 10
"""Memory that an allocator may keep for itself; a copy of every state, or a mapping of it, is more."""


@pytest.mark.parametrize("size", [1, 2])
def test_two_hundred_saves_leave_memory_threads_and_descriptors_as_they_were(
    tmp_path: Path, size: int
) -> None:
    for folder in ("meet", "steps", "temporary"):
        (tmp_path / folder).mkdir()
    with Nursery() as nursery:
        trainers = [
            nursery.start(
                "save_often",
                tmp_path / f"log-{rank}",
                root=tmp_path,
                rank=rank,
                size=size,
                count=200,
                early=20,
            )
            for rank in range(size)
        ]
        for trainer in trainers:
            wait_until(lambda t=trainer: not t.alive(), GONE_S, trainer.told)  # type: ignore[misc]
            assert trainer.said("end"), trainer.told()
    for trainer in trainers:
        assert trainer.agents() == []
        for who in ("trainer", "agent"):
            early, late = ([int(number) for number in line.split()] for line in trainer.said(who))
            assert late[0] <= early[0] + GROWTH_KIB, f"{who}: {early[0]} KiB became {late[0]} KiB"
            grown = [number > before for number, before in zip(late[1:], early[1:], strict=True)]
            assert not any(grown), f"{who}: descriptors, threads, shared memory: {early} became {late}"
    assert not list((tmp_path / "temporary").iterdir())
