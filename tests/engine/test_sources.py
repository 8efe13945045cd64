"""Memory of every kind is copied into a file bit for bit, in any range of the file."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.engine.memory.elements import bits
from reknit.engine.memory.images import Entries, Image, Sources
from reknit.types.box import Box
from reknit.types.shard import Strided, WriteEntry
from tests.running.cases import one_by_one
from tests.running.examples import examples

FLAT = torch.arange(400, dtype=torch.float32)

MEMORIES: dict[str, tuple[Any, bool]] = {
    "tensor": (torch.randn(6, 7), True),
    "parameter": (torch.nn.Parameter(torch.randn(9)), True),
    "bfloat16": (torch.randn(5, 4).bfloat16(), True),
    "complex": (torch.randn(3, dtype=torch.complex128), True),
    "scalar": (torch.tensor(7.0), True),
    "part of a tensor": (torch.arange(40)[8:16], True),
    "transposed": (torch.randn(6, 7).t(), False),
    "every second": (torch.arange(40)[::2], False),
    "NumPy": (np.arange(30, dtype=np.int16).reshape(5, 6), True),
    "NumPy, transposed": (np.arange(30, dtype=np.int16).reshape(5, 6).T, False),
    "flat memory": (Strided(FLAT, (4, 5), (5, 1), 30), True),
    "columns of flat memory": (Strided(FLAT, (4, 5), (1, 4), 100), False),
}
"""Memory, and whether it is one run."""


def values(memory: Any) -> Any:
    return bits(memory.view() if isinstance(memory, Strided) else memory)


def test_one_run_of_host_memory_has_an_address_and_nothing_else_has() -> None:
    for name in one_by_one(MEMORIES):
        memory, is_run = MEMORIES[name]
        sources = Sources([torch.zeros(2), memory])
        address = sources.addresses.tolist()[1]
        if is_run:
            view = values(memory)
            assert address == view.__array_interface__["data"][0]
        else:
            assert address == 0
        assert sources[1].tobytes() == values(memory).tobytes()
        assert sources.on_devices == []


def test_memory_on_a_device_has_no_address_and_can_be_exchanged_for_a_copy() -> None:
    away = torch.zeros(3, device="meta")
    sources = Sources([torch.ones(4), away, np.zeros(2)])
    assert sources.addresses[1] == 0
    assert [tuple(source.shape) for source in sources.on_devices] == [(3,)]
    other = np.arange(3, dtype=np.int32)
    changed = sources.instead({1: other})
    assert changed[1] is other
    assert sources[1] is not other
    assert changed.addresses.tolist() == sources.addresses.tolist()


def test_memory_that_is_copied_stays_until_it_is_though_its_tensor_gets_other_memory() -> None:
    parameter = torch.nn.Parameter(torch.full((1 << 20,), 7.0))
    entries = Entries.of([WriteEntry(0, 0, 1 << 20, Box((0,), (1 << 20,)), 0, 4 << 20)])
    image = Image("a/x", b"", entries, 4 << 20, Sources([parameter]))
    out = np.zeros(4 << 20, np.uint8)
    image.fill(0, out[: 2 << 20])
    parameter.data = torch.zeros(3)
    others = [torch.zeros(1 << 20) for _ in range(8)]  # they would get the memory if it were freed
    image.fill(2 << 20, out[2 << 20 :])
    assert others
    assert (out.view(np.float32) == 7.0).all()


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.sampled_from(sorted(MEMORIES)), st.booleans()), min_size=1, max_size=12),
    st.integers(0, 200),
    st.data(),
)
def test_every_range_of_a_file_is_filled_with_its_bytes(
    chosen: list[tuple[str, bool]], num_header: int, data: st.DataObject
) -> None:
    # 16 bytes are whole elements of every kind, as pieces of files are.
    chosen.sort(key=lambda one: -values(MEMORIES[one[0]][0]).itemsize)
    header, parts, entries, start = bytes(range(num_header % 13)) * 16, [], [], 0
    for number, (name, whole) in enumerate(chosen):
        view = values(MEMORIES[name][0])
        first = 0 if whole else view.size // 2
        numel = view.size - first
        nbytes = numel * view.itemsize
        parts.append(view.reshape(-1)[first:].tobytes())
        entries.append(WriteEntry(number, first, numel, Box((), ()), start, nbytes))
        start += nbytes
    # A tensor without elements has an entry, too.
    entries.insert(1, WriteEntry(0, 0, 0, Box((0,), (0,)), entries[0].nbytes, 0))
    expected = header + b"".join(parts)
    sources = Sources(MEMORIES[name][0] for name, _ in chosen)
    image = Image("a/x", header, Entries.of(entries), len(expected), sources)
    ends = sorted({0, len(expected), *(len(header) + entry.start for entry in entries)})
    low, high = sorted(data.draw(st.tuples(st.sampled_from(ends), st.sampled_from(ends))))
    out = np.full(high - low + 2, 99, np.uint8)
    image.fill(low, out[1:-1])
    assert out[1:-1].tobytes() == expected[low:high]
    assert (out[0], out[-1]) == (99, 99), "no byte beside it"
