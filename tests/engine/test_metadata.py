"""Who reads the metadata of a checkpoint, and what each rank of a load gets of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.engine import messages
from reknit.engine.load import LoadJob, load
from reknit.engine.metadata import read_for_all
from reknit.engine.opening import opened, read_opened
from reknit.errors import CorruptError, MismatchError
from reknit.format.manifest_file import decode_manifest
from reknit.frameworks import registry
from reknit.monitor.phase import Recorder
from reknit.options import LoadOptions
from reknit.storage.memory import MemoryStorage
from reknit.testing.faulty_storage import FaultyStorage
from reknit.testing.world import run_ranks
from tests.format.samples import same_index

if TYPE_CHECKING:
    from reknit.comm.base import Group

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


def save_on_ranks(name: str) -> MemoryStorage:
    MemoryStorage.clear(name)

    def rank(group: Group) -> None:
        reknit.save(f"mem://{name}", state(group.rank, 3), group=group).result()

    run_ranks(SIZE, rank)
    return MemoryStorage(name)


def load_on_ranks(
    stored: MemoryStorage, items: tuple[tuple[str, ...], ...], **renaming: Any
) -> tuple[list[FaultyStorage], list[dict[str, Any]], list[dict[str, Any]]]:
    """Load different items on each rank; return what each did to the store, was offered, and got."""
    stores = [FaultyStorage(stored) for _ in items]
    offered: list[dict[str, Any]] = [{} for _ in items]
    targets = [{item: state(rank, 0)[item] for item in names} for rank, names in enumerate(items)]

    def rank(group: Group) -> None:
        def want(catalog: Any) -> Any:
            offered[group.rank].update(tensors=dict(catalog.tensors), blobs=catalog.blobs)
            return registry.wanted(targets[group.rank], catalog, group.rank, group.size)

        options = LoadOptions(lenient=("*",), timeout_s=30, **renaming)
        recorder = Recorder("load", group.rank)
        load(LoadJob(want, group, stores[group.rank], items[group.rank], options, recorder))

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


def own_files(stored: MemoryStorage) -> list[str]:
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


def asking(*items: str) -> messages.Items:
    return messages.Items(list(items), [])


def test_an_answer_holds_just_the_rows_the_files_and_the_values_of_the_items_asked_for() -> None:
    stored = save_on_ranks("answers")
    whole = opened(stored, read_opened(stored, None), None, allow_pickle=False)
    asked = [asking("model"), asking("extra", "optimizer"), asking("mine"), asking(*ITEMS)]
    metadata = read_for_all(stored, asked)
    for rank, answer in zip(asked, metadata.answers, strict=True):
        part = opened(stored, messages.decode(answer, messages.Opened), rank.names, allow_pickle=False)
        items = set(rank.names)
        assert same_index(part.index, whole.index.of_items(items))
        assert {entry.item for entry in part.index.tensors} <= items
        assert {path.split("/")[0] for path in part.files} - {whole.manifest.index_path} <= items
        assert all(part.files[path] == whole.files[path] for path in part.files)
        assert {item for item, values in part.blobs.items() if values} <= items
        assert part.manifest.items == whole.manifest.items
        assert len(part.catalog().coordinates.get("mine", ())) == (SIZE if "mine" in items else 0)


def test_ranks_that_ask_for_the_same_get_the_same_bytes() -> None:
    stored = save_on_ranks("same")
    asked = [asking("model", "extra"), asking("model"), asking("extra", "model"), asking("model")]
    first, second, third, fourth = read_for_all(stored, asked).answers
    assert first is third
    assert second is fourth
    assert len(second) < len(first)
    (everything,) = read_for_all(stored, [asking(*ITEMS)]).answers
    assert messages.decode(everything, messages.Opened) == read_opened(stored, None)


def test_the_root_keeps_what_some_rank_wants() -> None:
    stored = save_on_ranks("kept")
    checkpoint = read_for_all(stored, [asking("model"), asking("extra")]).checkpoint
    assert checkpoint.items == ("model", "extra")
    assert {entry.item for entry in checkpoint.index.tensors} == {"model"}
    assert checkpoint.of_items(["extra"]).index.tensors == ()


def test_an_item_that_is_not_there_is_refused_unless_every_rank_that_wants_it_can_do_without() -> None:
    stored = save_on_ranks("absent")
    with pytest.raises(MismatchError, match="has no item 'ema'"):
        read_for_all(stored, [asking("model"), asking("ema")])
    lenient = messages.Items(["model", "ema"], ["ema"])
    (answer,) = read_for_all(stored, [lenient]).answers
    part = opened(stored, messages.decode(answer, messages.Opened), lenient.names, allow_pickle=False)
    assert part.catalog().tensors["ema"] == {}


def test_a_rank_refuses_an_index_that_names_a_file_of_no_entry() -> None:
    stored = save_on_ranks("checked")
    model, optimizer = read_for_all(stored, [asking("model"), asking("optimizer")]).answers
    other = messages.decode(optimizer, messages.Opened).manifest
    mixed = messages.Opened(other, messages.decode(model, messages.Opened).index, {})
    with pytest.raises(CorruptError, match="no file of the checkpoint"):
        opened(stored, mixed, ["model"], allow_pickle=False)


def test_names_left_over_are_those_that_no_rank_took_whatever_items_the_others_have() -> None:
    everything = [("a", "x"), ("a", "y"), ("b", "x"), ("c", "z")]
    first = messages.bitmaps(everything[:2], {("a", "y")})
    second = messages.bitmaps(everything[2:3], {("b", "x"), ("a", "x")})
    assert messages.left_over(everything, [first, second]) == [("a", "x"), ("c", "z")]
    assert messages.left_over(everything, []) == everything
