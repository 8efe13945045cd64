"""A run that was presumed dead wakes up at any moment: it never overwrites the checkpoint of a newer run."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.errors import CheckpointExistsError, CommitError, FencedError, ReknitError, StorageError
from reknit.storage.local.store import LocalStorage
from reknit.testing.faulty_storage import Fault
from tests.engine.runs import MANY, Annals, Commit, Stage, pausing, save_as, strays, value_in
from tests.running.examples import examples, is_night, some, thinned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.storage.base import Storage


def overtaken(place: Storage, stopping: Callable[[Callable[[], None]], Storage], *, overwrite: bool) -> str:
    """Save as run 1, which is stopped at some moment until all of the save of run 2 is over.

    Run 1 saves by the store that `stopping` returns, which calls the argument of `stopping` at that moment.
    Returns "ok" or the type of run 1's error, and "" if the moment never came.  In each case the checkpoint
    of run 2 is whole, and no other file is left.
    """
    seen: list[int | None] = []

    def overtake() -> None:
        seen.append(value_in(place))
        newer = save_as(place, 2, 2, overwrite=overwrite)
        assert newer is None or (isinstance(newer, CheckpointExistsError) and seen[0] == 1)

    error = save_as(stopping(overtake), 1, 1, overwrite=overwrite)
    if not seen:
        return ""
    if error is None:
        assert seen == [1], "it had committed before run 2 began"
    assert value_in(place) == (1 if seen == [1] and not overwrite else 2)
    assert strays(place) == set()
    if isinstance(error, StorageError):
        assert "removed" in error.message or "injected" in error.message, "its files are cleared away"
    assert save_as(place, 3, 3) is None
    assert value_in(place) == 3
    return "ok" if error is None else type(error).__name__


@pytest.mark.parametrize(("store", "overwrite"), [("memory", True), ("local", False)])
def test_a_run_that_was_overtaken_at_any_operation_commits_nothing_afterwards(
    tmp_path: Path, store: str, overwrite: bool
) -> None:
    ends: list[str] = []
    while not ends or ends[-1]:
        k = len(ends) + 1
        place: Storage = (
            Annals("overtaken")
            if store == "memory"
            else LocalStorage(tmp_path / f"{k}", durability="process")
        )
        if overwrite:
            assert save_as(place, 0, 0) is None

        def stopping(stop: Callable[[], None], place: Storage = place, k: int = k) -> Storage:
            return pausing(place, [k], stop)

        ends.append(overtaken(place, stopping, overwrite=overwrite))
    committed = ends.index("ok")
    assert set(ends[committed:-1]) == {"ok"}, "the rest of its save harms nobody"
    assert ends[committed - 1] == "FencedError", "even between its last look and the commit"
    assert ends.count("FencedError") >= 8
    assert set(ends[:committed]) <= {"FencedError", "StorageError", "CheckpointExistsError"}
    assert ends.count("CheckpointExistsError") <= (0 if overwrite else 2)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_was_overtaken_while_it_commits_once_more_changes_nothing(overwrite: bool) -> None:
    lost, ends = Fault("lost", 1, "commit"), []
    for k in range(1, 30):
        place = Annals("again")
        if overwrite:
            assert save_as(place, 0, 0) is None

        def stopping(stop: Callable[[], None], place: Annals = place, k: int = k) -> Storage:
            return pausing(place, [k], stop, lost)

        ends.append(overtaken(place, stopping, overwrite=overwrite))
    assert ends.count("ok") >= (1 if overwrite else 4), "the store had said at last that it will stay"
    assert ends.count("FencedError") > 8
    assert ends.count("") < 10


CALLS = ("open", "pwrite", "fsync", "link", "unlink", "rename", "listdir")


@pytest.mark.parametrize("call", some(CALLS))
def test_a_run_that_was_overtaken_at_any_call_of_the_system_commits_nothing_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    for overwrite, every in ((False, 1), (True, 1 if is_night() else 3)):
        k, end = 1 - every, "some"
        while end:
            k += every
            folder = tmp_path / f"{overwrite} {k}"

            def stopping(stop: Callable[[], None], folder: Path = folder, k: int = k) -> Storage:
                real, left = getattr(os, call), itertools.count(k - 1, -1)

                def counted(*args: Any, **more: Any) -> Any:
                    if next(left) == 0:
                        stop()
                    return real(*args, **more)

                monkeypatch.setattr(os, call, counted)
                return LocalStorage(folder, durability="power" if call == "fsync" else "process")

            place = LocalStorage(folder, durability="process")
            end = overtaken(place, stopping, overwrite=overwrite)
            monkeypatch.undo()
            assert k < MANY


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_newer_run_is_not_harmed_by_an_older_one_that_saves_meanwhile(overwrite: bool) -> None:
    k = 0
    reported: list[ReknitError | None] = [None]
    while reported:
        k, reported = k + 1, []
        place = Annals("newer")

        def older(place: Annals = place, reported: list[ReknitError | None] = reported) -> None:
            reported.append(save_as(place, 1, 1, overwrite=overwrite))

        error = save_as(pausing(place, [k], older), 2, 2, overwrite=overwrite)
        if error is None:
            assert value_in(place) == 2
            assert reported == [] or place.commits in ([Commit(1, 1), Commit(2, 2)], [Commit(2, 2)])
        else:
            assert isinstance(error, CheckpointExistsError)
            assert (reported, value_in(place), overwrite) == ([None], 1, False)
        assert strays(place) == set()
    assert k > 10


def played(
    place: Annals,
    generations: list[int],
    choose: Callable[[list[int]], int],
    *,
    overwrite: bool,
    before: int | None = None,
) -> None:
    """Let runs 1, 2, ... of these generations save at once, and check the commits and errors of all.

    `choose` picks the run that does the next operation, and the checks hold for any order.  Of two runs that
    fence each other off none commits, and the value `before` stays.
    """
    stage, errors = Stage(), dict[int, ReknitError | None]()

    def enter(number: int) -> None:
        def run(wait: Callable[[], None]) -> None:
            store = pausing(place, range(1, MANY), wait)
            errors[number] = save_as(store, number, generations[number - 1], overwrite=overwrite)

        stage.enter(run)

    for number in range(1, len(generations) + 1):
        enter(number)
    stage.play(choose)
    committed = [commit.value for commit in place.commits]
    assert [c.generation for c in place.commits] == sorted(c.generation or 0 for c in place.commits)
    assert value_in(place) == (committed[-1] if committed else before)
    for number, error in errors.items():
        assert (number in committed) == (error is None), (number, error)
        if isinstance(error, StorageError):
            assert "removed" in error.message
        else:
            # The run that removed the marker may be over by now, and then the error cannot name it.
            assert error is None or isinstance(error, (CommitError, CheckpointExistsError))
    newest = [number for number, generation in enumerate(generations, 1) if generation == max(generations)]
    if overwrite and len(newest) == 1:
        assert errors[newest[0]] is None, "nobody stops the newest"
    assert save_as(place, 9, 9) is None
    assert (value_in(place), strays(place)) == (9, set())


def in_stretches(*stretches: tuple[int, int]) -> Callable[[list[int]], int]:
    """Return a choice by a list of (run, number of operations), after which the runs end one by one."""
    script = [number for number, count in stretches for _ in range(count)]

    def choose(waiting: list[int]) -> int:
        while script and script[0] not in waiting:
            script.pop(0)
        return script.pop(0) if script else waiting[0]

    return choose


SAVE = 16
"""Roughly the number of operations of a save."""
BEGIN = 4
"""Roughly the number of operations until a save has begun."""


@pytest.mark.parametrize(("overwrite", "step"), [(False, 3), (True, 1)])
def test_an_old_run_that_goes_on_in_the_middle_of_a_newer_ones_save_changes_nothing(
    overwrite: bool, step: int
) -> None:
    for old, new in thinned(itertools.product(range(1, SAVE, step), range(1, SAVE, 2)), 3):
        place = Annals("middle")
        if overwrite:
            assert save_as(place, 0, 0) is None
            place.commits.clear()
        played(place, [1, 2], in_stretches((0, old), (1, new), (0, MANY)), overwrite=overwrite)


def test_two_runs_that_begin_in_turns_do_not_both_believe_to_be_alone() -> None:
    beginnings = itertools.product(range(1, BEGIN), repeat=3)
    for (old, new, more), rest in thinned(
        itertools.product(beginnings, (SAVE - 5, SAVE - 4, SAVE - 3, MANY)), 3
    ):
        turns = in_stretches((0, old), (1, new), (0, more), (1, rest), (0, MANY))
        played(Annals("turns"), [1, 2], turns, overwrite=True)


@pytest.mark.parametrize("lost", [(), (Fault("lost", 1, "commit"),)])
def test_two_saves_of_one_generation_leave_one_whole_checkpoint(lost: tuple[Fault, ...]) -> None:
    for k in range(1, 30):
        place, seen = Annals("equal"), list[ReknitError | None]()

        def other(place: Annals = place, seen: list[ReknitError | None] = seen) -> None:
            seen.append(save_as(place, 2, 1))

        assert save_as(place, 0, 1) is None
        error = save_as(pausing(place, [k], other, *lost), 1, 1)
        assert seen in ([], [None])
        if not seen:
            assert error is None
        assert value_in(place) == place.commits[-1].value
        assert error is None or isinstance(error, (FencedError, StorageError))
        assert save_as(place, 3, 1) is None
        assert (value_in(place), strays(place)) == (3, set())


_generations = st.lists(st.integers(1, 3), min_size=2, max_size=3)
_stretches = st.lists(st.tuples(st.integers(0, 2), st.integers(1, SAVE)), max_size=12)


@settings(max_examples=examples(40))
@given(_generations, _stretches, st.booleans(), st.booleans())
def test_runs_that_save_at_once_in_any_order_leave_the_newest_that_committed(
    generations: list[int], stretches: list[tuple[int, int]], overwrite: bool, after_another: bool
) -> None:
    place, before = Annals("play"), 0 if overwrite and after_another else None
    if before is not None:
        assert save_as(place, before, 0) is None
        place.commits.clear()
    played(place, generations, in_stretches(*stretches), overwrite=overwrite, before=before)
