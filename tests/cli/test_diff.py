from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import reknit
from reknit.cli.diff import DataDifference, both_shown
from reknit.format.blob_codec import encode_blobs
from reknit.types.shard import TensorSpec
from tests import ranks
from tests.integrations.formats.checkpoints import columns, save_in_boxes

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Command


def state() -> dict[str, Any]:
    return {
        "model": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.arange(4)},
        "extra": {"lr": 0.5, "names": ["a", "b"], "array": (1, 2)},
    }


def differences(command: Command, tmp_path: Path, other: dict[str, Any], *options: str) -> list[list[str]]:
    reknit.save(tmp_path / "a", state(), step=1)
    reknit.save(tmp_path / "b", other, step=2, metadata={"run": "other"})
    ran = command("diff", tmp_path / "a", tmp_path / "b", "--json", *options)
    found = [[d["kind"], d["name"], d["what"]] for d in ran.json["differences"]]
    assert ran.code == (1 if found else 0)
    return found


def test_equal_states_do_not_differ_and_values_of_a_rank_are_not_compared(
    command: Command, tmp_path: Path
) -> None:
    for name in "ab":
        reknit.save(tmp_path / name, {**state(), "own": reknit.PerRank({"seed": name})})
    for options in ((), ("--data",)):
        ran = command("diff", tmp_path / "a", tmp_path / "b", *options)
        assert ran.code == 0, options
        assert ran.out.startswith("equal: 2 tensors"), options
        found = command("diff", tmp_path / "a", tmp_path / "b", *options, "--json").json
        assert found["differences"] == [], options


def test_items_and_names_in_one_only_are_told_once(command: Command, tmp_path: Path) -> None:
    other = state()
    del other["extra"], other["model"]["n"]
    other["model"]["m"] = np.ones(1)
    other["more"] = {"x": np.ones(2), "y": 3}
    assert sorted(differences(command, tmp_path, other)) == [
        ["item", "extra", "only in A"],
        ["item", "more", "only in B"],
        ["tensor", "model/m", "only in B"],
        ["tensor", "model/n", "only in A"],
    ]


def test_shapes_and_dtypes_that_differ_are_told(command: Command, tmp_path: Path) -> None:
    other = state()
    other["model"] = {"w": np.zeros((3, 2), np.float32), "n": np.arange(4, dtype=np.int32)}
    assert sorted(differences(command, tmp_path, other, "--data")) == [
        ["tensor", "model/n", "int64[4] in A, int32[4] in B"],
        ["tensor", "model/w", "float32[2, 3] in A, float32[3, 2] in B"],
    ]


def test_values_that_differ_are_told(command: Command, tmp_path: Path) -> None:
    other = state()
    other["extra"] = {"lr": 0.25, "names": ["a", "b"], "new": None}
    found = differences(command, tmp_path, other)
    assert ["value", "extra/lr", "0.5 in A, 0.25 in B"] in found
    assert ["value", "extra/new", "only in B"] in found
    assert not [name for _, name, _ in found if "names" in name]


def test_a_value_is_shown_from_where_it_begins_to_differ() -> None:
    cases: list[tuple[object, object, tuple[str, str]]] = [
        (1, "one\x1b[31m", ("1", r"'one\x1b[31m'")),
        ([*range(100)], [*range(99), 7], ("...5, 96, 97, 98, 99]", "...5, 96, 97, 98, 7]")),
        ("x" * 90 + "y" * 90, "x" * 90, ("..." + "x" * 15 + "y" * 45 + "...", "..." + "x" * 15 + "'")),
        (b"1" * (2 << 20), b"", ("a value of 2.0 MiB", "one of 5 B")),
    ]
    for a, b, shown in cases:
        assert both_shown(encode_blobs({"v": a}), encode_blobs({"v": b})) == shown


def test_bytes_are_compared_only_on_request(command: Command, tmp_path: Path) -> None:
    other = state()
    other["model"]["w"][1] += 0.5
    other["model"]["n"][0] = 7
    assert differences(command, tmp_path, other) == []
    ran = command("diff", tmp_path / "a", tmp_path / "b", "--data")
    assert ran.code == 1
    assert sorted(ran.out.splitlines()) == [
        "data model/n: 1 element differs (of 4)",
        "data model/w: 3 elements differ, largest absolute difference 0.5 (of 6)",
        "differences: 0 items, 0 tensors in name, shape or dtype, 0 values, 2 of 2 in their bytes",
    ]


