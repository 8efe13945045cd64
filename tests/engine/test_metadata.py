"""The ranks of a load that read the metadata of a checkpoint, and the part that each rank receives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.comm.group import SoloGroup
from reknit.engine import round_messages
from reknit.engine.loading.index_part import Reach
from reknit.engine.loading.load import load
from reknit.engine.loading.load_job import LoadJob
from reknit.engine.loading.match import Fill
from reknit.engine.loading.metadata import ReceivedMetadata, RootMetadata, hand_out, read_for_all
from reknit.engine.packed_columns import bitmaps, left_over, unpacked
from reknit.engine.stored.opening import opened, read_opened
from reknit.errors import MismatchError
from reknit.format.manifest_file import decode_manifest
from reknit.frameworks import registry
from reknit.monitor.phase import Recorder
from reknit.options import LoadOptions
from reknit.testing.faulty_storage import FaultyStorage
from reknit.testing.world import run_ranks
from reknit.transforms import names
from reknit.types.box import Box
from reknit.types.wanted import Wanted
from tests.format.samples import same_index
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.comm.group import Group
    from reknit.engine.stored.opening import OpenCheckpoint

SIZE = 4
ITEMS = ("extra", "mine", "model", "optimizer")


def state(rank: int, value: int) -> dict[str, Any]:
    """Return a state with tensors and shared values in several items, and a value of each rank's own."""
    return {
        "model": {f"w.{rank}": np.full((64, 8), value + rank, np.float32), "b": np.full(5, value)},
        "optimizer": {f"m.{rank}": np.full((64, 8), value, np.float32), "lr": value},
        "extra": {"epoch": value},
        "mine": reknit.PerRank([value, rank]),
    }


def save_on_ranks(name: str) -> ProcessMemory:
    ProcessMemory.clear(name)

    def rank(group: Group) -> None:
        reknit.save(f"process://{name}", state(group.rank, 3), group=group).result()

    run_ranks(SIZE, rank)
    return ProcessMemory(name)


def load_on_ranks(
    stored: ProcessMemory, items: tuple[tuple[str, ...], ...], **renaming: Any
) -> tuple[list[FaultyStorage], list[dict[str, Any]], list[dict[str, Any]]]:
    """Load different items on each rank; return the store, the catalog and the loaded state of each."""
    stores = [FaultyStorage(stored) for _ in items]
    offered: list[dict[str, Any]] = [{} for _ in items]
    targets = [{item: state(rank, 0)[item] for item in names} for rank, names in enumerate(items)]

    def rank(group: Group) -> None:
        def want(catalog: Any) -> Any:
            offered[group.rank].update(tensors=dict(catalog.tensors), blobs=catalog.blobs)
            return registry.wanted(targets[group.rank], catalog, group.rank, group.size)

        options = LoadOptions(timeout_s=30, transforms=[names(**renaming)] if renaming else [])
        recorder = Recorder("load", group.rank)
        load(
            LoadJob(
                want=want,
                group=group,
                storage=stores[group.rank],
                items=items[group.rank],
                options=options,
                recorder=recorder,
                lenient=("*",),
            )
        )

    run_ranks(len(items), rank)
    return stores, offered, targets


def opened_paths(store: FaultyStorage) -> list[str]:
    return [path for name, path in store.operations if name in ("get", "read_into")]


def test_only_the_root_reads_what_all_ranks_need_and_nobody_lists() -> None:
    stored = save_on_ranks("once")
    stores, _, targets = load_on_ranks(stored, (ITEMS,) * SIZE)
    manifest = decode_manifest(stored.get("manifest.json", limit=1 << 20))
    common = {"manifest.json", manifest.index_path}
    common |= {blob.path for blob in manifest.blobs if blob.coordinate is None}
    assert len(common) >= 4
    for path in common:
        assert opened_paths(stores[0]).count(path) == 1
    for store in stores[1:]:
        assert not common & {path for _, path in store.operations}
        assert sum(blob.path in opened_paths(store) for blob in manifest.blobs) == 1, "a rank's own values"
    assert not {"list", "folders"} & {name for store in stores for name, _ in store.operations}
    for rank, target in enumerate(targets):
        assert (target["model"][f"w.{rank}"] == 3 + rank).all()
        assert target["optimizer"]["lr"] == 3
        assert target["mine"].value == [3, rank]


