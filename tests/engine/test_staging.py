from __future__ import annotations

import logging
import subprocess
import sys
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from reknit.engine.memory import staging
from reknit.engine.memory.elements import bits, contiguous_bytes, convert, deliver, stage
from reknit.engine.memory.sources import Sources
from reknit.engine.memory.staging import Staging, changes, pin
from reknit.types.box import Box
from reknit.types.dtype import ITEMSIZE, numpy_dtype
from reknit.types.shard import Shard as Held
from reknit.types.shard import Strided, TensorSpec
from tests.devices import on_cuda
from tests.engine.queued_device import Away, install

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tests.engine.queued_device import Queues

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


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "complex128"])
def test_rectangles_of_one_flat_memory_are_the_bits_of_each(name: str) -> None:
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
            "m", "w", spec, Box((0,) * len(lengths), lengths), (0,), Strided(memory, lengths, strides, first)
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


def test_a_rectangle_whose_rows_have_holes_goes_to_a_dense_target() -> None:
    chunk = np.arange(48, dtype=np.int64).reshape(6, 8)
    target = np.zeros((6, 3), np.int64)
    deliver(chunk.view(np.uint8).reshape(-1)[8:], (6, 3), (64, 16), bits(target))
    assert np.array_equal(target, chunk[:, 1:6:2])


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


# A CUDA device in a queue: what is sent to it runs when something waits for it, and not before.


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queues]:
    yield from install(monkeypatch)


def nbytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return np.zeros(tensor.nbytes, np.uint8)


def test_bytes_from_a_device_are_there_after_the_wait_and_not_before(device: Queues) -> None:
    live = torch.arange(1, 7, dtype=torch.float32)
    out, save = nbytes_of(live), Staging()
    save.add(device.away(live), 0, 6, out)
    assert not out.any()
    save.wait()
    assert out.view(np.float32).tolist() == live.tolist()


def test_bytes_from_the_host_are_there_at_once() -> None:
    save, out = Staging(), np.empty(8, np.uint8)
    save.add(bits(np.arange(4, dtype=np.int32)), 1, 2, out)
    assert out.view(np.int32).tolist() == [1, 2]
    save.wait()


def test_other_accelerators_are_staged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # The meta device stands for any that is neither the host nor CUDA.
    staged: list[Any] = []
    monkeypatch.setattr(staging, "stage", lambda *call: staged.append(call))
    source, out = torch.empty(4, dtype=torch.int32, device="meta"), np.empty(8, np.uint8)
    Staging([source]).add(source, 1, 2, out)
    assert staged == [(source, 1, 2, out)]


def test_a_copy_has_what_was_queued_before_the_save_and_nothing_later(device: Queues) -> None:
    live = torch.zeros(3)
    source, out = device.away(live), nbytes_of(live)
    device.send(lambda: live.fill_(1))
    save = Staging([source])
    device.send(lambda: live.fill_(2))
    save.add(source, 0, 3, out)
    save.wait()
    assert out.view(np.float32).tolist() == [1, 1, 1]
    assert len(device.compute.work) == 1  # what came later was not waited for


def test_a_source_that_was_not_named_is_copied_after_what_was_queued_before_its_first_copy(
    device: Queues,
) -> None:
    live = torch.zeros(3)
    device.send(lambda: live.fill_(1))
    out, save = nbytes_of(live), Staging()
    save.add(device.away(live), 0, 3, out)
    save.wait()
    assert out.view(np.float32).tolist() == [1, 1, 1]


def test_saves_share_the_stream_of_a_device_and_wait_for_their_own_copies_only(device: Queues) -> None:
    live = torch.ones(2)
    source, outs, saves = device.away(live), [nbytes_of(live), nbytes_of(live)], [Staging(), Staging()]
    for save, out in zip(saves, outs, strict=True):
        save.add(source, 0, 2, out)
    saves[0].wait()
    assert [out.any() for out in outs] == [True, False]
    assert len({stream for _, stream in device.kept}) == 1