def test_norms_are_those_of_numpy(command: Command, tmp_path: Path) -> None:
    other = state()
    other["model"]["w"][1] += 0.5
    assert differences(command, tmp_path, other) == []
    ran = command("diff", tmp_path / "a", tmp_path / "b", "--norms", "--json")
    one, two = state()["model"]["w"], other["model"]["w"]
    assert ran.json["norms"]["model/w"] == pytest.approx(
        {"a": np.linalg.norm(one), "b": np.linalg.norm(two), "difference": np.linalg.norm(one - two)}
    )
    assert ran.json["norms"]["model/n"]["difference"] == 0
    assert ran.json["summary"] == {"compared": 2, "item": 0, "tensor": 0, "value": 0, "unread": 0, "data": 1}
    assert "norms model/w: " in command("diff", tmp_path / "a", tmp_path / "b", "--norms").out


def test_another_sharding_is_no_difference(command: Command, tmp_path: Path) -> None:
    arrays = {"w": np.random.default_rng(0).standard_normal((64, 48)), "v": np.arange(5)}
    save_in_boxes(tmp_path / "a", arrays, {"w": columns((64, 48), 5)})
    save_in_boxes(tmp_path / "b", arrays, {"w": columns((64, 48), 3)})
    assert command("diff", tmp_path / "a", tmp_path / "b", "--data").code == 0


def test_pickled_values_are_not_compared_and_that_is_told(command: Command, tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        reknit.save(
            tmp_path / name,
            {"model": {"w": np.ones(1)}, "x": {"y": value}},
            options=reknit.SaveOptions(allow_pickle=True),
        )
    ran = command("diff", tmp_path / "a", tmp_path / "b", "--data")
    assert ran.code == 0
    assert "values were not compared" in ran.out
    assert command("diff", tmp_path / "a", tmp_path / "b", "--json").json["values_compared"] is False


def training(*, sharded: bool) -> dict[str, Any]:
    """Return the state of a training of two layers on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "rng": reknit.RngState(),
        "own": reknit.PerRank({"seed": 1, "noise": torch.ones(2)}),
        "progress": {"epoch": 3, "best": [torch.ones(1), 0.5], "later": {}},
    }


def train(path: Path) -> None:
    state = training(sharded=True)
    state["model"](torch.ones(2, 4)).sum().backward()
    state["optimizer"].step()
    state["scheduler"].step()
    reknit.save(path, state)


def save_again(one: Path, other: Path, *, sharded: bool) -> None:
    state = training(sharded=sharded)
    reknit.load(one, state)
    reknit.save(other, state)


def test_a_training_saved_again_by_other_ranks_is_equal(command: Command, tmp_path: Path) -> None:
    ranks.run(2, train, tmp_path / "a")
    for world, sharded in ((1, False), (4, True)):
        other = tmp_path / f"by {world}"
        ranks.run(world, partial(save_again, sharded=sharded), tmp_path / "a", other)
        ran = command("diff", tmp_path / "a", other, "--data")
        equal, note = ran.out.splitlines()
        assert equal.startswith("equal: 17 tensors (names, shapes, dtypes and bytes), "), world
        assert note == "note: values of each rank were not compared (rng, own)", world
        assert ran.code == 0, world


def test_a_training_in_the_format_of_another_program_is_equal(command: Command, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    ranks.run(2, train, saved)
    for form in ("dcp", "torch"):
        exported, imported = tmp_path / form, tmp_path / f"from {form}"
        assert command("export", form, saved, exported).code == 0
        assert command("import", exported, imported).code == 0
        for other in (exported, imported):
            first, second = command("diff", saved, other, "--data").out.splitlines()
            assert first.startswith("equal: 17 tensors"), other
            assert second == "note: values of each rank were not compared (rng, own)", other


class Settings:
    """An object of a program that reknit does not import."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("form", "num"), [("dcp", 2), ("torch", 1)])
def test_entries_that_cannot_be_read_are_counted_apart_from_those_that_differ(
    command: Command, tmp_path: Path, form: str, num: int
) -> None:
    tensors = {"model": {"w": torch.ones(2)}}
    reknit.save(tmp_path / "a", {**tensors, "own": {"depth": 3}})
    state = {**tensors, "own": {"depth": 3, **{f"a{n}": Settings() for n in range(num)}}}
    if form == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / "b", no_dist=True)
    else:
        torch.save(state, tmp_path / "b")
    ran = command("diff", tmp_path / "a", tmp_path / "b", "--data")
    *lines, last = ran.out.splitlines()
    assert ran.code == 1
    assert len(lines) == num
    for n, line in enumerate(lines):
        assert line.startswith(f"unread own/a{n}: not compared: of B, ")
    assert last == (
        "differences: 0 items, 0 tensors in name, shape or dtype, 0 values, 0 of 1 in their bytes, "
        f"{num} not compared"
    )
    found = command("diff", tmp_path / "a", tmp_path / "b", "--json").json
    assert [(one["kind"], one["name"]) for one in found["differences"]] == [
        ("unread", f"own/a{n}") for n in range(num)
    ]