def own_files(stored: ProcessMemory) -> list[str]:
    manifest = decode_manifest(stored.get("manifest.json", limit=1 << 20))
    return [blob.path for blob in manifest.blobs if blob.coordinate is not None]


def test_only_the_root_looks_for_the_names_that_are_to_be_changed() -> None:
    stored = save_on_ranks("named")
    files = own_files(stored)
    stores, _, targets = load_on_ranks(stored, (("model",),) * SIZE, rename={"extra/": "more/"})
    assert [path for path in opened_paths(stores[0]) if path in files] == files[:1]
    for store in stores[1:]:
        assert not {path for _, path in store.operations if path in files}
    assert (targets[2]["model"]["w.2"] == 5).all()


def test_ranks_read_no_values_but_their_own_when_names_change() -> None:
    stored = save_on_ranks("values")
    files = own_files(stored)
    stores, _, targets = load_on_ranks(stored, (ITEMS,) * SIZE, rename={"extra/": "more/"})
    for rank, store in enumerate(stores):
        read = {path for path in opened_paths(store) if path in files}
        assert len(read) == 1, "a rank's own values; the root finds the names in its own"
        assert targets[rank]["mine"].value == [3, rank]


def test_a_rank_is_offered_nothing_of_an_item_that_it_does_not_load() -> None:
    stored = save_on_ranks("parts")
    asked = (("model",), ("model", "optimizer"), ("extra",), ("mine",))
    _, offered, targets = load_on_ranks(stored, asked)
    for items, offer in zip(asked, offered, strict=True):
        assert set(offer["tensors"]) == set(items)
        assert {item for item, values in offer["blobs"].items() if values} <= set(items)
    assert (targets[1]["model"]["w.1"] == 4).all()
    assert targets[1]["optimizer"]["lr"] == targets[2]["extra"]["epoch"] == 3


def asking(*items: str) -> round_messages.Items:
    return round_messages.Items(list(items), [])


def job_of(stored: ProcessMemory, items: Sequence[str] = (), **options: Any) -> LoadJob:
    wanted, recorder = Wanted(tuple(items)), Recorder("load")
    return LoadJob(
        want=lambda _: wanted,
        group=SoloGroup(),
        storage=stored,
        items=tuple(items),
        options=LoadOptions(**options),
        recorder=recorder,
    )


def received(
    stored: ProcessMemory, answer: round_messages.ItemContents, items: list[str]
) -> ReceivedMetadata:
    return ReceivedMetadata.of(answer, job_of(stored, items))


def read_all(stored: ProcessMemory, wanted: Sequence[round_messages.Items], **options: Any) -> RootMetadata:
    return read_for_all(job_of(stored, **options), wanted)


def test_an_answer_holds_just_the_names_the_files_and_the_values_of_the_items_asked_for() -> None:
    stored = save_on_ranks("answers")
    whole = opened(stored, read_opened(stored, None), None, LoadOptions())
    asked = [asking(), asking("model"), asking("extra", "optimizer"), asking("mine"), asking(*ITEMS)]
    metadata = read_all(stored, asked)
    for rank, answer in zip(asked[1:], metadata.answers[1:], strict=True):
        part = received(stored, answer, rank.names)
        items = set(rank.names)
        checkpoint = part.checkpoint
        assert checkpoint.index.tensors == whole.index.of_items(items).tensors
        assert not len(checkpoint.index.tensor), "where tensors lie is another question"
        assert part.files.paths == [f.path for f in whole.manifest.files if is_data(f.path, items)]
        assert {path.split("/")[0] for path in checkpoint.files} - {whole.manifest.index_path} <= items
        assert all(checkpoint.files[path] == whole.files[path] for path in checkpoint.files)
        assert {item for item, values in checkpoint.blobs.items() if values} <= items
        assert checkpoint.manifest.items == whole.manifest.items
        assert len(checkpoint.catalog().coordinates.get("mine", ())) == (SIZE if "mine" in items else 0)


