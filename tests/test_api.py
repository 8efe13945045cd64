"""The public calls in one process: good ones, wrong ones, and the messages of their errors."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit
from reknit.comm.group import SoloGroup
from reknit.engine.memory.write import write_bytes
from reknit.errors import CorruptError
from reknit.format import paths
from reknit.format.checksum import BLOCK_NBYTES, digest
from reknit.format.data_file import HeaderEntry, encode_header, file_metadata
from reknit.format.index import encode_index
from reknit.format.manifest_file import encode_manifest
from reknit.planner.load import Granularity, plan_load
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.types.box import Box
from reknit.types.manifest import FileEntry, Index, Manifest, TensorEntry
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from pathlib import Path

CHUNKS = 70


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Save a checkpoint with two items, and return its path."""
    model = {"w": np.arange(24.0).reshape(2, 3, 4), "b": np.arange(3, dtype=np.int32)}
    reknit.save(
        tmp_path / "run" / "one", {"model": model, "extra": {"epoch": 3}}, step=7, metadata={"by": "me"}
    )
    return tmp_path / "run" / "one"


def target() -> dict[str, Any]:
    return {"model": {"w": np.zeros((2, 3, 4)), "b": np.zeros(3, np.int32)}, "extra": {"epoch": 0}}


def round_trip(path: Path, value: Any, into: Any, **options: Any) -> Any:
    """Save a value, load it into another, and return that."""
    reknit.save(path / "trip", {"item": {"x": value}}, overwrite=True)
    assert reknit.verify(path / "trip", "data").ok
    state = {"item": {"x": into}}
    reknit.load(path / "trip", state, options=reknit.LoadOptions(**options))
    return state["item"]["x"]


# Where?


def test_a_typo_in_the_path_says_which_checkpoints_are_there(path: Path) -> None:
    with pytest.raises(reknit.CheckpointNotFoundError, match=r"did you mean .*run/one\?") as caught:
        reknit.load(path.parent, target())
    assert caught.value.phase == "open"
    assert not path.with_name("none").exists()
    with pytest.raises(reknit.CheckpointNotFoundError, match="none does not exist"):
        reknit.load(path.with_name("none"), target())
    for ask in (reknit.open, reknit.verify):
        with pytest.raises(reknit.CheckpointNotFoundError):
            ask(path.with_name("none"))
    assert not path.with_name("none").exists(), "to look makes no folder"


def test_what_a_save_that_never_committed_left_is_called_that(path: Path) -> None:
    (path / "manifest.json").unlink()
    with pytest.raises(reknit.CheckpointNotFoundError, match="never committed"):
        reknit.load(path, target())


def test_a_file_in_the_place_of_the_folder_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(reknit.StorageError, match="a file is in the place of a folder") as caught:
        reknit.save(tmp_path / "file", {"x": 1})
    assert (caught.value.rank, caught.value.phase) == (0, "assign")
    with pytest.raises(reknit.CheckpointNotFoundError):
        reknit.load(tmp_path / "file", {"x": 1})
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_an_unknown_scheme_makes_no_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("no-such://cluster/x", "nosuch://x"):
        for action in (reknit.save, reknit.load):
            with pytest.raises(reknit.errors.UnknownSchemeError):
                action(url, {"x": 1})
    assert list(tmp_path.iterdir()) == []


def test_odd_folders_beside_checkpoints_are_passed_over(path: Path) -> None:
    for odd in (b"back\\slash", b"a:b", b"\xff\xfe", b".half.tmp", b"new\nline", b"lost+found"):
        os.mkdir(os.path.join(os.fsencode(path.parent), odd))
    assert reknit.latest(path.parent) == str(path)
    with pytest.raises(reknit.CheckpointNotFoundError, match="did you mean"):
        reknit.load(path.parent, target())


# Which is the newest?


def test_the_latest_has_the_highest_step_and_one_without_a_step_comes_before_all(tmp_path: Path) -> None:
    assert reknit.latest(tmp_path) is None
    assert reknit.latest(tmp_path / "missing") is None
    for name, step in (("a", None), ("b", None)):
        reknit.save(tmp_path / name, {"x": 1}, step=step)
    assert reknit.latest(tmp_path) == str(tmp_path / "b"), "the later of two without a step"
    for name, step in (("c", 0), ("d", 9), ("e", 10), ("f", 2)):
        reknit.save(tmp_path / name, {"x": 1}, step=step)
    assert reknit.latest(tmp_path) == str(tmp_path / "e")
    (tmp_path / "e" / "manifest.json").unlink()
    assert reknit.latest(tmp_path) == str(tmp_path / "d")


