from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.comm.tree.thread_group import thread_groups
from reknit.engine import messages
from reknit.engine.memory.write import Written, write_bytes
from reknit.engine.saving import coordinator as module
from reknit.engine.saving.coordinator import Coordinator, receipt
from reknit.engine.saving.layout import PLANS_KEPT, FileCut, layout_digest, outline
from reknit.engine.saving.packing import Sections, claims, merge_claims, merge_receipts
from reknit.engine.saving.part import EQUAL, CopySplit, encode_holdings
from reknit.engine.stored.manifest_content import receipts_to_manifest
from reknit.errors import CommitError, CorruptError, ProtocolError
from reknit.format import file_table, paths
from reknit.format.checksum import BLOCK_NBYTES
from reknit.format.index import decode_index
from reknit.format.manifest_file import decode_manifest
from reknit.options import SaveOptions
from reknit.planner.assemble import assemble
from reknit.planner.columns import packed, unpacked
from reknit.types.box import Box
from reknit.types.shard import Holdings, Shard, TensorSpec
from tests.engine.held import task_at
from tests.running.cases import one_by_one
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from reknit.engine.saving.layout import Outline
    from reknit.planner.columns import RankColumns
    from reknit.storage.base import Storage
    from reknit.types.manifest import FileEntry, Index, Manifest

SIZE = 5
CUT = FileCut(1 << 40)


def rows(rank: int, name: str, length: int = 2) -> Shard:
    """Return a rank's rows of a matrix."""
    box = Box((length * rank, 0), (length, 3))
    return Shard("m", name, TensorSpec((length * SIZE, 3), "uint8"), box, (rank,), np.full((2, 3), rank))


def copy(name: str, length: int = 100) -> Shard:
    """Return a tensor whose replica set no framework has given."""
    return Shard("m", name, TensorSpec((length,), "uint8"), Box((0,), (length,)), None, np.zeros(length))


class Rank:
    """The agent of one rank: it keeps its plans, and sends only new ones to the root."""

    def __init__(self, rank: int, storage: Storage) -> None:
        group = thread_groups(SIZE)[rank]
        self.task = task_at(storage, group, SaveOptions(), step=1, overwrite=True)
        self.rank = rank
        self.plans: dict[bytes, Outline] = {}
        self.silent = True
        self.split = EQUAL

    def claims(self, write_id: str, step: int, shards: Sequence[Shard]) -> Sections:
        self.encoded = encode_holdings(Holdings(("m",), tuple(shards), ()), SaveOptions())
        self.plan = layout_digest(self.encoded.holdings, CUT)
        self.known = self.silent and self.plan in self.plans
        reported = None if self.known else self.encoded.shard_claims()
        return claims(self.rank, messages.RankClaims(write_id, step, self.plan, reported, []))

    def receipt(self, write_id: str, answer: messages.Assignment) -> Sections:
        owners = unpacked(answer.shard_owners, "i8")
        if not self.known:
            self.plans[self.plan] = outline(self.encoded.resolved(owners), self.rank, CUT)
        planned = self.plans[self.plan]
        written: list[Written] = []
        for file in planned.files:
            path = paths.data_path(file.plan.item, self.rank, write_id, file.plan.part)
            written.append(write_bytes(self.task.storage, path, bytes(file.nbytes)))
        columns = None if self.known else planned.columns
        return receipt(
            self.task, ["m"], written, plan=self.plan, columns=columns, places=(), copies=self.split
        )


class World:
    """All ranks of a job and their root, without a network: messages are merged as in a tree."""

    def __init__(self, name: str) -> None:
        ProcessMemory.clear(name)
        self.ranks = [Rank(rank, ProcessMemory(name)) for rank in range(SIZE)]
        self.task = self.ranks[0].task
        self.coordinator = Coordinator()

    def up(self, requests: list[Sections], merge: Callable[[Sequence[Sections]], Sections]) -> list[Sections]:
        sent = Sections.unpack([request.pack() for request in requests])
        return [merge([merge(sent[1:]), sent[0]])]

    def save(self, holdings: Callable[[int], Sequence[Shard]]) -> tuple[Manifest, Index]:
        write_id = paths.new_write_id()
        requests = [rank.claims(write_id, 1, holdings(rank.rank)) for rank in self.ranks]
        answers = self.coordinator.assign(self.task, self.up(requests, merge_claims))
        assert len(answers) == SIZE
        receipts = [rank.receipt(write_id, answer) for rank, answer in zip(self.ranks, answers, strict=True)]
        self.coordinator.commit(self.task, self.up(receipts, merge_receipts))
        manifest = decode_manifest(self.task.storage.get(paths.MANIFEST_PATH, limit=1 << 20))
        assert manifest.write_id == write_id
        return manifest, decode_index(self.task.storage.get(manifest.index_path, limit=1 << 20))


