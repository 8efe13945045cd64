from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reknit.engine.staging import bits, contiguous_bytes, convert, deliver, stage
from reknit.types.dtype import ITEMSIZE, numpy_dtype

TORCH_DTYPES = [name for name in ITEMSIZE if hasattr(torch, name)]


def strides_of(lengths: tuple[int, ...], itemsize: int) -> list[int]:
    return [itemsize * prod(lengths[d + 1 :]) for d in range(len(lengths))]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_torch_dtype_passes_through_bytes_unchanged(name: str) -> None:
    itemsize = ITEMSIZE[name]
    raw = torch.arange(24 * itemsize, dtype=torch.uint8) % 2 if name == "bool" else None
    raw = torch.randint(0, 255, (24 * itemsize,), dtype=torch.uint8) if raw is None else raw
    tensor = raw.view(getattr(torch, name)).view(2, 3, 4).transpose(0, 2)
    assert not tensor.is_contiguous()
    out = np.empty(24 * itemsize, np.uint8)
    stage(bits(tensor), 0, 24, out)
    assert out.tobytes() == bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
    target = (
        torch.empty((24 * itemsize,), dtype=torch.uint8)
        .view(getattr(torch, name))
        .view(4, 2, 3)
        .transpose(1, 2)
    )
    deliver(out, (4, 3, 2), strides_of((4, 3, 2), itemsize), bits(target))
    assert torch.equal(
        target.contiguous().view(torch.uint8).flatten(), tensor.contiguous().view(torch.uint8).flatten()
    )


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_any_flat_range_of_any_strided_array_is_staged_in_row_major_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    axes = data.draw(st.permutations(range(len(shape))))
    array = np.arange(prod(shape), dtype=np.int32).reshape(shape).transpose(axes)
    first = data.draw(st.integers(0, array.size - 1))
    numel = data.draw(st.integers(1, array.size - first))
    out = np.empty(4 * numel, np.uint8)
    stage(bits(array), first, numel, out)
    assert out.view(np.int32).tolist() == array.reshape(-1)[first : first + numel].tolist()


def test_nan_payloads_negative_zero_and_subnormals_survive() -> None:
    patterns = np.array([0x7FC12345, 0xFFC00001, 0x7F800001, 0x80000000, 0x00000001], np.uint32)
    tensor = torch.from_numpy(patterns.view(np.float32))
    out = np.empty(20, np.uint8)
    stage(bits(tensor), 0, 5, out)
    target = torch.zeros(5)
    deliver(out, (5,), (4,), bits(target))
    assert target.numpy().view(np.uint32).tolist() == patterns.tolist()


def test_bits_shares_memory_and_needs_no_gradient_context() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    view = bits(parameter)
    view[0] = 0x3F800000
    assert parameter[0].item() == 1.0
    assert contiguous_bytes(view) is not None
    assert contiguous_bytes(bits(torch.zeros(4, 4).t())) is None


@pytest.mark.parametrize("target_kind", ["torch", "numpy"])
def test_a_cast_rounds_to_nearest_even_as_torch_does(target_kind: str) -> None:
    source = torch.randn(1000).mul_(3)
    expected = source.to(torch.bfloat16)
    raw = source.numpy().view(np.uint8)
    if target_kind == "torch":
        target: Any = torch.empty(1000, dtype=torch.bfloat16)
        convert(raw, "float32", (1000,), (4,), target)
        assert torch.equal(target, expected)
    else:
        target = np.empty(1000, numpy_dtype("bfloat16"))
        convert(raw, "float32", (1000,), (4,), target)
        assert np.array_equal(target.view(np.int16), expected.view(torch.int16).numpy())


def test_a_strided_rectangle_of_bytes_goes_to_a_transposed_target() -> None:
    chunk = np.arange(48, dtype=np.int64).reshape(6, 8)
    target = np.zeros((3, 2), np.int64, order="F")
    raw = chunk.view(np.uint8).reshape(-1)[(2 * 8 + 5) * 8 :]
    deliver(raw, (3, 2), (64, 8), bits(target))
    assert np.array_equal(target, chunk[2:5, 5:7])


@pytest.mark.parametrize("source", [torch.tensor(3.5), torch.tensor(3.5, dtype=torch.float64)])
def test_what_has_no_dimensions_reaches_a_tensor_that_is_no_host_array(source: torch.Tensor) -> None:
    raw = bits(source)
    held = np.frombuffer(bytearray(raw.tobytes()), np.uint8)
    # Given as a tensor of bit patterns, as one on a device is.
    target = torch.zeros((), dtype=torch.int32 if raw.itemsize == 4 else torch.int64)
    deliver(held, (), (), target)
    assert target.numpy().tobytes() == raw.tobytes()
    for dtype in (torch.float32, torch.bfloat16):
        other = torch.zeros((), dtype=dtype)
        convert(held, str(source.dtype).removeprefix("torch."), (), (), other)
        assert other == 3.5
    array = np.zeros((), np.float16)
    convert(held, str(source.dtype).removeprefix("torch."), (), (), array)
    assert array == 3.5


def test_nothing_is_staged_of_an_empty_tensor_that_is_no_host_array() -> None:
    stage(torch.zeros((0, 3), dtype=torch.int32), 0, 0, np.empty(0, np.uint8))
