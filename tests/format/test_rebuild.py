from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from reknit.errors import CorruptError, FormatError, VersionError
from reknit.format.data_file import Header, HeaderEntry, decode_header, encode_header, file_metadata
from reknit.format.index.arrow_file import rebuild_index
from reknit.format.paths import entry_key
from reknit.types.box import Box
from tests.format.samples import WRITE_ID, index_of, indexes, same_index, taken

if TYPE_CHECKING:
    from reknit.types.manifest import Index


def headers_of(index: Index) -> dict[str, Header]:
    """Write the headers of the data files that an index speaks of, one item per file, larger items first."""
    rows = [(entry, chunk) for number, entry in enumerate(index.tensors) for chunk in index.chunks(number)]
    rows.sort(key=lambda row: (-row[0].spec.itemsize, row[0].fqn, row[1].box.offsets))
    entries: dict[tuple[str, str], list[HeaderEntry]] = {}
    for entry, chunk in rows:
        mine = entries.setdefault((entry.item, f"{chunk.extent.file}.{entry.item.encode().hex()}"), [])
        start = mine[-1].start + mine[-1].nbytes if mine else 0
        key = entry_key(entry.fqn, entry.spec, chunk.box)
        mine.append(HeaderEntry(key, entry.spec.dtype, chunk.box.lengths, start, chunk.extent.nbytes))
    headers = {}
    for (item, path), mine in entries.items():
        data = encode_header(mine, file_metadata(WRITE_ID, 0, item))
        headers[path] = decode_header(data, len(data) + mine[-1].start + mine[-1].nbytes)
    return headers


def expected(headers: dict[str, Header], index: Index) -> Index:
    """Return the index with the places that `headers_of` gave its chunks."""
    places = {
        (header.metadata["reknit.item"], path.rpartition(".")[0], entry.key): (
            path,
            header.data_start + entry.start,
        )
        for path, header in headers.items()
        for entry in header.entries
    }
    rows = []
    for number, entry in enumerate(index.tensors):
        for chunk in index.chunks(number):
            key = entry_key(entry.fqn, entry.spec, chunk.box)
            place = places[entry.item, chunk.extent.file, key]
            rows.append((entry.item, entry.fqn, entry.spec, chunk.box, *place))
    return index_of(rows)


@given(indexes())
def test_the_headers_alone_give_the_index_back(index: Index) -> None:
    headers = headers_of(index)
    assert same_index(rebuild_index(headers), expected(headers, index))


def header(*entries: HeaderEntry, item: str = "m", write_id: str = WRITE_ID, **aliases: str) -> Header:
    data = encode_header(list(entries), file_metadata(write_id, 0, item, aliases))
    return decode_header(data, len(data) + (entries[-1].start + entries[-1].nbytes if entries else 0))


WHOLE = HeaderEntry("a", "int8", (4,), 0, 4)


def test_a_tied_tensor_is_found_under_both_names() -> None:
    index = rebuild_index({"x": header(WHOLE, tied="a")})
    assert [entry.fqn for entry in index.tensors] == ["a", "tied"]
    assert list(index.chunks(0)) == list(index.chunks(1))


def test_a_box_that_two_ranks_wrote_counts_once() -> None:
    index = rebuild_index({"y": header(WHOLE), "x": header(WHOLE)})
    assert [chunk.extent.file for chunk in index.chunks(0)] == ["x"]


def test_parts_of_a_tensor_make_its_shape() -> None:
    parts = header(
        HeaderEntry("a[0:2,0:3]", "int8", (2, 3), 0, 6), HeaderEntry("a[2:4,0:3]", "int8", (2, 3), 6, 6)
    )
    index = rebuild_index({"x": parts})
    assert index.tensors[0].spec.shape == (4, 3)
    assert [chunk.box for chunk in index.chunks(0)] == [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]


def test_no_files_make_an_empty_index() -> None:
    assert rebuild_index({}).tensors == ()


CONTRADICTIONS: list[dict[str, Header]] = [
    {"m/00000.01234567.safetensors": header(WHOLE), "m/00001.ffffffff.safetensors": header(WHOLE)},
    {"x": header(WHOLE), "y": header(HeaderEntry("a[0:2]", "int8", (2,), 0, 2))},
    {"x": header(WHOLE), "y": header(HeaderEntry("a", "uint8", (4,), 0, 4))},
    {"x": header(HeaderEntry("a[0:2]", "int8", (3,), 0, 3))},
    {"x": header(HeaderEntry("a[0:2]", "int8", (2, 1), 0, 2))},
    {"x": header(HeaderEntry("a[0:2", "int8", (2,), 0, 2))},
    {"x": header(WHOLE, tied="nowhere")},
    {"x": header(WHOLE, a="a")},
    {"x": Header(4096, (), {}, {})},
    {"x": Header(4097, (), file_metadata(WRITE_ID, 0, "m"), {})},
]


def test_headers_that_contradict_each_other_are_refused() -> None:
    assert taken(CONTRADICTIONS, rebuild_index, FormatError) == []
    two_shapes = {"x": header(WHOLE), "y": header(HeaderEntry("a", "int8", (5,), 0, 5))}
    with pytest.raises(CorruptError):
        rebuild_index(two_shapes)


def test_a_file_that_was_taken_over_from_an_earlier_write_is_part_of_the_index() -> None:
    other = HeaderEntry("b", "int8", (4,), 0, 4)
    names = "m/00000.01234567.safetensors", "m/00000.1.01234567.safetensors"
    headers = dict(zip(names, (header(WHOLE), header(other, write_id="f" * 32)), strict=True))
    assert [entry.fqn for entry in rebuild_index(headers).tensors] == ["a", "b"]


def test_a_data_file_of_a_newer_format_is_refused() -> None:
    metadata = file_metadata(WRITE_ID, 0, "m") | {"reknit.format": "2"}
    with pytest.raises(VersionError):
        rebuild_index({"x": Header(4096, (), metadata, {})})
