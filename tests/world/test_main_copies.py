"""Values with a main copy on one rank: that copy is saved, and without it the save fails on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import reknit
from reknit.errors import StateError
from reknit.testing.world import run_ranks
from reknit.types.shard import Blob, Holdings, Witness
from tests.storage.process_memory import ProcessMemory
from tests.world.jobs import save_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.group import Group

    Held = Callable[[int], Sequence[Blob | Witness]]


def saved(name: str, size: int, held: Held) -> list[str | None]:
    """Save the holdings of each rank; return the error of each rank."""
    ProcessMemory.clear(name)

    def rank(group: Group) -> str | None:
        values = held(group.rank)
        blobs = tuple(value for value in values if isinstance(value, Blob))
        witnesses = tuple(value for value in values if isinstance(value, Witness))
        holdings = Holdings(("m",), (), blobs, (), witnesses)
        try:
            save_rank(group, ProcessMemory(name), lambda: holdings, step=1)
        except StateError as error:
            return str(error)
        return None

    return run_ranks(size, rank)


def test_copies_without_a_main_copy_fail_the_save_on_all_ranks() -> None:
    reported = saved(
        "lone", 4, lambda rank: [Witness("m", "o", None)] if rank in (1, 3) else [Blob("m", "x", 1)]
    )
    for error in reported:
        assert error is not None
        assert "no rank has the main copy of m/o; copies are on ranks 1, 3" in error
    assert list(ProcessMemory("lone").list("")) == []


def test_copies_of_a_main_copy_are_no_part_of_the_checkpoint() -> None:
    def held(rank: int) -> list[Blob | Witness]:
        place = {"pp": rank // 2, "tp": 0}
        if rank % 2:
            return [Witness("m", "o", None), Witness("m", "rng", place)]
        return [Blob("m", "rng", rank, place), *([Blob("m", "o", 7)] if rank == 0 else [])]

    assert saved("main", 4, held) == [None] * 4
    with reknit.open("process://main") as checkpoint:
        assert checkpoint.step == 1


def test_each_place_has_a_main_copy_of_its_own() -> None:
    def held(rank: int) -> list[Blob | Witness]:
        place = {"pp": rank // 2, "tp": 0}
        return [Blob("m", "rng", rank, place) if rank == 0 else Witness("m", "rng", place)]

    for error in saved("places", 4, held):
        assert error is not None
        assert "no rank has the main copy of m/rng (pp 1, tp 0); copies are on ranks 2-3" in error


def test_a_value_in_another_place_is_not_the_main_copy() -> None:
    for place in ({"rank": 0}, {"pp": 0}):
        kept = Blob("m", "o", 1, place)
        reported = saved("astray", 2, lambda rank, kept=kept: [Witness("m", "o", None) if rank else kept])  # type: ignore[misc]
        assert all(error is not None and "copies are on rank 1" in error for error in reported)


def test_one_of_many_is_named_with_the_first_ranks_that_have_it() -> None:
    (error,) = set(saved("many", 10, lambda _: [Witness("m", name, None) for name in "aba"]))
    assert error is not None
    ranks = "0-9, and the same is true of 1 more"
    assert f"m/a; copies are on ranks {ranks}" in error
