from __future__ import annotations

import subprocess
import sys
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reknit.engine.memory import devices
from reknit.engine.memory.devices import Staging, changes
from reknit.engine.memory.elements import bits, convert, deliver, stage
from reknit.engine.memory.images import Sources
from reknit.types.box import Box
from reknit.types.dtype import ITEMSIZE, numpy_dtype
from reknit.types.shard import Shard as Held
from reknit.types.shard import Strided, TensorSpec
from tests.running.cases import one_by_one

TORCH_DTYPES = [name for name in ITEMSIZE if hasattr(torch, name)]


def strides_of(lengths: tuple[int, ...], itemsize: int) -> list[int]:
    return [itemsize * prod(lengths[d + 1 :]) for d in range(len(lengths))]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_torch_dtype_passes_through_bytes_unchanged() -> None:
    for name in one_by_one(TORCH_DTYPES):
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


def test_rectangles_of_one_flat_memory_are_the_bits_of_each() -> None:
    for name in one_by_one(["float32", "bfloat16", "int64", "complex128"]):
        memory = torch.arange(40).to(getattr(torch, name))[3:]
        ties: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [
            ((2, 5), (5, 1), 0),
            ((1, 3), (3, 1), 10),
            ((4, 2), (1, 4), 20),
            ((), (), 36),
            ((0, 2), (2, 1), 9),
        ]
        spec = TensorSpec((40, 40), name)
        shards = [
            Held(
                "m",
                "w",
                spec,
                Box((0,) * len(lengths), lengths),
                (0,),
                Strided(memory, lengths, strides, first),
            )
            for lengths, strides, first in ties
        ]
        shards.append(Held("m", "v", spec, Box((0,), (37,)), (0,), memory))
        for source, shard in zip(Sources(shard.memory for shard in shards), shards, strict=True):
            assert isinstance(source, np.ndarray)
            assert source.tobytes() == bits(shard.data).tobytes()
            assert source.shape == shard.box.lengths
            assert not source.size or np.shares_memory(source, bits(memory))
        (source,) = Sources([Strided(memory.to("meta"), (3,), (2,), 4)])
        assert (tuple(source.shape), source.stride(), source.storage_offset()) == ((3,), (2,), 4)


def test_a_cast_rounds_to_nearest_even_as_torch_does() -> None:
    for target_kind in one_by_one(["torch", "numpy"]):
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


def test_what_has_no_dimensions_reaches_a_tensor_that_is_no_host_array() -> None:
    for source in one_by_one([torch.tensor(3.5), torch.tensor(3.5, dtype=torch.float64)]):
        raw = bits(source)
        held = np.frombuffer(bytearray(raw.tobytes()), np.uint8)
        # The target is a tensor of bit patterns, as it is on a device.
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


def test_bytes_from_the_host_are_there_at_once_and_nothing_imports_torch() -> None:
    code = (
        "import sys, numpy; from reknit.engine.memory.devices import Staging, changes;"
        "data = numpy.arange(4, dtype='u1'); out = numpy.zeros(2, 'u1');"
        "save = Staging([data]); save.add(data, 1, 2, out); assert out.tolist() == [1, 2]; save.wait(1);"
        "assert not save.under_way() and changes(data) is None and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_devices_without_streams_are_staged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # The meta device stands for any that has none.
    staged: list[Any] = []
    monkeypatch.setattr(devices, "stage", lambda *call: staged.append(call))
    source, out = torch.empty(4, dtype=torch.int32, device="meta"), np.empty(8, np.uint8)
    Staging([source]).add(source, 1, 2, out)
    assert staged == [(source, 1, 2, out)]


def test_a_change_is_noticed_through_every_view_of_a_tensor() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    views = [parameter, parameter.detach(), parameter.detach().view(torch.int32).narrow(0, 1, 2)]
    before = [changes(view) for view in views]
    with torch.no_grad():
        parameter.add_(1)
    between = [changes(view) for view in views]
    with torch.inference_mode():
        parameter[0].copy_(torch.ones(4))
    after = [changes(view) for view in views]
    assert before[0] is not None
    assert len({tuple(set(now)) for now in (before, between, after)}) == 3
    assert all(len(set(now)) == 1 for now in (before, between, after))


def test_nothing_is_known_about_what_counts_no_changes() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
    assert changes(tensor) is None
    assert changes(tensor.detach()) is None
    assert changes(np.zeros(3)) is None
    assert changes(SimpleNamespace(_version=1)) is None
