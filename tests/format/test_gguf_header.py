"""The header of GGUF, written here by its documentation."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.errors import FormatError
from reknit.integrations.numpy_gguf.files import read_gguf_header
from tests.format.samples import taken

if TYPE_CHECKING:
    from pathlib import Path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(values: dict[str, bytes], tensors: list[tuple[str, tuple[int, ...], int, int]]) -> bytes:
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    for key, value in values.items():
        data += text(key) + value
    for name, shape, kind, offset in tensors:
        data += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)
    return data + bytes(-len(data) % 64)


VALUES = {
    "general.alignment": struct.pack("<II", 4, 64),
    "general.name": struct.pack("<I", 8) + text("tiny"),
    "tokens": struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"),
    "scores": struct.pack("<IIQ2f", 9, 6, 2, 0.5, 1.5),
    "flag": struct.pack("<I?", 7, True),
}


def read(data: bytes) -> Any:
    return read_gguf_header(lambda start, nbytes: data[start : start + nbytes], len(data))


def test_a_file_is_opened_with_its_metadata_and_its_blocks(tmp_path: Path) -> None:
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    blocks = np.arange(2 * 34, dtype=np.uint8).reshape(2, 34)
    data = header(VALUES, [("w", (3, 4), 0, 0), ("q", (2, 32), 8, 64)])
    (tmp_path / "a.gguf").write_bytes(data + w.tobytes().ljust(64, b"\0") + blocks.tobytes())
    with reknit.open(tmp_path / "a.gguf") as checkpoint:
        assert np.array_equal(checkpoint.read("model", "w"), w)
        assert np.array_equal(checkpoint.read("model", "w", (1, slice(1, 3))), w[1, 1:3])
        assert np.array_equal(checkpoint.read("model", "q"), blocks)
        assert checkpoint.values["gguf"]["tokens"] == ["a", "b"]
        assert checkpoint.values["gguf"]["scores"] == [0.5, 1.5]
        assert checkpoint.values["gguf"]["flag"] is True
        assert checkpoint.values["gguf_blocks"]["q"] == "Q8_0"


def test_files_of_the_library_gguf_have_the_bytes_that_it_reads(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    kinds = gguf.GGMLQuantizationType
    floats = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_block_count(1)
    writer.add_tensor("F32", floats)
    writer.add_tensor("F16", floats.astype(np.float16))
    for kind in (kinds.BF16, kinds.Q8_0, kinds.Q4_0):
        writer.add_tensor(kind.name, gguf.quants.quantize(floats, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with reknit.open(tmp_path / "a.gguf") as checkpoint:
        assert checkpoint.values["gguf"]["llama.block_count"] == 1
        assert checkpoint.values["gguf_blocks"] == {"Q8_0": "Q8_0", "Q4_0": "Q4_0"}
        for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors:
            found = np.asarray(checkpoint.read("model", tensor.name))
            assert found.tobytes() == tensor.data.tobytes(), tensor.name
            assert tensor.name.startswith("Q") or found.shape == (4, 64)


def test_an_impossible_header_is_refused() -> None:
    values = [
        *(struct.pack("<IIQ", 9, kind, 1 << 50) for kind in (0, 8)),
        *(struct.pack("<IIQ", 9, 9, 1) * 9, struct.pack("<I", 99)),
    ]
    tensors = [((1 << 40, 1 << 40), 0), ((3,), 77), ((33,), 8), ((1,) * 40, 0)]
    impossible = [
        b"GGUF",
        b"GGUF" + struct.pack(">I", 3) + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + bytes(1 << 16),
        header({"general.alignment": struct.pack("<II", 4, 0)}, []),
        *(header({"a": value}, []) for value in values),
        *(header({}, [("w", shape, kind, 0)]) for shape, kind in tensors),
    ]
    assert taken(impossible, read, FormatError) == []