def is_data(path: str, items: set[str]) -> bool:
    return path.endswith(".safetensors") and path.split("/")[0] in items


def test_ranks_that_ask_for_the_same_get_the_same_bytes() -> None:
    stored = save_on_ranks("same")
    asked = [asking("model", "extra"), asking("model"), asking("extra", "model"), asking("model")]
    root, first, second, third = read_all(stored, [asking("extra"), *asked[:1], *asked[2:]]).answers
    assert first is second
    assert len(round_messages.encode(third)) < len(round_messages.encode(second))
    assert root is round_messages.NO_CONTENTS, "the root has its own copy"
    (_, everything) = read_all(stored, [asking(), asking(*ITEMS)]).answers
    assert received(stored, everything, list(ITEMS)).checkpoint.blobs["optimizer"] == {"lr": 3}


def test_the_root_keeps_what_some_rank_wants() -> None:
    stored = save_on_ranks("kept")
    checkpoint = read_all(stored, [asking("model"), asking("extra")]).checkpoint
    assert checkpoint.items == ("model", "extra")
    assert {entry.item for entry in checkpoint.index.tensors} == {"model"}
    assert checkpoint.of_items(["extra"]).index.tensors == ()


def test_an_item_that_is_not_there_is_refused_unless_every_rank_that_wants_it_can_do_without() -> None:
    stored = save_on_ranks("absent")
    with pytest.raises(MismatchError, match="has no item 'ema'"):
        read_all(stored, [asking("model"), asking("ema")])
    lenient = round_messages.Items(["model", "ema"], ["ema"])
    (_, answer) = read_all(stored, [lenient, lenient]).answers
    part = received(stored, answer, lenient.names)
    assert part.checkpoint.catalog().tensors["ema"] == {}


def everything_of(checkpoint: OpenCheckpoint) -> Reach:
    fills = [
        Fill(entry.fqn, number, Box.whole(entry.spec.shape), None, False)
        for number, entry in enumerate(checkpoint.index.tensors)
    ]
    return Reach.of(checkpoint.index, fills, Wanted(checkpoint.items))


def taking(checkpoint: OpenCheckpoint, names: set[str], boxes: int = 0) -> round_messages.Asked:
    """Return the request of a rank that takes tensors with these FQNs, and no values."""
    taken = {key for key in checkpoint.index.ids if key[1] in names}
    return round_messages.Asked(
        bitmaps(checkpoint.index.ids, taken),
        bitmaps(checkpoint.blob_names(), ()),
        [],
        boxes,
    )


