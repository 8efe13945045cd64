"""The ranks of a load that read the metadata of a checkpoint, and the part that each rank receives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.comm.group import SoloGroup
from reknit.engine import messages
from reknit.engine.loading.contents import ReceivedMetadata, RootMetadata, hand_out, read_for_all
from reknit.engine.loading.load import load
from reknit.errors import MismatchError
from reknit.format.manifest_file import decode_manifest
from reknit.frameworks import registry
from reknit.options import LoadOptions
from reknit.planner.columns import bitmaps, unpacked
from reknit.testing.faulty_storage import FaultyStorage
from reknit.testing.world import run_ranks
from reknit.transforms import names
from reknit.types.wanted import Wanted
from tests.storage.process_memory import ProcessMemory
from tests.world.jobs import planned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.comm.group import Group
    from reknit.engine.loading.task import LoadTask
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
        store = stores[group.rank]
        load(planned(group, store, want, items[group.rank], options=options, lenient=("*",)))

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


def test_a_rank_is_offered_nothing_of_an_item_that_it_does_not_load() -> None:
    stored = save_on_ranks("parts")
    asked = (("model",), ("model", "optimizer"), ("extra",), ("mine",))
    _, offered, targets = load_on_ranks(stored, asked)
    for items, offer in zip(asked, offered, strict=True):
        assert set(offer["tensors"]) == set(items)
        assert {item for item, values in offer["blobs"].items() if values} <= set(items)
    assert (targets[1]["model"]["w.1"] == 4).all()
    assert targets[1]["optimizer"]["lr"] == targets[2]["extra"]["epoch"] == 3


def asking(*items: str) -> messages.Items:
    return messages.Items(list(items), [])


def task_of(stored: ProcessMemory, items: Sequence[str] = (), **options: Any) -> LoadTask:
    wanted = Wanted(tuple(items))
    return planned(SoloGroup(), stored, lambda _: wanted, items, options=LoadOptions(**options))


def received(stored: ProcessMemory, answer: messages.ItemContents, items: list[str]) -> ReceivedMetadata:
    return ReceivedMetadata.of(answer, task_of(stored, items))


def read_all(stored: ProcessMemory, wanted: Sequence[messages.Items], **options: Any) -> RootMetadata:
    return read_for_all(task_of(stored, **options), wanted)


def test_an_item_that_is_not_there_is_refused_unless_every_rank_that_wants_it_can_do_without() -> None:
    stored = save_on_ranks("absent")
    with pytest.raises(MismatchError, match="has no item 'ema'"):
        read_all(stored, [asking("model"), asking("ema")])
    lenient = messages.Items(["model", "ema"], ["ema"])
    (_, answer) = read_all(stored, [lenient, lenient]).answers
    part = received(stored, answer, lenient.names)
    assert part.checkpoint.catalog().tensors["ema"] == {}


def taking(checkpoint: OpenCheckpoint, names: set[str], boxes: int = 0) -> messages.Asked:
    """Return the request of a rank that takes tensors with these FQNs, and no values."""
    taken = {key for key in checkpoint.index.ids if key[1] in names}
    return messages.Asked(
        bitmaps(checkpoint.index.ids, taken), bitmaps(checkpoint.blob_names(), ()), [], boxes
    )


def test_names_that_no_rank_takes_are_left_unless_a_rank_has_a_use_for_them() -> None:
    stored = save_on_ranks("left")
    checkpoint = read_all(stored, [asking("model", "extra")]).checkpoint
    first, second = taking(checkpoint, {"w.0", "b"}), taking(checkpoint, {"w.1"})
    second.refused.append(("model", "w.3"))
    left = hand_out(checkpoint, [first, second]).left
    assert left == [("model", "w.2"), ("extra", "epoch")]
    second.blobs = bitmaps(checkpoint.blob_names(), {("extra", "epoch")})
    assert hand_out(checkpoint, [first, second]).left == [("model", "w.2")]


def test_an_answer_names_the_ranks_with_its_request_alone() -> None:
    stored = save_on_ranks("alike")
    checkpoint = read_all(stored, [asking("model")]).checkpoint
    wants = [({"b"}, 7), ({"w.0"}, 7), ({"b"}, 1 << 63), ({"w.0"}, 7)]
    asked = [taking(checkpoint, names, boxes) for names, boxes in wants]
    answers = hand_out(checkpoint, asked).answers
    named = [unpacked(answer.alike, "u8").reshape(-1, 2).tolist() for answer in answers]
    assert named == [[[0, 7], [2, 1 << 63]], [[1, 7], [3, 7]]] * 2
    assert answers[1] is answers[3], "encoded once"


def test_only_of_tensors_that_some_rank_takes_must_the_index_be_whole() -> None:
    stored = save_on_ranks("holes")
    checkpoint = read_all(stored, [asking("model")]).checkpoint
    row = int(checkpoint.index.first[checkpoint.index.ids["model", "w.2"]])
    checkpoint.index.lengths[row, 0] -= 1
    assert hand_out(checkpoint, [taking(checkpoint, {"b"})]).damaged == []
    (reported,) = hand_out(checkpoint, [taking(checkpoint, {"b"}), taking(checkpoint, {"w.2"})]).damaged
    assert "the chunks of model/w.2 in the index do not cover it exactly" in reported