def test_a_damaged_or_newer_checkpoint_is_passed_over_with_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reknit.save(path.with_name("two"), {"x": 1}, step=8)
    (path.with_name("two") / "manifest.json").write_bytes(b"{}")
    assert reknit.latest(path.parent) == str(path)
    assert "passed over" in caplog.text


def test_a_closed_folder_is_passed_over_and_a_failing_store_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path.parent / "two").mkdir()
    get, fault = LocalStorage.get, reknit.StorageError("no way in")

    def failing(storage: LocalStorage, name: str, *, limit: int) -> bytes:
        if storage.url.endswith("two"):
            raise fault
        return get(storage, name, limit=limit)

    monkeypatch.setattr(LocalStorage, "get", failing)
    with pytest.raises(reknit.StorageError):
        reknit.latest(path.parent)
    fault = reknit.errors.StoragePermissionError("no way in")
    assert reknit.latest(path.parent) == str(path)


# What?


def test_a_state_that_is_no_mapping_of_items_with_proper_names_is_refused(tmp_path: Path) -> None:
    wrong: list[tuple[Any, str]] = [
        *((state, '{"model": model') for state in ([1], None, "state", torch.nn.Linear(1, 1))),
        *(({name: 1}, "item names are non-empty strings") for name in (1, "", None, ("a",))),
    ]
    for state, said in wrong:
        for action in (reknit.save, reknit.load):
            with pytest.raises(reknit.UsageError, match=re.escape(said)):
                action(tmp_path / "x", state)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_no_file_can_have_is_a_state_error_before_anything_is_written(tmp_path: Path) -> None:
    for name in ("\ud800", "a" * 201, "ß" * 101):
        with pytest.raises(reknit.errors.StateError) as caught:
            reknit.save(tmp_path / "x", {"good": np.ones(3), name: np.ones(3)})
        assert caught.value.phase == "collect", name
    with pytest.raises(reknit.errors.StateError):
        reknit.save(tmp_path / "x", {"good": {"\ud800": np.ones(3)}})
    assert list(tmp_path.iterdir()) == []


def test_any_other_name_of_an_item_or_an_entry_is_kept(tmp_path: Path) -> None:
    names = ("a/b", "manifest.json", "index.x.parquet", "..", "Größe", "a\0b", "%", "C:\\x")
    reknit.save(tmp_path / "x", {name: {name: np.ones(3), "v": 1} for name in names})
    state: dict[str, Any] = {name: {name: np.zeros(3), "v": 0} for name in names}
    report = reknit.load(tmp_path / "x", state)
    assert [state[name]["v"] for name in names] == [1] * len(names)
    assert [state[name][name].sum() for name in names] == [3] * len(names)
    assert len(report.restored) == 2 * len(names)
    assert reknit.verify(tmp_path / "x", "data").ok
    assert {p.name for p in tmp_path.iterdir()} == {"x"}


def test_a_step_or_metadata_that_no_manifest_holds_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        *(({"step": step}, "step is a whole number") for step in (-1, 1.5, "3", True, 1 << 63)),
        *(({"metadata": data}, "metadata") for data in ([1], {"a": object()}, {"a": float("nan")}, {1: 2})),
    ]
    for given, said in wrong:
        with pytest.raises(reknit.UsageError, match=said) as caught:
            reknit.save(tmp_path / "x", {"x": 1}, **given)
        assert caught.value.phase in (None, "assign"), f"hours of writing come after it: {given}"
    assert list(tmp_path.iterdir()) == []


def test_step_and_metadata_come_back(tmp_path: Path) -> None:
    metadata = {"run": {"name": "ß", "loss": 0.5, "tags": [1, None, True]}}
    pending = reknit.save(tmp_path / "x", {"x": 1}, step=np.int64(12), metadata=metadata)
    assert pending.result().step == 12
    report = reknit.load(tmp_path / "x", {"x": 0})
    assert (report.step, report.metadata) == (12, metadata)
    with reknit.open(tmp_path / "x") as checkpoint:
        assert (checkpoint.step, checkpoint.metadata) == (12, metadata)
        assert checkpoint.manifest.origin["world_size"] == 1
        # Other tests may have imported more.
        assert set(checkpoint.manifest.origin["versions"]) - {"jax"} == {"reknit", "numpy", "torch"}


