"""Storage that fails at each operation of one rank in turn: all ranks agree, nothing committed is lost."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reknit.comm.group import SoloGroup
from reknit.engine.stored.verify import verify
from reknit.errors import (
    CheckpointNotFoundError,
    CommError,
    CommitError,
    DeadlineError,
    ReknitError,
    StorageError,
    StorageFullError,
)
from reknit.format.paths import parse_path
from reknit.options import LoadOptions, SaveOptions
from reknit.storage.local.store import LocalStorage
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.testing.world import run_ranks
from reknit.types.box import Box
from reknit.types.shard import Blob, Holdings, Shard, TensorSpec
from reknit.types.wanted import Wanted
from tests.running.examples import is_night, some, thinned
from tests.storage.process_memory import ProcessMemory
from tests.world.jobs import load_rank, save_rank

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from reknit.comm.group import Group
    from reknit.engine.reports import LoadReport, SaveReport
    from reknit.storage.base import Storage

SIZE = 3
SPEC = TensorSpec((30, 4), "float64")
SAVE = SaveOptions(threads=1, timeout_s=30)
LOAD = LoadOptions(threads=1, timeout_s=30)
KINDS = {
    "error": StorageError,
    "full": StorageFullError,
    "short": StorageError,
    "lost": StorageError,
    "timeout": DeadlineError,
}
Outcome = Any
"""A report, or the error that a rank raised."""


def whole(value: int) -> np.ndarray[Any, Any]:
    return np.arange(120.0).reshape(30, 4) + 1000 * value


def holdings(rank: int, value: int) -> Holdings:
    """Return a third of a tensor, all of another, a shared value and one of the rank's own."""
    rows = Box((10 * rank, 0), (10, 4))
    shards = (
        Shard("model", "cut", SPEC, rows, (rank,), whole(value)[rows.slices()]),
        Shard("model", "all", SPEC, Box.whole(SPEC.shape), None, whole(value)),
    )
    return Holdings(("model", "extra"), shards, (Blob("extra", "epoch", value), Blob("extra", "own", rank)))


def save_with(stores: list[Storage], value: int, *, overwrite: bool = True) -> list[Outcome]:
    """Save as three ranks, each through its own view of the store."""

    return _outcomes(lambda group: save_value(group, stores[group.rank], value, overwrite=overwrite))


def save_value(group: Group, to: Storage, value: int, *, overwrite: bool) -> SaveReport:
    """Save as one rank."""
    about = {"step": value, "overwrite": overwrite}
    return save_rank(group, to, lambda: holdings(group.rank, value), SAVE, **about)


def load_with(stores: list[Storage], targets: list[np.ndarray[Any, Any]]) -> list[Outcome]:
    """Load the whole tensors as three ranks."""

    return _outcomes(lambda group: load_both(group, stores[group.rank], targets[group.rank]))


def load_both(group: Group, storage: Storage, target: np.ndarray[Any, Any]) -> LoadReport:
    """Load both tensors as one rank."""
    names = ("cut", "all")
    shards = tuple(
        Shard("model", name, SPEC, Box.whole(SPEC.shape), None, target[n]) for n, name in enumerate(names)
    )
    return load_rank(group, storage, lambda _: Wanted(("model",), shards), LOAD)


def _outcomes(action: Any) -> list[Outcome]:
    def caught(group: Group) -> Outcome:
        try:
            return action(group)
        except ReknitError as error:
            return error

    return run_ranks(SIZE, caught)


def value_in(storage: Storage) -> int | None:
    """Return the value of the checkpoint here after a full check, None without a checkpoint."""
    try:
        report = verify(storage, "data", LoadOptions())
    except CheckpointNotFoundError:
        return None
    assert report.ok, report.problems
    target = np.zeros((2, 30, 4))
    value = load_both(SoloGroup(), storage, target).step
    assert value is not None
    assert (target == whole(value)).all()
    return value


def sweep(kind: str, rank: int, healthy: Any) -> Iterator[tuple[Storage, list[Storage], FaultyStorage]]:
    """Yield a store, the ranks' views of it, and the one that fails at its k-th operation.

    At night k is each number, by day each second one.
    The caller runs its action; the sweep ends after the first in which nothing failed.
    """
    k = 1
    while True:
        inner = healthy(k)
        failing = FaultyStorage(inner, plan=[Fault(kind, k)])  # type: ignore[arg-type]
        stores: list[Storage] = [inner] * SIZE
        stores[rank] = failing
        yield inner, stores, failing
        if not failing.fired:
            assert k > 4, "the sweep reached the operations of a rank"
            return
        k += 1 if is_night() else 2


