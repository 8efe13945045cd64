from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reknit
from reknit.cli.diff import DataDifference, both_shown
from reknit.format.values.blob_codec import encode_blobs
from reknit.types.shard import TensorSpec
from tests.interop.checkpoints import columns, save_in_boxes

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


@pytest.mark.parametrize("options", [(), ("--data",)])
def test_equal_states_do_not_differ(command: Command, tmp_path: Path, options: tuple[str, ...]) -> None:
    assert differences(command, tmp_path, state(), *options) == []
    ran = command("diff", tmp_path / "a", tmp_path / "b", *options)
    assert ran.code == 0
    assert ran.out.startswith("no differences in 2 tensors")


def test_values_of_a_rank_are_not_compared(command: Command, tmp_path: Path) -> None:
    for name in "ab":
        reknit.save(tmp_path / name, {**state(), "own": reknit.PerRank({"seed": name})})
    assert command("diff", tmp_path / "a", tmp_path / "b", "--data").code == 0


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


@pytest.mark.parametrize(
    ("a", "b", "shown"),
    [
        (1, "one\x1b[31m", ("1", r"'one\x1b[31m'")),
        ([*range(100)], [*range(99), 7], ("...5, 96, 97, 98, 99]", "...5, 96, 97, 98, 7]")),
        ("x" * 90 + "y" * 90, "x" * 90, ("..." + "x" * 15 + "y" * 45 + "...", "..." + "x" * 15 + "'")),
        (b"1" * (2 << 20), b"", ("a value of 2.0 MiB", "one of 5 B")),
    ],
)
def test_a_value_is_shown_from_where_it_begins_to_differ(
    a: object, b: object, shown: tuple[str, str]
) -> None:
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
    assert ran.json["summary"] == {"compared": 2, "item": 0, "tensor": 0, "value": 0, "data": 1}
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