def test_each_thing_that_changed_in_a_training_is_told_once(command: Command, tmp_path: Path) -> None:
    for name in "ab":
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5 if name == "a" else 0.25)
        state = {"model": {"w": torch.ones(2)}, "both": {"model": model, "optimizer": optimizer}}
        more = {"deep": {"x": 1, "y": 2}, "same": 3} if name == "a" else {"same": 3}
        reknit.save(tmp_path / name, {**state, "more": more})
    ran = command("diff", tmp_path / "a", tmp_path / "b")
    assert ran.out.splitlines()[:-1] == [
        "value more/deep: only in A",
        "value both/optimizer/param_groups/0.weight/lr: 0.5 in A, 0.25 in B (and for 3 more parameters)",
    ]
    assert ran.code == 1


def reading(batches: int) -> dict[str, Any]:
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    numbers = range(32)
    sampler: Any = DistributedSampler(numbers, seed=5)  # type: ignore[arg-type]
    loader = StatefulDataLoader(numbers, batch_size=2, sampler=sampler)
    for _, _ in zip(range(batches), loader, strict=False):
        pass
    return {"loader": loader}


def read(path: Path, batches: int) -> None:
    reknit.save(path, reading(batches))


def read_on(one: Path, other: Path) -> None:
    state = reading(0)
    reknit.load(one, state)
    reknit.save(other, state)


def test_the_position_of_a_loader_is_compared_and_not_its_readers(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    ranks.run(2, read, tmp_path / "a", 2)
    ranks.run(2, read, tmp_path / "c", 3)
    ranks.run(1, read_on, tmp_path / "a", tmp_path / "b")
    assert command("diff", tmp_path / "a", tmp_path / "b").out.startswith("equal: 0 tensors")
    differs = command("diff", tmp_path / "b", tmp_path / "c")
    assert differs.out.splitlines()[:-1] == ["value loader/~position/samples: 8 in A, 12 in B"]
    assert command("export", "torch", tmp_path / "a", tmp_path / "d").code == 0
    assert command("diff", tmp_path / "a", tmp_path / "d").code == 0


DTYPES = ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "int32", "bool", "complex128"]


@given(data=st.data(), dtype=st.sampled_from(DTYPES), numel=st.integers(1, 40))
def test_differing_elements_are_those_whose_bits_differ(data: st.DataObject, dtype: str, numel: int) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    raw = data.draw(st.binary(min_size=numel * kind.itemsize, max_size=numel * kind.itemsize))
    if dtype == "bool":
        raw = bytes(byte & 1 for byte in raw)
    a = np.frombuffer(raw, kind)
    b = a.copy()
    places = data.draw(st.sets(st.integers(0, numel - 1)))
    flipped = b.view(np.uint8).reshape(numel, -1)
    for place in places:
        flipped[place, 0] ^= 1
    found = DataDifference()
    found.add(a, b, TensorSpec((numel,), dtype))
    assert found.numel == len(places)
    if "int" in dtype or dtype == "bool" or not places:
        assert found.largest is None
        return
    wide = np.complex128 if dtype == "complex128" else np.float64
    with np.errstate(all="ignore"):
        distances = [abs(wide(a[k]) - wide(b[k])) for k in places]
    assert found.nans == sum(bool(np.isnan(d)) for d in distances)
    finite = [d for d in distances if not np.isnan(d)]
    assert found.largest == (max(finite) if finite else None)


def test_signed_zeros_and_nans_are_compared_by_their_bits() -> None:
    found = DataDifference()
    a = np.array([0.0, np.nan, np.nan, 1.0], np.float32)
    b = np.array([-0.0, np.nan, 2.0, 1.0], np.float32)
    found.add(a, b, TensorSpec((4,), "float32"))
    assert str(found) == "2 elements differ, largest absolute difference 0, 1 with a NaN"


def test_warnings_about_a_folder_of_another_program_are_told_once(
    command: Command, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        torch.save({"w": torch.ones(2)}, tmp_path / name / "pytorch_model.bin")
        save_file({"w": torch.zeros(2)}, tmp_path / name / "model.safetensors")
    for other, sides in (("b", 2), ("a", 1)):
        caplog.clear()
        assert command("diff", tmp_path / "a", tmp_path / other).code == 0
        assert len([one for one in caplog.records if "another model" in one.getMessage()]) == sides