def test_a_state_that_is_empty_on_every_rank_is_no_checkpoint(path: Path, tmp_path: Path) -> None:
    for wait in (True, False):
        with pytest.raises(reknit.errors.StateError, match="empty on every rank"):
            reknit.save(tmp_path / "none", {}, wait=wait).result()
    assert not any(file.is_file() for file in (tmp_path / "none").rglob("*"))
    with pytest.raises(reknit.errors.StateError, match="empty on every rank"):
        reknit.save(path, {}, overwrite=True)
    assert reknit.verify(path, "data").ok, "the old checkpoint stays"


def test_empty_items_are_a_checkpoint(tmp_path: Path) -> None:
    reknit.save(tmp_path / "some", {"model": {}, "list": [], "tensor": np.zeros((0, 3))})
    state: dict[str, Any] = {"model": {}, "list": [], "tensor": np.zeros((0, 3))}
    reknit.load(tmp_path / "some", state)
    assert reknit.verify(tmp_path / "some", "data").ok


def test_there_is_no_second_checkpoint_at_a_path_unless_asked_for(path: Path) -> None:
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    with pytest.raises(reknit.CheckpointExistsError, match="overwrite=True"):
        reknit.save(path, {"other": 1})
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before
    reknit.save(path, {"other": 1}, overwrite=True)
    assert reknit.open(path).items == ("other",)
    assert not (path / "model").exists()


# What of it?


def test_named_items_are_loaded_and_the_others_left_alone(path: Path) -> None:
    state = target()
    report = reknit.load(path, state, items=["extra"])
    assert report.restored == ("extra/epoch",)
    assert report.unexpected == ()
    assert report.left == ("model",)
    assert state["extra"]["epoch"] == 3
    assert not state["model"]["w"].any()
    assert reknit.load(path, {"model": state["model"]}).left == ("extra",)
    assert reknit.load(path, state).left == ()
    renamed = reknit.LoadOptions(transforms=[reknit.transforms.names({"model/": "net/"})])
    assert reknit.load(path, {"extra": {"epoch": 0}}, options=renamed).left == ("net",)
    assert state["model"]["w"].sum() == np.arange(24).sum()


def test_items_that_the_state_does_not_have_are_refused(path: Path) -> None:
    for items in ("extra", ["extra", "optimizer"]):
        with pytest.raises(reknit.UsageError, match="items"):
            reknit.load(path, target(), items=items)


def test_an_item_that_the_checkpoint_does_not_have_names_those_that_it_has(path: Path) -> None:
    state = target() | {"ema": {"w": np.ones(2)}, "lr": 0.5}
    with pytest.raises(reknit.MismatchError, match="no item 'ema', 'lr'") as caught:
        reknit.load(path, state)
    assert "'model', 'extra'" in str(caught.value)
    with pytest.raises(reknit.MismatchError, match="no item 'lr'"):
        reknit.load(path, state, strict=["!ema/*"])
    assert not state["model"]["w"].any()


def test_a_lenient_load_puts_up_with_a_whole_item_that_is_missing(path: Path) -> None:
    state = target() | {"ema": {"w": np.ones(2)}, "lr": 0.5}
    report = reknit.load(path, state, strict=False)
    assert set(report.missing) == {"ema/w", "lr"}
    assert (state["lr"], state["ema"]["w"].tolist(), state["extra"]["epoch"]) == (0.5, [1, 1], 3)
    with pytest.raises(reknit.MismatchError, match=r"no tensor[\s\S]*w"):
        reknit.load(path, {"model": {"v": np.ones(4)}}, strict=False)


def test_strict_refuses_before_anything_changes_and_lists_every_problem(path: Path) -> None:
    state = target()
    state["model"] |= {"w": np.zeros((2, 3, 5)), "b": np.zeros(3), "new": np.zeros(1)}
    state["model"]["other"] = state["model"].pop("b")
    state["extra"]["more"] = 1
    with pytest.raises(reknit.MismatchError) as caught:
        reknit.load(path, state)
    message = str(caught.value)
    assert "in 5 places; nothing was changed" in message
    for line in (
        "mismatched: model/w: its shape is [2, 3, 4] in the checkpoint and [2, 3, 5] here",
        "missing: model/new",
        "missing: model/other",
        "missing: extra/more",
        "unexpected: model/b: saved, but no rank wants it",
    ):
        assert line in message
    assert not any(array.any() for array in state["model"].values())
    assert state["extra"] == {"epoch": 0, "more": 1}


