"""A committed checkpoint copied to another store and committed there: by all its ranks, and by one alone."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from msgspec import structs

import reknit
from reknit.comm.tree.thread_group import thread_groups
from reknit.engine.reports import PromotionReport
from reknit.engine.stored.promote import Promotion, promote, promote_alone
from reknit.engine.stored.verify import verify
from reknit.errors import (
    CheckpointNotFoundError,
    CommitError,
    CorruptError,
    DeadlineError,
    FencedError,
    ReknitError,
    StorageError,
    StorageFullError,
    UsageError,
)
from reknit.events.phase import Recorder
from reknit.format.manifest_file import decode_manifest, encode_manifest
from reknit.format.paths import MANIFEST_PATH
from reknit.options import LoadOptions, SaveOptions
from reknit.storage.local.store import LocalStorage
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.testing.world import run_ranks
from reknit.types.box import Box
from reknit.types.manifest import FileEntry
from reknit.types.shard import Blob, Holdings, Shard, TensorSpec
from tests.at_operation import AtOperation
from tests.engine.held import save_held, task_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from reknit.comm.group import Group
    from reknit.engine.memory.write import Written
    from reknit.storage.base import Storage
    from reknit.types.manifest import Manifest

    Target = Callable[[int], Storage]

SIZE = 3
ROWS = 9 << 18
"""Rows of rank 1's tensor: 9 MiB, more than a piece; rank 0 has a small tensor, and rank 2 writes nothing."""
OPTIONS = SaveOptions(threads=2, timeout_s=30.0, durability="process")
LARGE, SMALL = 1, 0


class Saved(NamedTuple):
    """A checkpoint of three ranks, and the files that each of them wrote."""

    root: Path
    write_id: str
    written: list[list[Written]]

    @property
    def storage(self) -> Storage:
        return local(self.root)

    def path(self, rank: int) -> Path:
        """Return the data file of a rank."""
        return self.root / next(file.path for file in self.written[rank] if "safetensors" in file.path)


def local(root: Path) -> LocalStorage:
    return LocalStorage(str(root), durability="process")


def holdings(rank: int, value: int) -> Holdings:
    shards: tuple[Shard, ...] = ()
    if rank < 2:
        spec = TensorSpec((ROWS if rank == LARGE else 1000,), "float32")
        data = np.arange(spec.shape[0], dtype=np.float32) + value
        shards = (Shard("model", f"w{rank}", spec, Box.whole(spec.shape), (rank,), data),)
    blobs = [Blob("extra", "epoch", value)]
    if rank == LARGE:
        blobs.append(Blob("extra", "own", value, {"dp": rank}))
    return Holdings(("model", "extra"), shards, tuple(blobs))


def saved(root: Path, value: int = 1, generation: int = 1, *, overwrite: bool = False) -> Saved:
    def run(group: Group) -> tuple[str, list[Written]]:
        task = task_at(local(root), group, OPTIONS, step=value, overwrite=overwrite)
        here = save_held(lambda: holdings(group.rank, value), task)
        return here.write_id, here.written

    reported = run_ranks(SIZE, run, groups=thread_groups(SIZE, generation))
    return Saved(root, reported[0][0], [written for _, written in reported])


@pytest.fixture
def source(tmp_path: Path) -> Saved:
    return saved(tmp_path / "quick")


def promoted(
    source: Saved, target: Target, *, overwrite: bool = False
) -> list[PromotionReport | ReknitError]:
    """Promote on all ranks, and return the report or error of each."""

    def run(group: Group) -> PromotionReport | ReknitError:
        job = Promotion(
            source.storage, target(group.rank), overwrite, OPTIONS, Recorder("promote", group.rank)
        )
        try:
            return promote(job, group, 1, source.write_id, source.written[group.rank])
        except ReknitError as error:
            return error

    return run_ranks(SIZE, run)


def alone(source: Storage, target: Storage, *, overwrite: bool = False) -> PromotionReport:
    return promote_alone(Promotion(source, target, overwrite, OPTIONS, Recorder("promote")))


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def is_whole(root: Path) -> bool:
    return verify(local(root), "data", LoadOptions()).ok


def manifest_of(root: Path) -> Manifest:
    return decode_manifest((root / MANIFEST_PATH).read_bytes())


def assert_same_error(
    reported: Sequence[PromotionReport | ReknitError], kind: type[ReknitError]
) -> ReknitError:
    first = reported[0]
    assert isinstance(first, ReknitError), reported
    for error in reported:
        assert type(error) is kind, reported
        assert (error.message, error.rank, error.path) == (first.message, first.rank, first.path)
    return first


def reports(reported: Iterable[PromotionReport | ReknitError]) -> list[PromotionReport]:
    found = list(reported)
    for report in found:
        if isinstance(report, ReknitError):
            raise report
    return found  # type: ignore[return-value]


