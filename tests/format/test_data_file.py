from __future__ import annotations

import contextlib
import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from reknit.errors import CorruptError, FormatError, StateError
from reknit.format import data_file
from reknit.format.data_file import (
    MAX_HEADER_NBYTES,
    HeaderEntry,
    data_start,
    decode_header,
    encode_header,
    file_metadata,
)
from reknit.format.paths import entry_key
from reknit.types.box import Box
from reknit.types.dtype import ITEMSIZE
from reknit.types.shard import TensorSpec
from tests.format.samples import WRITE_ID, names, taken
from tests.running.examples import examples

if TYPE_CHECKING:
    from pathlib import Path

METADATA = file_metadata(WRITE_ID, 3, "model")


def laid_out(tensors: list[tuple[str, str, tuple[int, ...]]]) -> list[HeaderEntry]:
    """Lay tensors (key, dtype, lengths) out as a writer does: larger items first, then by name."""
    entries, start = [], 0
    for key, dtype, lengths in sorted(tensors, key=lambda t: (-ITEMSIZE[t[1]], t[0])):
        nbytes = int(np.prod(lengths, dtype=np.int64)) * ITEMSIZE[dtype]
        entries.append(HeaderEntry(key, dtype, lengths, start, nbytes))
        start += nbytes
    return entries


def size(entries: list[HeaderEntry]) -> int:
    return entries[-1].start + entries[-1].nbytes if entries else 0


tensors = st.lists(
    st.tuples(
        names.filter(lambda name: name != "__metadata__"),
        st.sampled_from(sorted(ITEMSIZE)),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=6,
    unique_by=lambda tensor: tensor[0],
)


@given(tensors, st.dictionaries(names, names, max_size=2))
def test_a_header_comes_back_as_it_was_and_ends_on_a_page(
    drawn: list[tuple[str, str, tuple[int, ...]]], aliases: dict[str, str]
) -> None:
    entries = laid_out(drawn)
    metadata = file_metadata(WRITE_ID, 3, "mödel", aliases)
    header = encode_header(entries, metadata)
    assert len(header) % data_file.ALIGNMENT == 0
    file_nbytes = len(header) + size(entries)
    assert data_start(header[:8], file_nbytes) == len(header)
    found = decode_header(header + bytes(size(entries)), file_nbytes)
    assert found.data_start == len(header)
    order = sorted(entries, key=lambda e: (e.start, e.nbytes, e.key))
    assert list(found.entries) == order
    assert {key: found.metadata[key] for key in metadata} == metadata
    assert data_file.decode_texts(found.metadata, "reknit.aliases") == aliases


def test_the_safetensors_library_reads_every_native_dtype_and_shape(tmp_path: Path) -> None:
    shapes = {"matrix": (2, 3), "scalar": (), "empty": (0, 4)}
    drawn = [
        (f"{dtype}.{name}", dtype, shape) for dtype in data_file.NATIVE for name, shape in shapes.items()
    ]
    part = entry_key("a[b", TensorSpec((9,), "uint8"), Box((3,), (4,)))
    entries = laid_out([*drawn, (part, "uint8", (4,)), ("", "int16", (1,)), ("__m%", "complex64", (3,))])
    data = np.random.default_rng(0).integers(0, 2, size(entries), dtype=np.uint8).tobytes()
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode_header(entries, METADATA) + data)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {entry.key for entry in entries}
        assert file.metadata()["reknit.write_id"] == WRITE_ID
        for entry in entries:
            tensor = file.get_tensor(entry.key)
            native = entry.dtype in data_file.NATIVE
            assert tensor.dtype is (getattr(torch, entry.dtype) if native else torch.uint8)
            assert tuple(tensor.shape) == (entry.lengths if native else (*entry.lengths, 8))
            raw = b"" if not entry.nbytes else tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert raw == data[entry.start : entry.start + entry.nbytes]


def test_a_file_that_the_safetensors_library_wrote_is_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    save_file({"b": torch.zeros(3, dtype=torch.bfloat16), "a": torch.zeros(2, 2)}, path)
    found = decode_header(path.read_bytes(), path.stat().st_size)
    assert {(e.key, e.dtype, e.lengths) for e in found.entries} == {
        ("a", "float32", (2, 2)),
        ("b", "bfloat16", (3,)),
    }


def test_entries_with_holes_overlaps_or_wrong_sizes_are_not_written() -> None:
    first = HeaderEntry("a", "int8", (2,), 0, 2)
    wrong = [
        [HeaderEntry("a", "int8", (2,), 1, 2)],
        [first, HeaderEntry("b", "int8", (2,), 1, 2)],
        [first, HeaderEntry("b", "int8", (2,), 3, 2)],
        [HeaderEntry("a", "int8", (3,), 0, 3), HeaderEntry("b", "int16", (2,), 3, 4)],
        [first, HeaderEntry("a", "int8", (2,), 2, 2)],
        [HeaderEntry("a", "int8", (2,), 0, 3)],
        [HeaderEntry("a", "int8", (-2, -2), 0, 4)],
        [HeaderEntry("a", "int99", (2,), 0, 2)],
        [HeaderEntry("__metadata__", "int8", (2,), 0, 2)],
    ]
    assert taken(wrong, lambda entries: encode_header(entries, METADATA), FormatError) == []


