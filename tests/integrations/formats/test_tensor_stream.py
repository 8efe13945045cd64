from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reknit
from reknit.integrations.formats.export import cut_boxes, stream, tensors_of
from reknit.types.shard import TensorSpec
from tests.forged import rewritten, with_value
from tests.integrations.formats.checkpoints import columns, damage, save_in_boxes

if TYPE_CHECKING:
    from pathlib import Path

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@given(shape=shapes, numel=st.integers(1, 50))
def test_boxes_laid_end_to_end_are_the_tensor_in_row_major_order(shape: tuple[int, ...], numel: int) -> None:
    array = np.arange(prod(shape), dtype=np.int32).reshape(shape)
    boxes = list(cut_boxes(TensorSpec(shape, "int32"), 4 * numel))
    assert all(0 < box.numel <= numel for box in boxes)
    laid = [array[box.slices()].reshape(-1) for box in boxes]
    assert np.array_equal(np.concatenate([np.zeros(0, np.int32), *laid]), array.reshape(-1))


def test_cuts_lie_between_whole_rows_where_these_fit() -> None:
    boxes = list(cut_boxes(TensorSpec((10, 3, 5), "uint8"), 40))
    assert [box.lengths for box in boxes] == [(2, 3, 5)] * 5


def test_stream_of_tensors_in_many_chunks_gives_their_elements_in_order(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = {
        "wide": random.standard_normal((50, 301)),
        "half": random.standard_normal((33, 64)).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float32(2.5).reshape(()),
        "z": random.standard_normal((7, 9)).astype(np.complex128),
    }
    boxes = {"wide": columns((50, 301), 7), "half": columns((33, 64), 4)}
    save_in_boxes(tmp_path / "c", arrays, boxes)
    names = ["z", "wide", "empty", "scalar", "half"]
    for nbytes in (1000, 4096, 1 << 20):
        with tensors_of(tmp_path / "c") as checkpoint:
            numbers = [checkpoint.index.ids["model", name] for name in names]
            pieces = list(stream(checkpoint, numbers, nbytes))
        assert max(piece.data.nbytes for piece in pieces) <= max(nbytes, 16)
        for name, number in zip(names, numbers, strict=True):
            found = b"".join(piece.data.tobytes() for piece in pieces if piece.number == number)
            assert found == arrays[name].tobytes(), name
        order = list(dict.fromkeys(piece.number for piece in pieces))
        assert order == [number for number in numbers if number != checkpoint.index.ids["model", "empty"]]


def test_damaged_bytes_are_an_error_and_not_data(tmp_path: Path) -> None:
    save_in_boxes(tmp_path / "c", {"w": np.ones(1000, np.float32)}, {})
    damage(tmp_path / "c")
    with tensors_of(tmp_path / "c") as checkpoint, pytest.raises(reknit.CorruptError, match="model/w"):
        list(stream(checkpoint, [0]))


def test_a_tensor_that_the_files_do_not_cover_is_refused(tmp_path: Path) -> None:
    save_in_boxes(tmp_path / "c", {"w": np.ones(1000, np.float32)}, {})
    rewritten(tmp_path / "c", lambda table: with_value(table, "shape", [1001]))
    with tensors_of(tmp_path / "c") as checkpoint, pytest.raises(reknit.CorruptError, match="model/w"):
        list(stream(checkpoint, [0]))


def test_pickled_values_are_no_obstacle_to_tensors(tmp_path: Path) -> None:
    state = {"model": {"w": np.arange(4)}, "extra": {"odd": Odd(3)}}
    reknit.save(tmp_path / "c", state, options=reknit.SaveOptions(allow_pickle=True))
    with tensors_of(tmp_path / "c") as checkpoint:
        (piece,) = stream(checkpoint, [checkpoint.index.ids["model", "w"]])
    assert piece.data.tolist() == [0, 1, 2, 3]


class Odd:
    """A type that only pickle can store."""

    def __init__(self, value: int) -> None:
        self.value = value