def damage(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()
    path.write_bytes(data)


# All ranks together.


def test_every_file_is_at_the_target_byte_for_byte_and_each_rank_tells_what_it_copied(
    source: Saved, tmp_path: Path
) -> None:
    reported = reports(promoted(source, lambda rank: local(tmp_path / "slow")))
    assert content(tmp_path / "slow") == content(source.root)
    assert is_whole(tmp_path / "slow")
    index = next(f for f in manifest_of(source.root).files if f.path.startswith("index"))
    for rank, report in enumerate(reported):
        mine = source.written[rank]
        extra = (1, index.nbytes) if rank == 0 else (0, 0)
        assert report.num_files == len(mine) + extra[0]
        assert report.nbytes == sum(file.nbytes for file in mine) + extra[1]
        assert (report.source, report.path) == (str(source.root), str(tmp_path / "slow"))
        assert (report.step, report.write_id) == (1, source.write_id)
        assert {"claim", "promoted"} <= {record.phase for record in report.phases}
    assert reported[2].num_files == 0, "a rank that wrote nothing takes part"
    assert {"read", "write", "digest"} <= {record.phase for record in reported[LARGE].phases}


@pytest.mark.parametrize(("rank", "operation"), [(SMALL, "create"), (LARGE, "write"), (SMALL, "finish")])
def test_a_target_that_fails_on_one_rank_fails_all_alike_and_leaves_nothing(
    source: Saved, tmp_path: Path, rank: int, operation: str
) -> None:
    before = content(source.root)

    def target(of: int) -> Storage:
        plan = [Fault("full", 1, operation)] if of == rank else []
        return FaultyStorage(local(tmp_path / "slow"), plan=plan)

    error = assert_same_error(promoted(source, target), StorageFullError)
    assert error.rank == rank
    assert content(tmp_path / "slow") == {}
    assert content(source.root) == before
    # A disk with room again.
    reports(promoted(source, lambda rank: local(tmp_path / "slow")))
    assert content(tmp_path / "slow") == before


@pytest.mark.parametrize(
    ("kind", "operation"), [("error", "put"), ("error", "commit"), ("error", "list"), ("timeout", "commit")]
)
def test_a_target_where_the_root_cannot_commit_has_nothing_afterwards(
    source: Saved, tmp_path: Path, operation: str, kind: Any
) -> None:
    def target(of: int) -> Storage:
        plan = [Fault(kind, 1, operation)] if of == 0 else []
        return FaultyStorage(local(tmp_path / "slow"), plan=plan)

    reported = promoted(source, target)
    assert_same_error(reported, StorageError if kind == "error" else DeadlineError)
    left = content(tmp_path / "slow")
    assert MANIFEST_PATH not in left
    if kind == "error":
        assert left == {}
    reports(promoted(source, lambda rank: local(tmp_path / "other")))


def test_a_commit_whose_answer_was_lost_is_a_promotion(source: Saved, tmp_path: Path) -> None:
    for kind in ("lost", "unheard"):
        root = tmp_path / kind

        def target(of: int, root: Path = root, kind: Any = kind) -> Storage:
            return FaultyStorage(local(root), plan=[Fault(kind, 1, "commit")] if of == 0 else [])

        reports(promoted(source, target))
        assert content(root) == content(source.root)


@pytest.mark.parametrize(
    ("rank", "how"), [(SMALL, "flip"), (LARGE, "flip"), (LARGE, "cut"), (SMALL, "unlink")]
)
def test_damage_at_the_source_is_found_and_never_promoted(
    source: Saved, tmp_path: Path, rank: int, how: str
) -> None:
    path = source.path(rank)
    if how == "flip":
        damage(path)
    elif how == "cut":
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    error = assert_same_error(promoted(source, lambda rank: local(tmp_path / "slow")), CorruptError)
    assert error.rank == rank
    assert error.path == str(path)
    assert content(tmp_path / "slow") == {}
    with pytest.raises(CorruptError if how != "unlink" else CommitError, match=path.name):
        alone(source.storage, local(tmp_path / "other"))
    assert MANIFEST_PATH not in content(tmp_path / "other")


def test_what_a_newer_run_committed_at_the_target_is_not_replaced(source: Saved, tmp_path: Path) -> None:
    newer = saved(tmp_path / "slow", 7, generation=2)
    before = content(newer.root)
    assert_same_error(promoted(source, lambda rank: local(newer.root), overwrite=True), FencedError)
    store = FaultyStorage(local(newer.root))
    with pytest.raises(FencedError):
        alone(source.storage, store, overwrite=True)
    assert "create" not in {operation.name for operation in store.operations}, "nothing was copied in vain"
    assert content(newer.root) == before


def test_a_source_that_was_replaced_or_deleted_meanwhile_is_not_promoted(
    source: Saved, tmp_path: Path
) -> None:
    saved(source.root, 2, overwrite=True)
    error = assert_same_error(promoted(source, lambda rank: local(tmp_path / "slow")), CommitError)
    assert error.path == str(source.root)
    (source.root / MANIFEST_PATH).unlink()
    assert_same_error(promoted(source, lambda rank: local(tmp_path / "slow")), CheckpointNotFoundError)
    with pytest.raises(CheckpointNotFoundError):
        alone(source.storage, local(tmp_path / "slow"))
    assert content(tmp_path / "slow") == {}


def test_targets_that_are_not_one_place_are_noticed(source: Saved, tmp_path: Path) -> None:
    reported = promoted(source, lambda rank: local(tmp_path / f"slow{rank}"))
    error = assert_same_error(reported, CommitError)
    assert any(file.path in error.message for file in source.written[LARGE])
    assert all(content(tmp_path / f"slow{rank}") == {} for rank in range(SIZE))


def test_a_place_that_is_the_source_by_another_name_loses_nothing(source: Saved, tmp_path: Path) -> None:
    before = content(source.root)
    (tmp_path / "link").symlink_to(source.root)
    for overwrite in (False, True):
        reported = promoted(source, lambda rank: local(tmp_path / "link"), overwrite=overwrite)
        assert all(isinstance(error, ReknitError) for error in reported)
        assert content(source.root) == before
    alone(source.storage, local(tmp_path / "link"), overwrite=True)
    assert content(source.root) == before


def test_a_save_that_takes_the_target_over_fences_the_promotion_off(source: Saved, tmp_path: Path) -> None:
    root = tmp_path / "slow"
    entered: list[int] = []

    def take_over() -> None:
        entered.append(1)
        saved(root, 9, generation=3)

    def target(rank: int) -> Storage:
        plan = [Fault("stall", 2, "list")] if rank == 0 else []  # when all files are there
        return FaultyStorage(local(root), plan=plan, stall=take_over)

    reported = promoted(source, target)
    assert entered
    assert_same_error(reported, FencedError)
    assert is_whole(root)
    assert manifest_of(root).step == 9
    assert not [name for name in content(root) if source.write_id[:8] in name]


@pytest.mark.parametrize("block_nbytes", [4 << 10, 32 << 20])
def test_blocks_of_another_size_are_compared_as_they_are(
    source: Saved, tmp_path: Path, block_nbytes: int
) -> None:
    from reknit.format.checksum import block_digests

    manifest = manifest_of(source.root)
    entries = tuple(
        FileEntry(f.path, f.nbytes, tuple(block_digests((source.root / f.path).read_bytes(), block_nbytes)))
        for f in manifest.files
    )
    manifest = structs.replace(manifest, files=entries, block_nbytes=block_nbytes)
    source.storage.put(MANIFEST_PATH, encode_manifest(manifest), if_absent=False)
    alone(source.storage, local(tmp_path / "slow"))
    assert content(tmp_path / "slow") == content(source.root)
    (tmp_path / "slow" / MANIFEST_PATH).unlink()
    assert alone(source.storage, local(tmp_path / "slow")).num_files == 0
    damage(source.path(LARGE))
    with pytest.raises(CorruptError):
        alone(source.storage, local(tmp_path / "other"))


# One process alone.


def creates(store: FaultyStorage) -> set[str]:
    return {operation.path for operation in store.operations if operation.name == "create"}


def test_alone_it_goes_on_where_a_killed_try_was(source: Saved, tmp_path: Path) -> None:
    root = tmp_path / "slow"
    index = next(path.name for path in source.root.glob("index*"))
    half, garbage = (str(source.path(rank).relative_to(source.root)) for rank in (SMALL, LARGE))
    (root / "model").mkdir(parents=True)
    (root / half).write_bytes((source.root / half).read_bytes()[:100])
    (root / garbage).write_bytes(bytes((source.root / garbage).stat().st_size))
    (root / index).write_bytes((source.root / index).read_bytes())
    store = FaultyStorage(local(root))
    report = alone(source.storage, store)
    assert content(root) == content(source.root)
    assert is_whole(root)
    assert {half, garbage} <= creates(store)
    assert index not in creates(store)
    assert report.num_files == len(creates(store)) == len(manifest_of(root).files) - 1
    again = FaultyStorage(local(root))
    report = alone(source.storage, again)
    assert (report.num_files, report.nbytes) == (0, 0)
    assert {operation.name for operation in again.operations} == {"get"}


def test_a_block_that_is_damaged_in_the_middle_of_what_is_there_is_noticed(
    source: Saved, tmp_path: Path
) -> None:
    root = tmp_path / "slow"
    name = source.path(LARGE).relative_to(source.root)
    (root / "model").mkdir(parents=True)
    (root / name).write_bytes((source.root / name).read_bytes())
    damage(root / name, at=100_000)
    alone(source.storage, local(root))
    assert content(root) == content(source.root)


def test_alone_an_error_at_any_operation_leaves_what_a_next_try_finishes(
    source: Saved, tmp_path: Path
) -> None:
    k, fired, kept = 0, [Fault("error", 1)], 0
    while fired:
        k += 1
        root = tmp_path / str(k)
        store = FaultyStorage(local(root), plan=[Fault("error", k)])
        try:
            alone(source.storage, store)
        except StorageError:
            if MANIFEST_PATH in content(root):
                assert is_whole(root)
            assert not [name for name in content(root) if "pending" in name]
            before = len(content(root))
            again = FaultyStorage(local(root))
            alone(source.storage, again)
            kept += before > 0 and len(creates(again)) < len(manifest_of(root).files)
        fired = store.fired
        assert content(root) == content(source.root)
    assert kept > 3, "files of an earlier try are not copied again"


def split(source: Saved, tmp_path: Path) -> list[Path]:
    """Return two hosts' folders, each with the manifest and half of the files."""
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    for number, (name, data) in enumerate(sorted(content(source.root).items())):
        for host in hosts if name == MANIFEST_PATH else [hosts[number % 2]]:
            (host / name).parent.mkdir(parents=True, exist_ok=True)
            (host / name).write_bytes(data)
    return hosts


def test_of_two_hosts_with_half_of_the_files_the_second_commits(source: Saved, tmp_path: Path) -> None:
    hosts, root = split(source, tmp_path), tmp_path / "slow"
    with pytest.raises(CommitError) as raised:
        alone(local(hosts[0]), local(root))
    missing = content(hosts[1]).keys() - content(hosts[0]).keys()
    assert any(name in raised.value.message for name in missing)
    assert f"and {len(missing) - 1} more of the {len(manifest_of(hosts[0]).files)}" in raised.value.message
    assert "every host" in str(raised.value.remedy)
    assert content(root).keys() == content(hosts[0]).keys() - {MANIFEST_PATH}
    report = alone(local(hosts[1]), local(root))
    assert report.num_files == len(missing)
    assert content(root) == content(source.root)
    assert alone(local(hosts[0]), local(root)).num_files == 0


@pytest.mark.parametrize(("stores", "overwrite"), [("halves", False), ("same", True)])
def test_two_hosts_at_the_same_time_commit_what_is_whole(
    source: Saved, tmp_path: Path, stores: str, overwrite: bool
) -> None:
    hosts = split(source, tmp_path) if stores == "halves" else [source.root, source.root]
    met = threading.Barrier(2)

    class Meets(FaultyStorage):
        """A store in which both promotions reach the commit before either goes on."""

        def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
            met.wait(30)
            return super().put(path, data, if_absent=if_absent)

    def run(group: Group) -> ReknitError | PromotionReport:
        met.wait(30)
        try:
            return alone(local(hosts[group.rank]), local(tmp_path / "slow"), overwrite=overwrite)
        except ReknitError as error:
            return error

    reported = run_ranks(2, run)
    for error in reported:
        assert isinstance(error, (PromotionReport, CommitError, StorageError)), reported
    if MANIFEST_PATH in content(tmp_path / "slow"):
        assert content(tmp_path / "slow") == content(source.root)
    elif stores == "halves":
        assert all(isinstance(error, CommitError) for error in reported), "each was done before the other"
    for host in hosts:
        try:
            alone(local(host), local(tmp_path / "slow"), overwrite=overwrite)
        except CommitError:
            assert host == hosts[0]
    assert content(tmp_path / "slow") == content(source.root)


def test_alone_the_source_is_not_removed_while_it_is_copied(tmp_path: Path) -> None:
    path, number, refused = tmp_path / "source", 0, 0
    reknit.save(path, {"model": {"w": np.arange(10.0)}})

    def remove() -> None:
        nonlocal refused
        with pytest.raises(UsageError, match="reads it"):
            reknit.delete(path)
        refused += 1

    while number == refused:
        number += 1
        target = AtOperation(LocalStorage(tmp_path / f"target {number}"), number + 1, remove)
        source = LocalStorage(path)  # the first operation asks whether there is anything to do
        promote_alone(Promotion(source, target, False, OPTIONS, Recorder("promote", path=target.url)))
        assert reknit.verify(tmp_path / f"target {number}", "data").ok
    assert number > 5
    reknit.delete(path)
    assert not path.exists()