def agreed(outcomes: list[Outcome], kind: str) -> bool:
    """Return whether all ranks succeeded; else all have the same error, of the type that was injected."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, ReknitError)]
    if not errors:
        return True
    assert len(errors) == SIZE, outcomes
    assert len({(type(e), e.message, e.rank, e.phase, e.path) for e in errors}) == 1, errors
    # A file that is not there any more when the root looks for it is reported as such.
    assert isinstance(errors[0], (KINDS[kind], CommitError)), errors
    assert errors[0].rank is not None
    assert errors[0].phase is not None
    assert errors[0].path is not None
    return False


def store(k: int) -> ProcessMemory:
    ProcessMemory.clear(f"faulty-{k}")
    return ProcessMemory(f"faulty-{k}")


def strays(storage: Storage) -> set[str | None]:
    """Return the write ids of all files but the manifest, and notes of removals, which count for a minute."""
    names = [parse_path(listed.path) for listed in storage.list()]
    return {name.write_id8 for name in names if name is not None and name.kind != "removal"} - {None}


@pytest.mark.parametrize(
    ("kind", "overwrite", "rank"), thinned(itertools.product(some(KINDS), (False, True), (0, 2)), 3)
)
def test_a_save_in_which_any_operation_fails_leaves_the_old_checkpoint_or_the_new_one(
    kind: str, overwrite: bool, rank: int
) -> None:
    old = 1 if overwrite else None

    def healthy(k: int) -> Storage:
        storage = store(k)
        assert old is None or agreed(save_with([storage] * SIZE, old), kind)
        return storage

    for storage, stores, failing in sweep(kind, rank, healthy):
        outcomes = save_with(stores, 2, overwrite=overwrite)
        succeeded = agreed(outcomes, kind)
        assert not succeeded or all(outcome.total_nbytes for outcome in outcomes), "the root answered"
        seen = value_in(storage)
        assert seen in (old, 2), failing.operations[-1]
        assert seen == 2 or not succeeded
        if not succeeded and kind in ("error", "full", "short"):
            assert seen == old
            assert len(strays(storage)) == (1 if overwrite else 0), "a failed save left nothing"
        assert agreed(save_with([storage] * SIZE, 3), kind)
        assert value_in(storage) == 3
        assert len(strays(storage)) == 1, "the next save clears away the files of a failed save"


@pytest.mark.parametrize(("kind", "rank"), thinned(itertools.product(some(KINDS), (0, 1)), 3))
def test_a_load_in_which_any_operation_fails_is_an_error_on_all_ranks_and_can_be_repeated(
    kind: str, rank: int
) -> None:
    saved = store(0)
    assert agreed(save_with([saved] * SIZE, 1), kind)
    for storage, stores, _ in sweep(kind, rank, lambda _: saved):
        before = {listed.path for listed in storage.list()}
        targets = [np.zeros((2, 30, 4)) for _ in range(SIZE)]
        if agreed(load_with(stores, targets), kind):
            assert all((target == whole(1)).all() for target in targets)
        assert {listed.path for listed in storage.list()} == before
        assert value_in(storage) == 1


def test_a_manifest_whose_answer_is_lost_is_committed_and_keeps_its_files(tmp_path: Path) -> None:
    inner = LocalStorage(tmp_path)
    assert agreed(save_with([inner] * SIZE, 1), "lost")
    failing = FaultyStorage(inner, plan=[Fault("lost", 1, "commit")])
    outcomes = save_with([failing, inner, inner], 2)
    assert agreed(outcomes, "lost")
    assert value_in(inner) == 2
    written = [o.name for o in failing.operations if o.name in ("put", "commit")]
    assert written[:4] == ["put", "commit", "put", "commit"], "until the store says that it will stay"
    assert written[4:] == ["put"], "the note of the files that it clears away"
    assert len(strays(inner)) == 1


def test_a_manifest_that_the_store_never_vouches_for_is_an_error_and_keeps_its_files(tmp_path: Path) -> None:
    inner = LocalStorage(tmp_path)
    failing = FaultyStorage(inner, plan=[Fault("lost", 1, "commit"), Fault("error", 2, "commit")])
    assert not agreed(save_with([failing, inner, inner], 2, overwrite=False), "lost")
    assert value_in(inner) == 2


def test_an_interrupt_behind_the_commit_takes_nothing_of_the_checkpoint_away(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    inner = LocalStorage(tmp_path)
    assert agreed(save_with([inner] * SIZE, 1), "error")
    failing = FaultyStorage(inner, plan=[Fault("stall", 3, "list")], stall=interrupt)
    stores: list[Storage] = [failing, inner, inner]

    def rank(group: Group) -> str:
        try:
            save_value(group, stores[group.rank], 2, overwrite=True)
        except (ReknitError, KeyboardInterrupt) as error:
            return type(error).__name__
        return "ok"

    assert run_ranks(SIZE, rank) == ["KeyboardInterrupt", "ok", "ok"], "a committed save did not fail"
    assert value_in(inner) == 2


def test_a_rank_whose_files_were_cleared_away_meanwhile_keeps_the_root_from_committing() -> None:
    storage = store(0)
    cleared: list[str] = []

    class Cleared(FaultyStorage):
        """A store from which another save deletes the first file of this one before the root looks."""

        def list(self, prefix: str = "") -> Any:
            if not cleared and any("/00001." in f.path for f in storage.list()):
                cleared.append(min(f.path for f in storage.list() if "/00001." in f.path))
                storage.delete(cleared[0])
            return super().list(prefix)

    root = Cleared(storage)
    outcomes = save_with([root, storage, storage], 1)
    assert {type(outcome) for outcome in outcomes} == {CommitError}
    assert outcomes[0].rank == 1
    assert cleared[0] in outcomes[0].message
    assert not isinstance(outcomes[0], CommError)
    assert list(storage.list()) == []