def test_the_waiting_thread_sleeps_and_freed_memory_is_kept_until_it_was_copied(device: Queues) -> None:
    live = torch.ones(2)
    save = Staging()
    save.add(device.away(live), 0, 2, nbytes_of(live))
    assert device.kept == [(live.data_ptr(), staging.side_stream(device.away(live).device))]
    save.wait()
    assert device.current is device.compute


@given(
    st.lists(st.integers(1, 5), max_size=4).map(tuple),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]),
    st.integers(1, 200),
    st.data(),
)
def test_any_flat_range_of_any_strided_tensor_on_a_device_is_staged_in_row_major_order(
    shape: tuple[int, ...], dtype: torch.dtype, budget: int, data: st.DataObject
) -> None:
    axes = data.draw(st.permutations(range(len(shape))))
    live = torch.arange(prod(shape)).reshape(shape).to(dtype).permute(axes)
    first = data.draw(st.integers(0, live.numel() - 1))
    numel = data.draw(st.integers(1, live.numel() - first))
    out = np.empty(live.element_size() * numel, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "GATHER_NBYTES", budget)
        queues = next(device.__wrapped__(patch))  # type: ignore[attr-defined]
        save = Staging()
        save.add(queues.away(live), first, numel, out)
        save.wait()
    expected = live.reshape(-1)[first : first + numel].contiguous()
    assert out.tobytes() == bytes(expected.view(torch.uint8).tolist())
    assert all(nbytes <= max(budget, live.element_size()) for nbytes, _ in queues.taken)
    assert all(stream is not queues.compute for _, stream in queues.taken)


def test_a_range_of_a_contiguous_tensor_is_one_copy_without_memory_on_the_device(device: Queues) -> None:
    source = device.away(torch.arange(60).reshape(3, 4, 5))
    save = Staging([source])
    stream = staging.side_stream(source.device)
    before = len(stream.work)
    save.add(source, 7, 40, out := np.zeros(320, np.uint8))
    assert len(stream.work) - before == 2  # the copy and its mark
    assert device.taken == []
    save.wait()
    assert out.view(np.int64).tolist() == list(range(7, 47))