def test_too_many_entries_for_one_header_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "MAX_HEADER_NBYTES", 8000)
    entries = [HeaderEntry(f"{n:04d}", "int8", (0,), 0, 0) for n in range(200)]
    with pytest.raises(StateError, match="max_file_nbytes"):
        encode_header(entries, METADATA)


def test_too_many_values_in_one_header_are_neither_written_nor_built(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [HeaderEntry(f"tensor.{k}", "int8", (1,), k, 1) for k in range(100)]
    header = encode_header(entries, METADATA)
    monkeypatch.setattr(data_file, "MAX_HEADER_VALUES", 700)
    with pytest.raises(FormatError, match=r"the header of the data file holds more than 700 values"):
        decode_header(header, len(header) + 100)
    with pytest.raises(StateError, match=r"100 tensor parts .* and 700 are the limits") as caught:
        encode_header(entries, METADATA)
    assert "max_file_nbytes" in str(caught.value.remedy)


def test_a_header_that_is_not_all_there_is_refused() -> None:
    header = encode_header([HeaderEntry("a", "int8", (2,), 0, 2)], METADATA)
    for length in (0, 7, 8, 100, len(header) - 1):
        with pytest.raises(CorruptError):
            decode_header(header[:length], len(header) + 2)
    for file_nbytes in (0, 8, len(header), len(header) + 1, len(header) + 3):
        with pytest.raises(CorruptError):
            decode_header(header, file_nbytes)


def raw_header(document: Any) -> bytes:
    text = document if isinstance(document, str) else json.dumps(document)
    return struct.pack("<Q", len(text)) + text.encode()


SAMPLE = encode_header(
    [
        HeaderEntry("z", "complex64", (1,), 0, 8),
        HeaderEntry("a[0:2,1:2]", "float32", (2, 1), 8, 8),
        HeaderEntry("b", "int8", (), 16, 1),
    ],
    file_metadata(WRITE_ID, 3, "model", {"c": "b"}),
)


@settings(max_examples=examples(500))
@given(st.data())
def test_a_changed_byte_gives_a_header_or_a_typed_error(data: st.DataObject) -> None:
    bad = bytearray(SAMPLE)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(SAMPLE.rstrip()) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError):
        decode_header(bytes(bad), len(SAMPLE) + 17)


def test_a_dtype_that_is_not_native_keeps_its_true_name() -> None:
    header = encode_header([HeaderEntry("z", "complex128", (3,), 0, 48)], METADATA)
    document = json.loads(header[8:])
    assert document["z"] == {"dtype": "U8", "shape": [3, 16], "data_offsets": [0, 48]}
    assert json.loads(document["__metadata__"]["reknit.dtypes"]) == {"z": "complex128"}
    assert decode_header(header, len(header) + 48).entries == (HeaderEntry("z", "complex128", (3,), 0, 48),)


def test_a_foreign_dtype_is_stored_as_bytes_and_as_nothing_else() -> None:
    entry = {"dtype": "I8", "shape": [8, 1], "data_offsets": [0, 8]}
    data = raw_header({"__metadata__": {"reknit.dtypes": '{"a":"float8_e8m0fnu"}'}, "a": entry})
    with pytest.raises(CorruptError, match="stored as U8"):
        decode_header(data, len(data) + 8)


def test_entries_that_overlap_and_leave_a_hole_as_large_are_refused() -> None:
    ranges = {"a": [0, 4], "b": [2, 6], "c": [8, 10]}
    entries = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in ranges.items()
    }
    data = raw_header(entries)
    with pytest.raises(CorruptError, match="overlap or are unused"):
        decode_header(data, len(data) + 10)


def test_a_header_ends_within_its_file_and_within_the_limit() -> None:
    assert data_start(struct.pack("<Q", 92), 100) == 100
    with pytest.raises(CorruptError, match="truncated"):
        data_start(struct.pack("<Q", 93), 100)
    assert data_start(struct.pack("<Q", MAX_HEADER_NBYTES), 1 << 40) == MAX_HEADER_NBYTES + 8
    with pytest.raises(FormatError, match="is the limit"):
        data_start(struct.pack("<Q", MAX_HEADER_NBYTES + 1), 1 << 40)


def test_a_false_table_of_dtypes_is_refused() -> None:
    entry = {"dtype": "U8", "shape": [1, 8], "data_offsets": [0, 8]}
    false = [
        *('{"b":"complex64"}', '{"a":"int8"}', '{"a":"complex128"}', '{"a":"float64"}', '{"a":"nonsense"}'),
        *('{"a":1}', "[]", '{"a":', "\u00e9"),
    ]

    def read(dtypes: str) -> object:
        data = raw_header({"__metadata__": {"reknit.dtypes": dtypes}, "a": entry})
        return decode_header(data, len(data) + 8)

    assert taken(false, read, FormatError) == []