def test_a_long_list_of_alike_problems_is_counted(path: Path) -> None:
    state = target()
    state["model"] |= {f"new.{n}": np.zeros(1) for n in range(30)}
    with pytest.raises(reknit.MismatchError) as caught:
        reknit.load(path, state)
    assert caught.value.message.count("missing: ") == 1
    assert "in 30 places" in caught.value.message
    assert "and 27 more: " in caught.value.message


def test_another_dtype_is_refused_unless_it_may_be_converted(path: Path) -> None:
    state = target()
    state["model"]["w"] = np.zeros((2, 3, 4), np.float32)
    with pytest.raises(
        reknit.MismatchError, match=re.escape("saved dtype float64, wanted float32 (LoadOptions(cast")
    ):
        reknit.load(path, state)
    report = reknit.load(path, state, options=reknit.LoadOptions(cast=True))
    assert report.cast == ("model/w",)
    assert (state["model"]["w"] == np.arange(24).reshape(2, 3, 4)).all()


def test_a_tensor_without_dimensions_is_converted_too(tmp_path: Path) -> None:
    for saved in (np.array(2.5, np.float32), torch.tensor(2.5, dtype=torch.bfloat16)):
        for into in (np.array(0.0), torch.tensor(0.0, dtype=torch.float16)):
            assert float(round_trip(tmp_path, saved, into, cast=True)) == 2.5
            assert float(into) == 2.5, "in place"


def test_patterns_say_what_may_differ(path: Path) -> None:
    state = target()
    state["model"] |= {"b": np.zeros(4, np.int32), "new": np.full(1, 7)}
    report = reknit.load(path, state, strict=["!model/b", "!model/n*"])
    assert set(report.mismatched) == {"model/b"}
    assert report.missing == ("model/new",)
    assert set(report.restored) == {"model/w", "extra/epoch"}
    assert state["model"]["new"] == 7
    with pytest.raises(reknit.MismatchError, match="in 1 place;"):
        reknit.load(path, state, strict=["!model/b"])
    with pytest.raises(reknit.MismatchError, match="in 1 place;"):
        reknit.load(path, state, strict=("!model/n*",))


def test_of_several_patterns_that_match_a_name_the_last_one_decides(path: Path) -> None:
    state = target()
    state["model"]["b"] = np.zeros(4, np.int32)
    for accepted in (["model/*", "!model/b"], ["!*", "model/w"], ["extra/*"], ["model/b", "!model/*"]):
        assert set(reknit.load(path, state, strict=accepted).mismatched) == {"model/b"}
    for refused in (["!model/b", "model/*"], ["!*", "model/b"], ["extra/*", "*"], ["!model/*", "model/b"]):
        with pytest.raises(reknit.MismatchError, match="model/b"):
            reknit.load(path, state, strict=refused)


def test_without_strict_everything_is_reported(path: Path) -> None:
    model = {"b": np.zeros(4, np.int32), "new": np.full(1, 7), "w": np.zeros((2, 3, 4))}
    state = {"model": model, "extra": {"more": 1}}
    report = reknit.load(path, state, strict=False)
    assert set(report.missing) == {"model/new", "extra/more"}
    assert set(report.unexpected) == {"extra/epoch"}
    assert set(report.mismatched) == {"model/b"}
    assert report.restored == ("model/w",)


def test_a_checkpoint_of_a_newer_format_is_a_version_error(path: Path) -> None:
    body, key, _ = (path / "manifest.json").read_bytes().rpartition(b',"digest":"')
    assert key, "the digest is the last member"
    body = body.replace(b'"format_version":1', b'"format_version":2', 1)
    (path / "manifest.json").write_bytes(body + key + f'{digest(body):016x}"}}'.encode())
    for action in (lambda: reknit.load(path, target()), lambda: reknit.open(path)):
        with pytest.raises(reknit.errors.VersionError, match="install a newer reknit"):
            action()
    assert "format version 2" in reknit.verify(path).problems[0]


# A look inside.


def test_any_part_of_a_tensor_can_be_read(path: Path) -> None:
    whole = np.arange(24.0).reshape(2, 3, 4)
    with reknit.open(path) as checkpoint:
        assert checkpoint.items == ("model", "extra")
        assert checkpoint.tensors["model"]["w"] == TensorSpec((2, 3, 4), "float64")
        assert checkpoint.values["extra"] == {"epoch": 3}
        for index in (
            ...,
            (),
            1,
            -1,
            np.int64(1),
            slice(0, 0),
            slice(-2, None),
            (0, ..., -1),
            (slice(None), slice(1, 9), 2),
            (1, 2, 3),
        ):
            part = checkpoint.read("model", "w", index)
            assert part.shape == whole[index].shape
            assert (part == whole[index]).all()
        tensor = checkpoint.read("model", "b", slice(1, 3), framework="torch")
        assert torch.equal(tensor, torch.tensor([1, 2], dtype=torch.int32))