def test_copies_that_were_queued_before_an_error_are_waited_for(
    device: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = torch.arange(1, 7, dtype=torch.int32).reshape(2, 3).t()
    out, save = nbytes_of(live), Staging()
    monkeypatch.setattr(staging, "GATHER_NBYTES", 8)
    contiguous, calls = torch.Tensor.contiguous, iter([1])

    def full(tensor: Any) -> Any:
        if next(calls, None) is None:
            raise torch.OutOfMemoryError
        return contiguous(tensor)

    monkeypatch.setattr(Away, "contiguous", full)
    with pytest.raises(torch.OutOfMemoryError):
        save.add(device.away(live), 0, 6, out)
    save.wait()
    assert out.view(np.int32).tolist() == [1, 4, 0, 0, 0, 0]
    assert device.current is device.compute


# Pinning.


class Runtime:
    """The CUDA runtime, with the answers that it gives."""

    def __init__(self, register: int = 0, unregister: int = 0) -> None:
        self.answers = {"register": register, "unregister": unregister}
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append((address, nbytes))
        return self.answers["register"]

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append((address,))
        return self.answers["unregister"]


def in_use(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> list[str]:
    """Let CUDA look as if it were in use; return what is launched on it."""
    launched: list[str] = []

    def ones(numel: int, *, device: str) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: the one that was left behind")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", ones)
    staging.log_refused.cache_clear()
    return launched


def test_memory_is_registered_whole_and_unregistered_where_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, memory = Runtime(), np.zeros(1000, np.uint8)
    launched = in_use(monkeypatch, runtime)
    unpin = pin(memory)
    assert unpin is not None
    assert runtime.calls == [(memory.ctypes.data, 1000)]
    unpin()
    assert runtime.calls[1:] == [(memory.ctypes.data,)]
    assert launched == []


def test_a_driver_that_refuses_is_told_once_and_its_error_reaches_no_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched = in_use(monkeypatch, Runtime(register=2))
    with caplog.at_level(logging.WARNING, "reknit"):
        assert pin(np.zeros(8, np.uint8)) is None
        assert pin(np.zeros(8, np.uint8)) is None
    assert launched == ["cuda", "cuda"]
    assert [record.message for record in caplog.records] == [
        "could not pin the memory that saves are staged in, so copies to it are slower: "
        "the CUDA driver answered with error 2"
    ]


def test_memory_that_cannot_be_unpinned_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched = in_use(monkeypatch, Runtime(unregister=713))
    unpin = pin(np.zeros(8, np.uint8))
    assert unpin is not None
    with caplog.at_level(logging.WARNING, "reknit"):
        unpin()
    assert launched == ["cuda"]
    assert "could not unpin" in caplog.text


def test_no_memory_is_never_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(register=1)
    in_use(monkeypatch, runtime)
    assert pin(np.zeros(0, np.uint8)) is None
    assert runtime.calls == []


def test_pinning_neither_imports_torch_nor_starts_cuda() -> None:
    code = (
        "import sys, numpy; from reknit.engine.memory.staging import Staging, changes, pin;"
        "data = numpy.zeros(4, 'u1'); save = Staging([data]); save.add(data, 0, 4, data.copy()); save.wait();"
        "assert pin(data) is None and changes(data) is None and 'torch' not in sys.modules;"
        "import torch; assert pin(data) is None and not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# What torch notices of changes in place.


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


def test_reading_a_tensor_changes_nothing() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    before = changes(parameter)
    torch.autograd.grad((parameter * 2).sum(), parameter)
    stage(bits(parameter), 0, 4, np.empty(16, np.uint8))
    assert changes(parameter) == before


def stepped(optimizer: type[Any], parameters: list[Any], **options: Any) -> dict[str, bool]:
    """Take steps; return what a step changed, and whether that was noticed."""
    made = optimizer(parameters, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    live = {"parameter": parameters[0], **made.state[parameters[0]]}
    with torch.no_grad():
        local = {name: getattr(t, "to_local", lambda t=t: t)().detach() for name, t in live.items()}
    before = {name: (changes(tensor), tensor.clone()) for name, tensor in local.items()}
    made.step()
    return {
        name: changes(tensor) != before[name][0]
        for name, tensor in local.items()
        if not torch.equal(tensor, before[name][1])
    }


@pytest.mark.parametrize("mode", [{"foreach": False}, {"foreach": True}])
def test_steps_of_an_optimizer_are_noticed_in_parameters_and_states(mode: dict[str, bool]) -> None:
    noticed = stepped(torch.optim.AdamW, [torch.nn.Parameter(torch.ones(4))], **mode)
    assert noticed == {"parameter": True, "step": True, "exp_avg": True, "exp_avg_sq": True}


def test_steps_of_a_fused_optimizer_are_noticed_in_the_counter_only() -> None:
    noticed = stepped(torch.optim.AdamW, [torch.nn.Parameter(torch.ones(4))], fused=True)
    assert noticed == {"parameter": False, "step": True, "exp_avg": False, "exp_avg_sq": False}


@pytest.fixture
def mesh() -> Iterator[Any]:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("mode", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_steps_on_dtensors_are_not_noticed_in_their_local_tensors(mesh: Any, mode: dict[str, bool]) -> None:
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    noticed = stepped(torch.optim.AdamW, [parameter], **mode)
    assert noticed == {"parameter": False, "step": True, "exp_avg": False, "exp_avg_sq": False}


def test_changes_behind_the_back_of_torch_are_not_noticed() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    norm = torch.nn.BatchNorm1d(4)
    before = changes(parameter), changes(norm.running_mean)
    parameter.data.add_(1)
    parameter.detach().numpy()[:] += 1
    norm(torch.randn(8, 4))
    assert (changes(parameter), changes(norm.running_mean)) == before


def test_nothing_is_known_about_what_counts_no_changes() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
    assert changes(tensor) is None
    assert changes(tensor.detach()) is None
    assert changes(np.zeros(3)) is None
    assert changes(SimpleNamespace(_version=1)) is None


# On a device.


@pytest.fixture
def pinned() -> Iterator[NDArray[np.uint8]]:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    memory = np.zeros(1 << 20, np.uint8)
    unpin = pin(memory)
    assert unpin is not None
    yield memory
    torch.cuda.synchronize()
    unpin()


SLEEP_CYCLES = 2_000_000_000
"""A second or more of nothing, on any GPU."""


@on_cuda
def test_registered_memory_is_pinned_for_torch_until_it_is_unregistered() -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    memory = np.zeros(1 << 20, np.uint8)
    unpin = pin(memory)
    assert unpin is not None
    assert torch.from_numpy(memory[4096:8192]).is_pinned()
    unpin()
    assert not torch.from_numpy(memory).is_pinned()


@on_cuda
def test_kernels_go_on_after_the_driver_refused_to_pin(pinned: NDArray[np.uint8]) -> None:
    assert pin(pinned) is None  # it is registered already
    assert torch.ones(3, device="cuda").sum().item() == 3


@on_cuda
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_passes_from_a_gpu_unchanged(
    pinned: NDArray[np.uint8], name: str, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "GATHER_NBYTES", 1000)
    itemsize = ITEMSIZE[name]
    raw = torch.randint(0, 2 if name == "bool" else 255, (32 * 24 * itemsize,), dtype=torch.uint8)
    host = raw.view(getattr(torch, name)).view(32, 24)
    live = host.cuda().t() if transposed else host.cuda()
    expected = (host.t() if transposed else host).contiguous().view(torch.uint8).flatten().numpy()
    save, numel = Staging(), live.numel() - 30
    pageable = np.zeros(numel * itemsize, np.uint8)
    save.add(bits(live), 7, numel, pinned[: numel * itemsize])
    save.add(bits(live), 7, numel, pageable)
    save.wait()
    assert np.array_equal(pinned[: numel * itemsize], expected[7 * itemsize :][: numel * itemsize])
    assert np.array_equal(pageable, expected[7 * itemsize :][: numel * itemsize])


@on_cuda
def test_a_gpu_is_copied_after_earlier_work_and_beside_later_work(pinned: NDArray[np.uint8]) -> None:
    live, other = torch.zeros(1000, device="cuda"), torch.zeros(1, device="cuda")
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    live.fill_(1)
    save = Staging([bits(live)])
    torch.cuda._sleep(4 * SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    other.fill_(1)
    later = torch.cuda.Event()  # type: ignore[no-untyped-call]
    later.record()
    save.add(bits(live), 0, 1000, pinned[:4000])
    save.wait()
    assert (pinned[:4000].view(np.float32) == 1).all()
    assert not later.query()  # type: ignore[no-untyped-call]


@on_cuda
def test_memory_of_a_gpu_that_is_freed_too_early_is_not_given_away(pinned: NDArray[np.uint8]) -> None:
    live = torch.ones(1000, device="cuda")
    address, save = live.data_ptr(), Staging([bits(live)])
    with torch.cuda.stream(staging.side_stream(live.device)):
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    save.add(bits(live), 0, 1000, pinned[:4000])
    del live
    assert torch.full((1000,), 2.0, device="cuda").data_ptr() != address
    save.wait()
    assert (pinned[:4000].view(np.float32) == 1).all()


@on_cuda
def test_steps_on_a_gpu_are_noticed_as_on_the_host() -> None:
    for mode, noticed in (({"foreach": True}, True), ({"fused": True}, False)):
        parameter = torch.nn.Parameter(torch.ones(4, device="cuda"))
        assert stepped(torch.optim.AdamW, [parameter], **mode)["exp_avg"] is noticed
