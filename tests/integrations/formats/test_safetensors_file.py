from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from reknit.errors import MismatchError
from reknit.integrations.hugging_face import safetensors
from reknit.integrations.hugging_face.safetensors import (
    CODES,
    Stored,
    check_storable,
    encode_header,
    in_file_order,
)
from reknit.types.dtype import ITEMSIZE
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from pathlib import Path


def test_safetensors_reads_every_dtype_that_has_a_code(tmp_path: Path) -> None:
    for dtype in CODES:
        tensor = Stored("x", TensorSpec((3, 2), dtype))
        check_storable(tensor)
        data = bytes(range(tensor.spec.nbytes)) if dtype != "bool" else bytes(tensor.spec.nbytes)
        (tmp_path / "f").write_bytes(encode_header([tensor], {"format": "pt"}) + data)
        with safe_open(tmp_path / "f", "pt") as file:
            read = file.get_tensor("x")
        assert (str(read.dtype), tuple(read.shape)) == (f"torch.{dtype}", (3, 2))


def test_a_dtype_without_a_code_and_the_name_of_the_metadata_are_refused() -> None:
    specs = [TensorSpec((3,), dtype) for dtype in sorted(set(ITEMSIZE) - set(CODES))]
    for spec in (*specs, TensorSpec((), "float4_e2m1fn_x2")):
        with pytest.raises(MismatchError, match=r"'layer\.odd'"):
            check_storable(Stored("layer.odd", spec))
    with pytest.raises(MismatchError, match="__metadata__"):
        check_storable(Stored("__metadata__", TensorSpec((1,), "int8")))


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name.isprintable()),
        st.tuples(st.lists(st.integers(0, 3), max_size=3).map(tuple), st.sampled_from(sorted(ITEMSIZE))),
        max_size=8,
    )
)
def test_tensors_in_file_order_lie_without_holes_and_aligned(
    tensors: dict[str, tuple[tuple[int, ...], str]],
) -> None:
    stored = [
        Stored(name, TensorSpec(shape, dtype))
        for name, (shape, dtype) in tensors.items()
        if dtype in CODES and (shape or dtype != "float4_e2m1fn_x2")
    ]
    data = encode_header(in_file_order(stored), {"format": "pt"})
    assert len(data) % 8 == 0
    assert int.from_bytes(data[:8], "little") == len(data) - 8
    header = json.loads(data[8:])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert set(header) == {tensor.name for tensor in stored}
    specs = {tensor.name: tensor.spec for tensor in stored}
    end = 0
    for name, entry in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        assert start == end
        assert stop - start == specs[name].nbytes
        assert start % specs[name].itemsize == 0
        end = stop


def test_a_header_that_readers_refuse_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "MAX_HEADER_NBYTES", 200)
    tensors = [Stored(f"name{k}", TensorSpec((1,), "int8")) for k in range(10)]
    with pytest.raises(MismatchError, match="10 tensors"):
        encode_header(tensors, {})
