"""The choice of saved tensors that fill boxes, and the errors about everything that does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.engine.loading.match import Fill, Problems, match, require_fit, uncovered
from reknit.engine.messages import LoadRequest
from reknit.errors import CorruptError, MismatchError
from reknit.options import LoadOptions
from reknit.types.box import Box
from reknit.types.dtype import ITEMSIZE, converts
from reknit.types.manifest import Index, TensorEntry
from reknit.types.shard import Shard, TensorSpec
from reknit.types.wanted import RESIZE, Wanted, matches
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    from collections.abc import Sequence


def index_of(**specs: TensorSpec) -> Index:
    """Return an index of whole tensors of item `m`, each in one chunk."""
    names = sorted(specs)
    ndim = max([1, *(len(spec.shape) for spec in specs.values())])
    nbytes = np.array([specs[name].nbytes for name in names], np.int64)
    lengths = np.ones((len(names), ndim), np.int64)
    for row, name in enumerate(names):
        lengths[row, : len(specs[name].shape)] = specs[name].shape
    return Index(
        tuple(TensorEntry("m", name, specs[name]) for name in names),
        ("m/0.safetensors",),
        np.arange(len(names)),
        np.zeros((len(names), ndim), np.int64),
        lengths,
        np.zeros(len(names), np.int64),
        np.cumsum(nbytes) - nbytes,
        nbytes,
    )


def shard(name: str, spec: TensorSpec, box: Box | None = None) -> Shard:
    box = box or Box.whole(spec.shape)
    data = np.arange(box.numel, dtype=spec.dtype).reshape(box.lengths)
    return Shard("m", name, spec, box, None, data)


def wanted(*shards: Shard, **more: Any) -> Wanted:
    return Wanted(("m",), shards, **more)


F32 = TensorSpec((4, 6), "float32")


def test_what_has_the_same_name_shape_and_dtype_is_filled() -> None:
    box = Box((2, 0), (2, 6))
    want = shard("w", F32, box)
    fills, problems = match(index_of(v=F32, w=F32), wanted(want), LoadOptions())
    assert fills == [Fill("m/w", 1, box, want.data, False)]
    assert problems == Problems([], [], {}, [], [])


def test_what_has_no_name_or_another_shape_or_dtype_is_told() -> None:
    index = index_of(w=F32, v=F32)
    wants = (
        shard("x", F32),
        shard("w", TensorSpec((4, 5), "float32")),
        shard("v", TensorSpec((4, 6), "float64")),
    )
    fills, problems = match(index, wanted(*wants), LoadOptions())
    assert fills == []
    assert problems.missing == [("m/x", "not in the checkpoint")]
    assert problems.mismatched == [
        ("m/w", f"saved shape [4, 6], wanted [4, 5]{RESIZE}"),
        ("m/v", "saved dtype float32, wanted float64 (LoadOptions(cast=True) converts)"),
    ]
    (fill,), _ = match(index, wanted(wants[2]), LoadOptions(cast=True))
    assert fill.cast


def test_problems_mention_the_name_in_the_checkpoint_where_it_differs() -> None:
    want = wanted(
        shard("w", TensorSpec((4, 5), "float32")), mismatched=(("m", "b", "why"), ("m", "c", "why"))
    )
    _, problems = match(index_of(w=F32), want, LoadOptions(), {"m/w": "net/weight", "m/b": "net/bias"})
    assert problems.mismatched == [
        ("m/b", "why (its name in the checkpoint is net/bias)"),
        ("m/c", "why"),
        ("m/w", f"saved shape [4, 6], wanted [4, 5]{RESIZE} (its name in the checkpoint is net/weight)"),
    ]


@pytest.mark.parametrize("by", ["pattern", "wanted"])
def test_of_another_shape_the_common_part_is_filled_where_that_is_allowed(by: str) -> None:
    want = shard("w", TensorSpec((6, 5), "float32"), Box((3, 1), (3, 4)))
    more: dict[str, Any] = {"resizable": (("m", "w"),)} if by == "wanted" else {}
    options = LoadOptions(allow_shape_mismatch=("m/w",)) if by == "pattern" else LoadOptions()
    (fill,), problems = match(index_of(w=F32), wanted(want, **more), options)
    assert fill.box == Box((3, 1), (1, 4))
    assert fill.target.base is not None, "a view of the target"
    assert np.shares_memory(fill.target, want.data)
    assert fill.target.tolist() == [[0, 1, 2, 3]]
    assert problems.mismatched == []
    assert problems.resized == {"m/w": "saved shape [4, 6], wanted [6, 5]: took [0:4,0:5]"}


def test_a_box_that_the_saved_tensor_does_not_reach_stays_and_is_told() -> None:
    want = shard("w", TensorSpec((8, 6), "float32"), Box((4, 0), (4, 6)))
    fills, problems = match(index_of(w=F32), wanted(want), LoadOptions(allow_shape_mismatch=("*",)))
    assert fills == []
    assert "m/w" in problems.resized


def test_another_number_of_dimensions_or_another_dtype_is_a_mismatch_all_the_same() -> None:
    index = index_of(w=F32, v=F32)
    wants = (shard("w", TensorSpec((24,), "float32")), shard("v", TensorSpec((8, 6), "float64")))
    fills, problems = match(index, wanted(*wants), LoadOptions(allow_shape_mismatch=("*",)))
    assert fills == []
    assert problems.resized == {}
    assert "the number of dimensions may not differ" in problems.mismatched[0][1]
    assert problems.mismatched[1][0] == "m/v"


@given(
    st.integers(1, 3).flatmap(
        lambda ndim: st.tuples(*[st.lists(st.integers(1, 6), min_size=ndim, max_size=ndim) for _ in range(2)])
    ),
    st.integers(1, 3),
)
def test_all_ranks_together_take_exactly_what_both_shapes_have(
    shapes: tuple[list[int], list[int]], num_ranks: int
) -> None:
    saved, here = (tuple(shape) for shape in shapes)
    spec = TensorSpec(here, "int64")
    seen = np.zeros(here, np.int64)
    step = -(-here[0] // num_ranks)
    for start in range(0, here[0], step):
        box = Box((start, *[0] * (len(here) - 1)), (min(step, here[0] - start), *here[1:]))
        fills, _ = match(
            index_of(w=TensorSpec(saved, "int64")),
            wanted(shard("w", spec, box)),
            LoadOptions(allow_shape_mismatch=("m/w",)),
        )
        for fill in fills:
            assert fill.target.shape == fill.box.lengths
            seen[fill.box.slices()] += 1
    common = tuple(slice(0, min(pair)) for pair in zip(saved, here, strict=True))
    assert (seen[common] == 1).all()
    assert seen.sum() == seen[common].size


def test_a_tensor_that_the_index_does_not_cover_is_told() -> None:
    index = index_of(w=F32, v=F32)
    index.lengths[1, 0] = 3  # a chunk of three rows, where the tensor has four
    (reported,) = uncovered(index, {0, 1})
    assert reported == "the chunks of m/w in the index do not cover it exactly: they hold 18 of 24 elements"
    assert uncovered(index, {0}) == [], "tensors that are not read are not checked"
    assert uncovered(index, ()) == []


def asked(
    rank: int,
    *,
    missing: Sequence[str] = (),
    idle: Sequence[str] = (),
    damaged: Sequence[str] = (),
    mismatched: Sequence[str] = (),
) -> LoadRequest:
    return LoadRequest(
        rank=rank,
        missing=[(name, "gone") for name in missing],
        mismatched=[(name, "odd") for name in mismatched],
        idle=list(idle),
        damaged=list(damaged),
    )


def test_one_error_lists_the_problems_of_all_ranks_and_says_whose_they_are() -> None:
    requests = [
        asked(0, missing=["a", "b"]),
        asked(1, missing=["a"], mismatched=["c"]),
        asked(2, missing=["a"]),
    ]
    with pytest.raises(MismatchError) as caught:
        require_fit(requests, ["d"], (), (), "here")
    assert caught.value.message == (
        "the checkpoint does not fit the target in 4 places; nothing was changed:\n"
        "  missing: a: gone\n"
        "  missing: b: gone (rank 0)\n"
        "  mismatched: c: odd (rank 1)\n"
        "  unexpected: d: saved, but no rank wants it"
    )
    require_fit([asked(0)], ["d"], (), ("d",), "here")


def test_damage_comes_first_and_makes_it_another_error() -> None:
    many = [f"n{number}" for number in range(30)]
    with pytest.raises(CorruptError) as caught:
        require_fit([asked(0, missing=many), asked(1, damaged=["f is missing"])], [], (), (), "here")
    lines = caught.value.message.splitlines()
    assert lines[0].endswith("in 31 places; nothing was changed:")
    assert lines[1] == "  damaged: f is missing (rank 1)"
    assert lines[2:] == ["  missing: n0, n1, n2 and 27 more: gone (rank 0)"]


def test_a_reason_of_many_names_is_said_once_with_their_count() -> None:
    for number in one_by_one([1, 2, 3, 4, 30]):
        names = [f"n{each}" for each in range(number)]
        with pytest.raises(MismatchError) as caught:
            require_fit([asked(0, missing=names, mismatched=["m"])], names, (), (), "here")
        lines = caught.value.message.splitlines()[1:]
        each = min(number, 3) if number < 4 else 1
        assert [line.split(":")[0].strip() for line in lines] == [
            *["missing"] * each,
            "mismatched",
            *["unexpected"] * each,
        ]
        assert ("and 27 more" in lines[0]) == (number == 30)
        assert f"in {2 * number + 1} places" in caught.value.message


def test_a_pattern_that_matches_nothing_comes_before_what_it_may_explain() -> None:
    many = [f"n{number}" for number in range(30)]
    with pytest.raises(MismatchError) as caught:
        require_fit([asked(0, missing=many)], [], ["only: the pattern 'b*' matches nothing"], (), "here")
    assert caught.value.message.splitlines()[1] == "  only: the pattern 'b*' matches nothing"
    with pytest.raises(MismatchError):
        require_fit([asked(0)], [], ["only: the pattern 'b*' matches nothing"], ("*",), "here")


def test_a_pattern_means_names_as_they_are_spelled() -> None:
    assert matches("model/W.a", ["*/W.*"])
    assert not matches("model/w.a", ["*/W.*"])


def test_only_rounding_may_be_lost_in_a_conversion() -> None:
    for dtype in ITEMSIZE:
        assert converts(dtype, dtype)
        assert dtype == "bool" or not converts(dtype, "bool")
    for saved, target in (
        ("float64", "float8_e4m3fn"),
        ("bfloat16", "float16"),
        ("int64", "bfloat16"),
        ("bool", "uint8"),
        ("uint8", "int16"),
        ("int8", "int64"),
        ("complex128", "complex64"),
    ):
        assert converts(saved, target), (saved, target)
    for saved, target in (
        ("float32", "int64"),
        ("int64", "int32"),
        ("uint8", "int8"),
        ("int8", "uint64"),
        ("complex64", "float32"),
        ("float32", "complex64"),
        ("float4_e2m1fn_x2", "float32"),
        ("float32", "float8_e8m0fnu"),
        ("complex32", "complex64"),
    ):
        assert not converts(saved, target), (saved, target)