def form(index: Index) -> list[Any]:
    """Return the content of an index, without the write ids in the names of its files."""
    ranks = [(name.item, name.rank, name.part) for name in map(paths.parse_path, index.files) if name]
    columns = (index.tensor, index.offsets, index.lengths, index.file, index.start, index.nbytes)
    return [index.tensors, ranks, *(column.tolist() for column in columns)]


def entry(file: FileEntry) -> tuple[str, int, tuple[int, ...]]:
    return file.path, file.nbytes, file.digests


@pytest.fixture
def assembled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of ranks of each index that is assembled."""
    counts: list[int] = []

    def counting(chunks: RankColumns) -> tuple[Index, list[str]]:
        counts.append(len(chunks.ranks))
        return assemble(chunks)

    monkeypatch.setattr(module, "assemble", counting)
    return counts


def test_a_save_by_known_plans_has_the_index_of_the_save_before_under_new_names(assembled: list[int]) -> None:
    world = World("known")
    manifest, index = world.save(lambda rank: [rows(rank, "a"), copy("norm")])
    again, same = world.save(lambda rank: [rows(rank, "a"), copy("norm")])
    assert all(rank.known for rank in world.ranks)
    assert form(same) == form(index)
    assert len(index.tensors) == 2
    assert all(paths.short_id(again.write_id) in path for path in same.files)
    assert {file.path for file in again.files}.isdisjoint(file.path for file in manifest.files)
    assert assembled == [SIZE]


def test_only_the_rows_of_ranks_that_changed_are_told_anew(assembled: list[int]) -> None:
    def changed(rank: int) -> list[Shard]:
        return [rows(rank, "a"), *([own] if rank == 3 else [])]

    spec = TensorSpec((4,), "uint8")
    own = Shard("m", "own", spec, Box((0,), (4,)), (3,), np.zeros(4))
    world, other = World("rows"), World("rows-fresh")
    world.save(lambda rank: [rows(rank, "a")])
    _, index = world.save(changed)
    assert [rank.known for rank in world.ranks] == [rank != 3 for rank in range(SIZE)]
    assert form(index) == form(other.save(changed)[1])
    # With the first plan of rank 3 again, which the root still has, the first index results.
    _, index = world.save(lambda rank: [rows(rank, "a")])
    assert all(rank.known for rank in world.ranks)
    assert form(index) == form(other.save(lambda rank: [rows(rank, "a")])[1])
    assert assembled == [SIZE, SIZE, SIZE, SIZE]  # two for each world


def test_a_plan_that_the_root_does_not_know_is_named() -> None:
    world = World("unknown")
    world.save(lambda rank: [rows(rank, "a")])
    world.coordinator = Coordinator()
    world.ranks[0].plans.clear()
    with pytest.raises(CommitError, match="rank 1 refers to a plan that the root does not have"):
        world.save(lambda rank: [rows(rank, "a")])


def test_a_plan_that_has_become_wrong_because_another_rank_changed_is_refused() -> None:
    world = World("stale")
    world.save(lambda rank: [rows(rank, "a"), copy("norm")])
    holders = [rank for rank in range(SIZE) if rank != 0]
    with pytest.raises(CommitError, match=r"rank 0 now holds other tensors .* rank [1-4] made then"):
        world.save(lambda rank: [rows(rank, "a"), *([copy("norm")] if rank in holders else [])])


def test_plans_that_fit_each_by_itself_but_not_together_are_refused() -> None:
    world = World("apart")

    def only(*holders: int) -> Callable[[int], list[Shard]]:
        return lambda rank: [rows(rank, "a"), *([copy("norm")] if rank in holders else [])]

    world.save(only(0, 1))
    world.save(only(2, 3))
    with pytest.raises(CommitError, match=r"rank \d now holds other tensors"):
        world.save(only(0, 1, 2, 3))


def test_ranks_at_different_saves_are_told_where_they_are() -> None:
    world = World("astray")
    write_id = paths.new_write_id()
    requests = [rank.claims(write_id, 7 + (rank.rank == 2), [rows(rank.rank, "a")]) for rank in world.ranks]
    with pytest.raises(ProtocolError, match="rank 2 is at another save than rank 0: it saves step 8, rank 0"):
        world.coordinator.assign(world.task, [merge_claims(requests)])


def test_all_ranks_are_told_which_copies_differ_and_who_holds_them() -> None:
    world = World("copies")
    write_id = paths.new_write_id()
    reported = []
    for rank in range(SIZE):
        digests = packed([7, rank == 3], "u8")
        copies = messages.Copies(packed([1, 1 << 63], "u8"), digests, b"", b"")
        none = encode_holdings(Holdings((), (), ()), SaveOptions()).shard_claims()
        reported.append(claims(rank, messages.RankClaims(write_id, 1, b"", none, [], copies)))
    answers = world.coordinator.assign(world.task, world.up(reported, merge_claims))
    for answer in answers:
        assert answer.differing == [(-1 << 63, [0, 1, 2, 3, 4])]


def test_a_tensor_that_ranks_keep_as_their_own_has_no_chunks_and_is_told() -> None:
    world = World("kept")
    world.save(lambda rank: [rows(rank, "a"), copy("b")])
    for rank in world.ranks:
        rank.split = CopySplit([], [("m", "b", "0, 1")], [])
    _, index = world.save(lambda rank: [rows(rank, "a"), copy("b")])
    assert [entry.fqn for entry in index.tensors] == ["a"]
    assert index.tensor.tolist() == [0] * SIZE
    for rank in world.ranks:
        rank.split = EQUAL
    _, index = world.save(lambda rank: [rows(rank, "a"), copy("b")])
    assert [entry.fqn for entry in index.tensors] == ["a", "b"]


def test_copies_that_differ_are_warned_of_with_the_ranks_that_hold_them() -> None:
    world = World("reported")
    write_id = paths.new_write_id()
    reported = []
    for rank in world.ranks:
        kept = [("m", "kept", "0, 2"), ("m", "both", "0, 1")]
        copies = CopySplit([], kept, [("m", "lost", "0, 3")] + [("m", "both", "0, 1")] * (rank.rank == 2))
        reported.append(receipt(rank.task, ["m"], [], plan=b"", columns=None, places=(), copies=copies))
    counted = receipts_to_manifest(merge_receipts(reported).of_ranks, write_id)
    assert counted.kept == {("m", "kept")}
    own, lost = counted.warnings
    assert "different values of m/kept (ranks 0, 2), m/both (ranks 0, 1); each rank's copy was stored" in own
    assert "different values of m/lost (ranks 0, 3), m/both (ranks 0, 1); one rank's copy was stored" in lost


def test_what_is_kept_does_not_grow_with_the_layouts_that_were_saved() -> None:
    world = World("bounded")
    for number in range(3 * PLANS_KEPT):
        world.save(lambda rank: [rows(rank, f"t{number}")])  # noqa: B023 (called at once)
    known = world.coordinator.chunks
    assert sum(len(slot.lists["nbytes"].flat()) for slot in known.slots) == PLANS_KEPT * SIZE
    assert sorted(name for slot in known.slots for _, name, _, _ in slot.tables["tensors"]) == sorted(
        f"t{number}" for number in range(2 * PLANS_KEPT, 3 * PLANS_KEPT)
    )
    assert len(world.coordinator.indexes) <= module.INDEXES_KEPT


def test_a_file_that_the_root_does_not_see_is_named_with_who_wrote_it() -> None:
    world = World("unseen")
    elsewhere = ProcessMemory("unseen-elsewhere")
    ProcessMemory.clear("unseen-elsewhere")
    world.ranks[2].task.storage = elsewhere
    with pytest.raises(
        CommitError, match=r"rank 2 wrote m/00002\..* to process://unseen-elsewhere, and rank 0"
    ):
        world.save(lambda rank: [rows(rank, "a")])


def test_a_file_that_has_another_size_by_the_commit_is_named_with_who_wrote_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World("cut")
    storage, receipt = world.task.storage, world.ranks[2].receipt

    def cut_short(write_id: str, answer: messages.Assignment) -> Sections:
        reported = receipt(write_id, answer)
        storage.put(paths.data_path("m", 2, write_id), b"x", if_absent=False)
        return reported

    monkeypatch.setattr(world.ranks[2], "receipt", cut_short)
    with pytest.raises(CommitError, match=r"rank 2 wrote m/00002\..*, and rank 0 does not find it"):
        world.save(lambda rank: [rows(rank, "a")])


def test_the_tally_has_every_file_with_its_digests_and_coordinates() -> None:
    world = World("tally")
    write_id = paths.new_write_id()
    reported: list[Sections] = []
    files: list[tuple[str, int, tuple[int, ...], int]] = []
    blobs: list[tuple[str, dict[str, int] | None]] = []
    for rank in world.ranks:
        place = {"dp": rank.rank // 2, "a": -7}
        names = [
            paths.data_path("m/ü", rank.rank, write_id, 1),
            paths.blob_path("x", rank.rank, write_id),
            paths.blob_path("x", rank.rank, write_id, own=0),
            paths.blob_path("y", rank.rank, write_id, own=1),
        ]
        written = [write_bytes(world.task.storage, name, name.encode() * 3) for name in names]
        places = [place, {"rank": rank.rank}]
        reported.append(
            receipt(
                rank.task, ["m/ü", "x", "y"], written, plan=b"", columns=None, places=places, copies=EQUAL
            )
        )
        files += [(file.path, file.nbytes, tuple(file.digests.tolist()), rank.rank) for file in written]
        blobs += [(names[1], None), (names[2], place), (names[3], {"rank": rank.rank})]
    got = receipts_to_manifest(merge_receipts(reported).of_ranks, write_id)
    assert got.items == ("m/ü", "x", "y")
    listed = map(entry, file_table.entries(got.files, BLOCK_NBYTES))
    assert files == [(*file, rank) for file, rank in zip(listed, got.ranks.tolist(), strict=True)]
    values = file_table.blobs(got.files, got.items)
    assert [(blob.path, blob.coordinate) for blob in values] == blobs
    assert got.urls == ["process://tally"] * SIZE
    assert len(got.warnings) == 2
    assert all("of x under one coordinate" in warning for warning in got.warnings)


def test_a_rank_that_reports_more_or_fewer_digests_than_blocks_is_named() -> None:
    for num_digests in one_by_one([0, 2]):
        rank, write_id = World("digests").ranks[2], paths.new_write_id()
        digests = np.zeros(num_digests, np.uint64)
        written = [Written(paths.data_path("m", 2, write_id), 5, digests)]
        reported = receipt(rank.task, ["m"], written, plan=b"", columns=None, places=(), copies=EQUAL)
        with pytest.raises(ProtocolError, match="rank 2 reports a file with more or fewer digests"):
            receipts_to_manifest(reported.of_ranks, write_id)


def test_what_is_assembled_is_checked_as_a_reader_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(index: Index) -> None:
        raise CorruptError(f"{len(index.tensors)} tensors are not sound")

    monkeypatch.setattr(module, "check_index", refuse)
    with pytest.raises(CorruptError, match="2 tensors are not sound"):
        reknit.save(tmp_path / "c", {"m": {"a": np.zeros(3), "b": np.ones(2)}})
    assert not list(tmp_path.rglob("*.safetensors")), "and nothing is left"


def test_ranks_at_different_saves_of_one_step_are_told_so_too() -> None:
    world = World("astray-too")
    first = paths.new_write_id()
    write_ids = [paths.new_write_id() if rank == 3 else first for rank in range(SIZE)]
    requests = [
        rank.claims(write_id, 7, [rows(rank.rank, "a")])
        for rank, write_id in zip(world.ranks, write_ids, strict=True)
    ]
    with pytest.raises(ProtocolError, match="rank 3 is at another save than rank 0"):
        world.coordinator.assign(world.task, [merge_claims(requests)])