def test_an_index_a_tensor_or_a_framework_that_is_not_there_is_refused(path: Path) -> None:
    wrong: list[Any] = [None, ([0, 1],), "a", 1.5, slice(None, None, 2), (..., ...), (0, 0, 0, 0)]
    for index in wrong:
        with pytest.raises(reknit.UsageError):
            reknit.open(path).read("model", "w", index)
    with pytest.raises(IndexError):
        reknit.open(path).read("model", "w", 2)
    with pytest.raises(reknit.MismatchError, match="no tensor 'x' in item 'model'"):
        reknit.open(path).read("model", "x")
    with pytest.raises(reknit.UsageError, match="'numpy', 'torch' or 'jax', not 'tensorflow'"):
        reknit.open(path).read("model", "w", framework="tensorflow")


def test_reading_a_file_that_was_cut_or_is_gone_is_a_corrupt_checkpoint(path: Path) -> None:
    checked = reknit.open(path)
    unchecked = reknit.open(path, options=reknit.LoadOptions(verify="off"))
    (file,) = path.glob("model/*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    for checkpoint in (checked, unchecked):
        with pytest.raises(reknit.CorruptError, match="the manifest says"):
            checkpoint.read("model", "w")
    file.unlink()
    for checkpoint in (checked, unchecked):
        with pytest.raises(reknit.CorruptError, match="missing"):
            checkpoint.read("model", "w")


def test_a_damaged_block_is_named_with_its_place(path: Path) -> None:
    (file,) = path.glob("model/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=r"in model/b, model/w") as caught:
        reknit.load(path, target())
    assert (caught.value.rank, caught.value.phase, caught.value.path) == (0, "verify", str(file))
    assert not reknit.verify(path, "data").ok
    assert reknit.verify(path).ok, "the structure is sound"


def test_tensors_outside_a_damaged_block_can_still_be_read(tmp_path: Path) -> None:
    model = {"a": np.arange(1 << 20), "b": np.arange(1 << 20)}
    reknit.save(tmp_path / "x", {"model": model})
    (file,) = tmp_path.glob("x/model/*.safetensors")
    with file.open("r+b") as damaged:
        damaged.seek(-1, os.SEEK_END)
        damaged.write(b"\xff")
    with reknit.open(tmp_path / "x") as checkpoint:
        assert np.array_equal(checkpoint.read("model", "a"), model["a"])
        assert np.array_equal(checkpoint.read("model", "b", slice(0, 9)), model["b"][:9])
        with pytest.raises(CorruptError, match="in model/b"):
            checkpoint.read("model", "b")


def test_an_open_that_fails_closes_its_store(path: Path) -> None:
    closed = []

    class Watched(LocalStorage):
        def close(self) -> None:
            closed.append(self.url)
            super().close()

    register("watched", lambda url, _: Watched(url.removeprefix("watched://")))
    (path / "manifest.json").write_bytes(b"{}")
    with pytest.raises(reknit.errors.FormatError):
        reknit.open(f"watched://{path}")
    assert closed == [str(path)]


def test_verify_counts_what_it_checked(path: Path) -> None:
    structure, data = reknit.verify(path), reknit.verify(path, "data")
    assert structure.ok
    assert data.ok
    total = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    assert (data.num_files, data.nbytes_checked, data.path) == (4, total, str(path))
    assert structure.nbytes_checked < total
    with pytest.raises(reknit.UsageError, match="level"):
        reknit.verify(path, "everything")  # type: ignore[arg-type]


class Opaque:
    """A value that only pickle can store."""


def test_a_checkpoint_with_pickled_values_is_sound_and_is_opened_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(reknit.errors.StateError):
        reknit.save(path, {"x": {"v": Opaque()}})
    reknit.save(path, {"x": {"v": Opaque()}}, options=reknit.SaveOptions(allow_pickle=True))
    assert reknit.verify(path, "data").ok
    with pytest.raises(reknit.errors.FormatError, match="allow_pickle"):
        reknit.load(path, {"x": {"v": Opaque()}})
    trusted = reknit.LoadOptions(allow_pickle=True)
    assert isinstance(reknit.open(path, options=trusted).values["x"]["v"], Opaque)
    (file,) = path.glob("x/*.msgpack")
    file.write_bytes(bytes(file.stat().st_size))
    assert not reknit.verify(path).ok, "values that are not decoded are still compared"


# What happened?


def test_every_phase_is_one_line_of_json(path: Path, tmp_path: Path) -> None:
    events = str(tmp_path / "events.jsonl")
    reknit.save(tmp_path / "x", target(), step=4, options=reknit.SaveOptions(events=events))
    reknit.load(tmp_path / "x", target(), options=reknit.LoadOptions(events=events))
    assert reknit.sinks.flush(60)
    with open(events) as file:
        reported = [json.loads(line) for line in file]
    records = [event for event in reported if "phase" in event]
    saving = [r["phase"] for r in records if r["action"] == "save"]
    loading = [r["phase"] for r in records if r["action"] == "load"]
    assert {"collect", "plan", "stage", "digest", "write", "commit"} <= set(saving)
    assert {"open", "collect", "plan", "agree", "read", "verify", "deliver"} <= set(loading)
    assert all(r["outcome"] == "ok" and r["rank"] == 0 and r["seconds"] >= 0 for r in records)
    assert {r["step"] for r in records if r["action"] == "save"} == {4}
    # Events that cannot be written take no save.
    reknit.save(tmp_path / "y", {"x": 1}, options=reknit.SaveOptions(events=f"{events}/in-a-file.jsonl"))
    assert reknit.verify(tmp_path / "y", "data").ok


def test_a_save_that_is_not_waited_for_tells_its_error_when_it_is(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pending = reknit.save(path, {"x": 1}, wait=False)
    pending.staged(timeout=60)
    for _ in range(2):
        with pytest.raises(reknit.CheckpointExistsError):
            pending.result(timeout=60)
    assert pending.done()
    assert "failed: there is a committed checkpoint" in caplog.text
    good = reknit.save(path, {"x": 1}, wait=False, overwrite=True)
    assert good.result(timeout=60).num_files == 1
    assert good.done()
    assert good.phases == good.result().phases

    class Interrupted:
        def state_dict(self) -> dict[str, Any]:
            raise KeyboardInterrupt

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    with pytest.raises(KeyboardInterrupt):
        reknit.save(path, {"x": Interrupted()}, wait=False, overwrite=True)


def test_the_place_of_a_failing_write_is_named(tmp_path: Path) -> None:
    def factory(url: str, _: Any) -> FaultyStorage:
        return FaultyStorage(LocalStorage(url.removeprefix("failing://")), plan=[Fault("full", 1, "write")])

    register("failing", factory)
    with pytest.raises(reknit.errors.StorageFullError, match="no space left") as caught:
        reknit.save(f"failing://{tmp_path}/x", {"model": {"w": np.ones(3)}})
    assert (caught.value.rank, caught.value.phase) == (0, "write")
    assert caught.value.path is not None
    assert "model/00000." in caught.value.path
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


# Each kind of value.


def test_values_of_this_rank_and_random_states_come_back(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", {"rng": reknit.RngState(), "mine": reknit.PerRank({"seen": [1, 2]})})
    drawn = random.random(), np.random.rand(), torch.rand(3)
    state: dict[str, Any] = {"rng": reknit.RngState(), "mine": reknit.PerRank({"seen": []})}
    report = reknit.load(tmp_path / "x", state)
    assert report.notes == {}
    assert (random.random(), np.random.rand()) == drawn[:2]
    assert torch.equal(torch.rand(3), drawn[2])
    assert state["mine"].value == {"seen": [1, 2]}


DTYPES = [torch.bool, torch.complex64, torch.complex128, torch.bfloat16, torch.float8_e4m3fn]
DTYPES += [torch.float8_e5m2, torch.float16, torch.int8, torch.uint8]
SHAPES: list[tuple[int, ...]] = [(), (0, 3), (5,), (4, 3)]


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    raw: dict[str, torch.Tensor] = {}
    saved: dict[str, torch.Tensor] = {}
    into: dict[str, torch.Tensor] = {}
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        key = f"{dtype} {shape}"
        nbytes = int(np.prod(shape)) * dtype.itemsize
        raw[key] = torch.randint(0, 2 if dtype == torch.bool else 255, (nbytes,), dtype=torch.uint8)
        saved[key] = raw[key].view(dtype).view(shape)
        into[key] = torch.zeros(shape).to(dtype)
    reknit.save(tmp_path / "x", {"item": saved})
    targets = dict(into)
    reknit.load(tmp_path / "x", {"item": into})
    for key, tensor in into.items():
        assert tensor is targets[key], key
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), raw[key]), key


def test_strided_lazy_and_foreign_endian_memory_comes_back(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    complex_base = torch.complex(base, -base)
    for value in (
        base.T,
        base[::2, 1::2],
        base[:1].expand(5, 6),
        complex_base.conj(),
        complex_base.conj().imag,
    ):
        into = torch.zeros_like(value.resolve_conj().resolve_neg().contiguous()).T.contiguous().T
        assert torch.equal(round_trip(tmp_path, value, into), value)
    big = np.arange(4, dtype=">i4")
    assert round_trip(tmp_path, big, np.zeros(4, "<i4")).tolist() == [0, 1, 2, 3]
    assert round_trip(tmp_path, big, np.zeros(4, ">i4")).tolist() == [0, 1, 2, 3]
    assert round_trip(tmp_path, np.arange(12).reshape(3, 4)[:, ::-2], np.zeros((3, 2), int)).tolist() == [
        [3, 1],
        [7, 5],
        [11, 9],
    ]


def test_tied_weights_are_stored_once_and_come_back_tied_or_apart(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(10_000.0))
    one = reknit.save(tmp_path / "x", {"model": {"a": weight, "b": weight, "c": weight[:10]}}).result()
    assert one.nbytes < 60_000
    apart = {"a": torch.zeros(10_000), "b": torch.zeros(10_000), "c": torch.zeros(10)}
    reknit.load(tmp_path / "x", {"model": apart})
    assert torch.equal(apart["a"], apart["b"])
    assert torch.equal(apart["b"], weight.detach())
    assert torch.equal(apart["c"], weight.detach()[:10])
    tied = torch.zeros(10_000)
    reknit.load(tmp_path / "x", {"model": {"a": tied, "b": tied, "c": torch.zeros(10)}})
    assert torch.equal(tied, weight.detach())
    assert reknit.open(tmp_path / "x").read("model", "b", slice(3, 5)).tolist() == [3, 4]


WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "jax"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Blocked())
import numpy as np, reknit
path = sys.argv[1]
reknit.save(path, {"model": {"w": np.arange(6.0)}, "extra": {"epoch": 2, "rng": reknit.RngState()}}, step=1)
state = {"model": {"w": np.zeros(6)}, "extra": {"epoch": 0, "rng": reknit.RngState()}}
reknit.load(path, state)
assert state["model"]["w"].tolist() == [0, 1, 2, 3, 4, 5] and state["extra"]["epoch"] == 2
assert reknit.verify(path, "data").ok and reknit.latest(path + "/..") is not None
try:
    reknit.open(path).read("model", "w", framework="torch")
except reknit.errors.MissingExtraError:
    print(reknit.open(path).read("model", "w", slice(2, 4)).tolist(), "torch" in sys.modules)
"""


def test_a_process_without_torch_saves_loads_and_reads_arrays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[2.0, 3.0] False\n", done.stderr


# Larger than 32 bits can count.

LARGE = (70_000, 70_000)


def large_index(num_chunks: int, start: int) -> Index:
    """Return the index of one large uint8 tensor, cut into rows, in one file."""
    rows = LARGE[0] // num_chunks
    first = np.arange(num_chunks, dtype=np.int64) * rows
    zeros = np.zeros(num_chunks, np.int64)
    return Index(
        (TensorEntry("model", "w", TensorSpec(LARGE, "uint8")),),
        (paths.data_path("model", 0, "0" * 32),),
        zeros,
        np.stack([first, zeros], 1),
        np.full((num_chunks, 2), [rows, LARGE[1]], np.int64),
        zeros,
        start + first * LARGE[1],
        np.full(num_chunks, rows * LARGE[1], np.int64),
    )


def test_a_small_part_of_a_tensor_with_billions_of_elements_is_planned_small() -> None:
    index = large_index(CHUNKS, 4096)
    nbytes = 4096 + LARGE[0] * LARGE[1]
    wanted = [(0, Box((65_999, 69_990), (3, 10)))]
    exact = plan_load(index, wanted, [nbytes], Granularity(1, 0, 8 << 20))
    assert exact.nbytes == 30
    assert exact.read_start.tolist() == [4096 + row * 70_000 + 69_990 for row in (65_999, 66_000, 66_001)]
    assert len(set(exact.chunk.tolist())) == 2
    blocks = plan_load(index, wanted, [nbytes], Granularity(BLOCK_NBYTES, 0, 8 << 20))
    assert blocks.nbytes <= 2 * BLOCK_NBYTES
    assert (blocks.read_start % BLOCK_NBYTES == 0).all()


def test_a_part_of_a_tensor_with_billions_of_elements_is_read_from_its_place(tmp_path: Path) -> None:
    spec = TensorSpec(LARGE, "uint8")
    rows = LARGE[0] // CHUNKS
    boxes = [Box((k * rows, 0), (rows, LARGE[1])) for k in range(CHUNKS)]
    entries = [
        HeaderEntry(paths.entry_key("w", spec, box), "uint8", box.lengths, k * box.numel, box.numel)
        for k, box in enumerate(boxes)
    ]
    header = encode_header(entries, file_metadata("0" * 32, 0, "model"))
    nbytes, place = len(header) + spec.nbytes, len(header) + 66_000 * 70_000 + 69_990
    index = large_index(CHUNKS, len(header))
    full = tmp_path / index.files[0]
    full.parent.mkdir()
    with open(full, "wb") as file:
        file.write(header)
        file.truncate(nbytes)
        file.seek(place)
        file.write(bytes(range(10)))
    digests = [digest(bytes(BLOCK_NBYTES))] * (nbytes // BLOCK_NBYTES)
    digests.append(digest(bytes(nbytes % BLOCK_NBYTES)))
    with open(full, "rb") as file:
        for block in {0, place // BLOCK_NBYTES, (place + 10) // BLOCK_NBYTES}:
            file.seek(block * BLOCK_NBYTES)
            digests[block] = digest(file.read(BLOCK_NBYTES))
    storage = LocalStorage(tmp_path)
    written = write_bytes(storage, paths.index_path("0" * 32), encode_index(index))
    files = (
        FileEntry(index.files[0], nbytes, tuple(digests)),
        FileEntry(written.path, written.nbytes, tuple(written.digests.tolist())),
    )
    manifest = Manifest(1, "0" * 32, None, 0.0, ("model",), written.path, files, (), BLOCK_NBYTES)
    storage.put(paths.MANIFEST_PATH, encode_manifest(manifest), if_absent=True)
    assert reknit.verify(tmp_path).ok
    part = reknit.open(tmp_path).read("model", "w", (slice(65_999, 66_001), slice(69_988, None)))
    assert part.tolist() == [[0] * 12, [0, 0, *range(10)]]


def test_opening_a_checkpoint_to_look_into_it_is_a_phase(path: Path, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    with reknit.open(path, options=reknit.LoadOptions(events=str(events))):
        pass
    assert reknit.sinks.flush(60)
    records = [json.loads(line) for line in events.read_text().splitlines()]
    records = [event for event in records if "phase" in event]
    assert [(r["action"], r["phase"], r["outcome"]) for r in records] == [("read", "open", "ok")]


def test_a_process_may_save_over_what_another_one_saved_after_its_own_last_save(tmp_path: Path) -> None:
    path = tmp_path / "x"
    reknit.save(path, {"x": 1})
    other = SoloGroup(int(time.time() * 1000))  # a job that began later
    reknit.save(path, {"x": 2}, overwrite=True, group=other)
    time.sleep(0.002)
    reknit.save(path, {"x": 3}, overwrite=True)
    state = {"x": 0}
    reknit.load(path, state)
    assert state == {"x": 3}


def test_no_garbage_is_collected_while_a_call_lasts(tmp_path: Path) -> None:
    """A thousand tensors would cause many collections, each of which goes through all objects of a job."""
    state = {"model": {f"w{number}": np.full(4, number) for number in range(1000)}}
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    gc.callbacks.append(note)
    try:
        for wait in (True, False):
            gc.collect()
            collections.clear()
            pending = reknit.save(tmp_path / f"{wait}", state, wait=wait)
            during_save = len(collections)
            pending.result()
            gc.collect()
            collections.clear()
            reknit.load(tmp_path / f"{wait}", state)
            # One collection, of the objects made meanwhile, is due as soon as the collector runs again.
            assert during_save <= 1, wait
            assert len(collections) <= 1, wait
            assert reknit.close(60), wait
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()


def test_every_public_name_is_there_once_reknit_is_imported() -> None:
    assert set(dir(reknit)) == set(reknit.__all__)
    found = {name: getattr(reknit, name) for name in reknit.__all__}  # each is imported when it is used
    assert found.items() <= vars(reknit).items()
    with pytest.raises(AttributeError, match="module 'reknit' has no attribute 'sav'"):
        getattr(reknit, "sav")  # noqa: B009