def test_what_a_rank_is_handed_are_the_rows_and_the_files_of_the_tensors_that_it_takes() -> None:
    stored = save_on_ranks("rows")
    items = [asking(*ITEMS), asking("model"), asking("optimizer", "model"), asking("optimizer", "model")]
    metadata = read_all(stored, items)
    ranks = [
        received(stored, answer, i.names) for answer, i in zip(metadata.answers[1:], items[1:], strict=True)
    ]
    names = [{"w.0"}, {"w.1", "b"}, {"w.1", "m.2"}, {"w.1", "m.2"}]
    checkpoints = [metadata.checkpoint, *(rank.checkpoint for rank in ranks)]
    asked = [taking(checkpoint, own) for checkpoint, own in zip(checkpoints, names, strict=True)]
    answers = hand_out(metadata.checkpoint, asked).answers
    assert answers[2] is answers[3]
    whole = metadata.checkpoint
    for rank, answer, own in zip(ranks, answers[1:], names[1:], strict=True):
        part = rank.with_rows(rank.checkpoint, everything_of(rank.checkpoint), answer)
        found = {part.index.tensors[number].fqn for number in part.index.tensor.tolist()}
        assert found == own
        for (item, fqn), number in part.index.ids.items():
            if fqn in own:
                assert [*part.index.chunks(number)] == [*whole.index.chunks(whole.index.ids[item, fqn])]
        assert set(part.index.files) == {f.path for f in part.manifest.files if is_data(f.path, set(ITEMS))}
        assert all(part.files[path] == whole.files[path] for path in part.files)
    root = metadata.with_rows(whole, everything_of(whole), answers[0])
    assert same_index(root.index, whole.index), "it takes the rows from its memory"


def test_ranks_that_check_all_files_together_have_the_same_manifest_as_the_root() -> None:
    stored = save_on_ranks("manifest")
    metadata = read_all(stored, [asking("extra"), asking("model")], verify="full")
    rank = received(stored, metadata.answers[1], ["model"])
    asked = [taking(metadata.checkpoint, set()), taking(rank.checkpoint, {"w.1", "b"})]
    answer = hand_out(metadata.checkpoint, asked).answers[1]
    part = rank.with_rows(rank.checkpoint, everything_of(rank.checkpoint), answer)
    assert part.manifest == metadata.checkpoint.manifest


def test_ranks_that_want_the_same_boxes_are_told_of_each_other() -> None:
    stored = save_on_ranks("alike")
    metadata = read_all(stored, [asking("model")] * 5)
    checkpoint = metadata.checkpoint
    asked = [taking(checkpoint, {"b"}, 7), taking(checkpoint, {"b"}, 8), taking(checkpoint, {"w.1"}, 7)]
    for answer in hand_out(checkpoint, [*asked, asked[1], asked[0]]).answers:
        assert unpacked(answer.alike, "i4").tolist() == [0, 1, 2, 1, 0]


def test_names_that_no_rank_takes_are_left_unless_a_rank_has_a_use_for_them() -> None:
    stored = save_on_ranks("left")
    checkpoint = read_all(stored, [asking("model", "extra")]).checkpoint
    first, second = taking(checkpoint, {"w.0", "b"}), taking(checkpoint, {"w.1"})
    second.refused.append(("model", "w.3"))
    left = hand_out(checkpoint, [first, second]).left
    assert left == [("model", "w.2"), ("extra", "epoch")]
    second.blobs = bitmaps(checkpoint.blob_names(), {("extra", "epoch")})
    assert hand_out(checkpoint, [first, second]).left == [("model", "w.2")]


def test_only_of_tensors_that_some_rank_takes_must_the_index_be_whole() -> None:
    stored = save_on_ranks("holes")
    checkpoint = read_all(stored, [asking("model")]).checkpoint
    row = int(checkpoint.index.first[checkpoint.index.ids["model", "w.2"]])
    checkpoint.index.lengths[row, 0] -= 1
    assert hand_out(checkpoint, [taking(checkpoint, {"b"})]).damaged == []
    (reported,) = hand_out(checkpoint, [taking(checkpoint, {"b"}), taking(checkpoint, {"w.2"})]).damaged
    assert "the chunks of model/w.2 in the index do not cover it exactly" in reported


def test_names_left_over_are_those_that_no_rank_took_whatever_items_the_others_have() -> None:
    everything = [("a", "x"), ("a", "y"), ("b", "x"), ("c", "z")]
    first = bitmaps(everything[:2], {("a", "y")})
    second = bitmaps(everything[2:3], {("b", "x"), ("a", "x")})
    assert left_over(everything, [first, second]) == [("a", "x"), ("c", "z")]
    assert left_over(everything, []) == everything
