"""Index files that lie: about rows, sizes, places, and their size after decompression."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from reknit.format.index import arrow_file as index_columns
from reknit.format.index.arrow_file import write_with_arrow
from reknit.format.index.plain_file import write_plain
from reknit.types.box import Box
from reknit.types.shard import TensorSpec
from tests.attacks.thrift import BINARY, I32, I64, LIST, STRUCT, Reader, Struct, write
from tests.format.samples import index_of, sample_index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HUGE = 1 << 40


def attacks() -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of every hostile index."""
    yield from _broken_frames()
    yield from _changed("", _good())
    yield from _changed("plain_", plain_index())
    yield from _wrong_pages()
    yield "many_rows_in_few_bytes", _parquet(400_000)
    yield "as_many_rows_as_are_read", _parquet(290_000)
    yield "zstd_bomb_in_a_string", _parquet(1, fqn="a" * (70 << 20))
    yield "zstd_bomb_in_many_strings", _parquet(40, fqn="a" * (2 << 20))
    yield (
        "zstd_bomb_in_many_pages",
        _parquet(80, fqn="a" * (1 << 20), use_dictionary=False, write_batch_size=1),
    )
    yield "many_values_in_few_bytes", _parquet(100_000, ndim=32)
    yield "stored_schema_that_agrees", _parquet(1, schema=index_columns.SCHEMA, store_schema=True)
    yield "other_compression", _parquet(1, compression="gzip")
    yield (
        "delta_strings_that_multiply",
        _parquet(100, fqn="a" * 4000, column_encoding={"fqn": "DELTA_BYTE_ARRAY"}),
    )
    yield "extension_type_in_a_stored_schema", _parquet(1, store_schema=True)
    yield "name_of_a_megabyte", _parquet(1, fqn="a" * (1 << 20))
    yield "nullable_columns", _parquet(1, schema=_nullable())
    yield "other_types", _parquet(1, schema=_schema().set(7, pa.field("start", pa.int32(), nullable=False)))
    yield "column_missing", _parquet(1, schema=_schema().remove(8))
    yield (
        "column_renamed",
        _parquet(1, schema=_schema().set(8, pa.field("Nbytes", pa.int64(), nullable=False))),
    )


def _good() -> bytes:
    return write_with_arrow(sample_index())


def plain_index() -> bytes:
    """Return a good index that was written without Arrow."""
    data = write_plain(sample_index())
    assert data is not None
    return data


def _changed(prefix: str, good: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a good index with other footers and page headers."""
    for name, change in _FOOTERS.items():
        yield prefix + name, _with_footer(good, change)
    for name, column, changes in _PAGES:
        if not prefix or name not in _COMPRESSED:
            yield prefix + name, _with_page(good, column, changes)
    for column in (0, 3, 7) if prefix else ():
        page = _with_page(good, column, {5: {1: HUGE}}, _set_meta(column, 5, HUGE))
        yield f"{prefix}column_{column}_claims_a_trillion_values", page
    for name, rows in (("trillion", HUGE), ("million", 1 << 20)):
        page = _with_page(good, 7, {5: {1: rows}}, _everywhere(rows))
        yield f"{prefix}everything_claims_a_{name}_rows", page


def _wrong_pages() -> Iterator[tuple[str, bytes]]:
    """Yield plain indexes whose headers are true and whose pages are not."""
    yield "plain_column_of_fewer_rows", _with_page(plain_index(), 7, {5: {1: 4}}, _set_meta(7, 5, 4))
    for name, column, at, change in (
        ("text_longer_than_its_page", 1, 0, b"\xff\xff\xff\xff"),
        ("texts_shorter_than_their_page", 2, 0, b"\x00"),
        ("text_that_is_not_utf8", 1, 4, b"\xff"),
        ("levels_of_gigabytes", 3, 0, b"\xff\xff\xff\x7f"),
        ("levels_of_a_billion_groups", 3, 4, b"\xff"),
        ("levels_of_one_repeated_value", 3, 4, b"\xfe"),
        ("first_number_goes_on_with_a_list_before", 3, 5, b"\xff"),
        ("numbers_that_are_absent_and_have_values", 3, 12, b"\x00"),
    ):
        yield f"plain_{name}", _patched(plain_index(), column, at, change)
    for column in (0, 1, 2, 6):
        yield f"plain_text_{column}_that_swallows_the_last_one", _with_fewer_texts(column)
    one = write_plain(index_of([("model", "w", TensorSpec((1, 1), "int64"), Box((0, 0), (1, 1)), "f", 0)]))
    assert one is not None
    for column in (3, 4, 5):
        one = _patched(one, column, 5, b"\x01")
    yield "plain_lists_that_begin_with_their_second_number", one


def _body(index: bytes, column: int) -> int:
    """Return the place of the values of a column, after the header of its page."""
    end = len(index) - 8 - int.from_bytes(index[-8:-4], "little")
    reader = Reader(index, _meta(Reader(index, end).struct(), column)[9][1])
    reader.struct()
    return reader.position


def _patched(index: bytes, column: int, at: int, change: bytes) -> bytes:
    """Return an index with other bytes at a place among the values of a column."""
    place = _body(index, column) + at
    return index[:place] + change + index[place + len(change) :]


def _with_fewer_texts(column: int) -> bytes:
    """Return an index in which the last text but one of a column has the last one in it."""
    index = plain_index()
    rows = len(sample_index().tensor)
    at, sizes, begin = 0, list[int](), _body(index, column)
    for _ in range(rows):
        sizes.append(int.from_bytes(index[begin + at : begin + at + 4], "little"))
        at += 4 + sizes[-1]
    longer = sizes[-2] + 4 + sizes[-1]
    index = _patched(index, column, at - longer - 4, longer.to_bytes(4, "little"))
    return _with_page(index, column, {5: {1: rows - 1}}, _set_meta(column, 5, rows - 1))


def _broken_frames() -> Iterator[tuple[str, bytes]]:
    good = _good()
    yield "empty", b""
    yield "only_magic", b"PAR1PAR1"
    yield "encrypted_magic", b"PARE" + good[4:-4] + b"PARE"
    yield "footer_longer_than_the_file", good[:-8] + (len(good)).to_bytes(4, "little") + b"PAR1"
    yield "footer_of_four_gigabytes", good[:-8] + b"\xff\xff\xff\xffPAR1"
    yield "footer_of_nothing", good[:-8] + bytes(4) + b"PAR1"
    for name, footer in {
        "footer_nested_without_end": b"\x1c" * 100_000,
        "footer_lists_nested_without_end": b"\x19" * 100_000,
        "footer_list_of_billions": b"\x29\xfc\xff\xff\xff\xff\x0f",
        "footer_number_without_end": b"\x15" + b"\xff" * 10_000,
        "footer_of_two_megabytes": b"\x29\xfc\xf0\xff\x7f" + bytes((2 << 20) - 10),
        "footer_string_of_gigabytes": b"\x68\xff\xff\xff\xff\x0f",
        "footer_of_maps": b"\x1b\xff\x01" * 100,
    }.items():
        yield name, b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def _with_footer(good: bytes, change: Callable[[Struct], None]) -> bytes:
    """Return a good index with another footer."""
    start = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    footer = Reader(good, start).struct()
    change(footer)
    raw = write(footer)
    return good[:start] + raw + len(raw).to_bytes(4, "little") + b"PAR1"


def _groups(footer: Struct) -> list[Struct]:
    groups: list[Struct] = footer[4][1][1]
    return groups


def _chunk(footer: Struct, column: int) -> Struct:
    chunk: Struct = _groups(footer)[0][1][1][1][column]
    return chunk


def _meta(footer: Struct, column: int) -> Struct:
    meta: Struct = _chunk(footer, column)[3][1]
    return meta


def _set_meta(column: int, field: int, value: int) -> Callable[[Struct], None]:
    def change(footer: Struct) -> None:
        meta = _meta(footer, column)
        meta[field] = (meta.get(field, (I64, 0))[0], value)

    return change


def _everywhere(rows: int) -> Callable[[Struct], None]:
    def change(footer: Struct) -> None:
        footer[3] = (I64, rows)
        _groups(footer)[0][3] = (I64, rows)
        for column in range(9):
            _meta(footer, column)[5] = (I64, rows)

    return change


def _deep_schema(footer: Struct) -> None:
    member: Struct = {3: (I32, 1), 4: (BINARY, b"x"), 5: (I32, 1)}
    footer[2] = (LIST, (STRUCT, [member] * 100_000))


def _wide_schema(footer: Struct) -> None:
    footer[2][1][1][0][5] = (I32, 2**31 - 1)


def _negative_children(footer: Struct) -> None:
    footer[2][1][1][0][5] = (I32, -5)


def _many_groups(footer: Struct) -> None:
    _groups(footer).extend([{1: (LIST, (STRUCT, [])), 2: (I64, 0), 3: (I64, 0)}] * 100_000)


def _same_group_again(footer: Struct) -> None:
    groups = _groups(footer)
    groups.extend(groups * 50)
    footer[3] = (I64, footer[3][1] * 51)


def _overlapping_columns(footer: Struct) -> None:
    for column in (7, 8):
        _groups(footer)[0][1][1][1][column][3] = (STRUCT, dict(_meta(footer, 7)))


def _external_file(footer: Struct) -> None:
    _groups(footer)[0][1][1][1][0][1] = (BINARY, b"/etc/passwd")


def _encrypted(footer: Struct) -> None:
    footer[8] = (STRUCT, {1: (STRUCT, {})})


def _wrong_kind(footer: Struct) -> None:
    footer[4] = (I64, 7)


def _set_top(field: int, value: Any) -> Callable[[Struct], None]:
    def change(footer: Struct) -> None:
        footer[field] = (footer[field][0], value)

    return change


_FOOTERS: dict[str, Callable[[Struct], None]] = {
    "footer_claims_a_trillion_rows": _set_top(3, HUGE),
    "footer_claims_negative_rows": _set_top(3, -1),
    "footer_claims_no_rows": _set_top(3, 0),
    "group_claims_a_trillion_rows": lambda footer: _groups(footer)[0].update({3: (I64, HUGE)}),
    "column_claims_a_trillion_values": _set_meta(7, 5, HUGE),
    "column_claims_negative_values": _set_meta(7, 5, -1),
    "column_unfolds_to_nothing": _set_meta(7, 6, 0),
    "column_begins_beyond_the_file": _set_meta(7, 9, HUGE),
    "column_begins_before_the_file": _set_meta(7, 9, -8),
    "column_is_longer_than_the_file": _set_meta(7, 7, HUGE),
    "column_has_negative_length": _set_meta(7, 7, -1),
    "column_has_an_unknown_codec": _set_meta(7, 4, 99),
    "column_is_gzip_by_its_footer": _set_meta(7, 4, 2),
    "codec_that_is_a_structure": lambda footer: _meta(footer, 7).update({4: (STRUCT, {})}),
    "dictionary_begins_elsewhere": _set_meta(1, 11, 5),
    "schema_nested_a_hundred_thousand_deep": _deep_schema,
    "schema_claims_billions_of_children": _wide_schema,
    "schema_claims_negative_children": _negative_children,
    "a_hundred_thousand_groups": _many_groups,
    "one_group_fifty_times": _same_group_again,
    "two_columns_in_one_place": _overlapping_columns,
    "column_in_another_file": _external_file,
    "encrypted_footer": _encrypted,
    "groups_of_the_wrong_kind": _wrong_kind,
}

# name, column, changes of its first page's header: 1 type, 2 unpacked, 3 packed, 5 data page, 7 dictionary
_PAGES: list[tuple[str, int, Any]] = [
    ("page_claims_two_gigabytes", 7, {2: 2**31 - 1}),
    ("page_claims_sixty_megabytes", 7, {2: 60 << 20}),
    ("page_claims_nothing", 7, {2: 0}),
    ("page_claims_negative_size", 7, {2: -1}),
    ("page_claims_to_be_longer_than_its_column", 7, {3: 1 << 20}),
    ("page_claims_negative_compressed_size", 7, {3: -1}),
    ("page_claims_billions_of_values", 7, {5: {1: 2**31 - 1}}),
    ("page_claims_negative_values", 7, {5: {1: -1}}),
    ("page_has_an_unknown_encoding", 7, {5: {2: 77}}),
    ("page_is_of_an_unknown_type", 7, {1: 9}),
    ("dictionary_claims_billions_of_values", 1, {7: {1: 2**31 - 1}}),
    ("dictionary_claims_negative_values", 1, {7: {1: -1}}),
    ("dictionary_claims_two_gigabytes", 1, {2: 2**31 - 1}),
    ("dictionary_is_a_data_page_to_its_header", 1, {1: 0}),
]

_COMPRESSED = {name for name, *_ in _PAGES if "dictionary" in name} | {
    "page_claims_sixty_megabytes",
    "page_claims_nothing",
}
"""Changes that mean nothing in a file without dictionaries and without compression."""


def _with_page(good: bytes, column: int, changes: Any, more: Callable[[Struct], None] | None = None) -> bytes:
    """Return a good index in which the first page header of a column is another, and the footer agrees."""
    end = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    footer = Reader(good, end).struct()
    meta = _meta(footer, column)
    start = (meta.get(11) or meta[9])[1]
    reader = Reader(good, start)
    page = reader.struct()
    unpacked = page[2][1]
    _apply(page, changes)
    header = write(page)
    growth = len(header) - (reader.position - start)
    meta[6] = (I64, max(meta[6][1] + growth + page[2][1] - unpacked, 0))
    meta[7] = (I64, meta[7][1] + growth)
    group = _groups(footer)[0]
    group[2] = (I64, group[2][1] + growth)
    for other in range(9):
        for fields, field in (
            (_chunk(footer, other), 2),
            (_meta(footer, other), 9),
            (_meta(footer, other), 11),
        ):
            place = fields.get(field)
            if place is not None and place[1] > start:
                fields[field] = (I64, place[1] + growth)
    if more is not None:
        more(footer)
    raw = write(footer)
    pages = good[:start] + header + good[reader.position : end]
    return pages + raw + len(raw).to_bytes(4, "little") + b"PAR1"


def _apply(fields: Struct, changes: Any) -> None:
    for number, value in changes.items():
        if isinstance(value, dict):
            _apply(fields[number][1], value)
        else:
            fields[number] = (I32, value)


def _schema() -> pa.Schema:
    # the schema of a real index, with plain strings
    return index_columns.schema(pa.string())


def _nullable() -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in _schema()])


def _parquet(
    rows: int,
    *,
    fqn: str = "w",
    ndim: int = 1,
    schema: pa.Schema | None = None,
    compression: str = "zstd",
    **options: Any,
) -> bytes:
    """Write a Parquet file of equal rows with Arrow itself."""
    schema = schema or _schema()
    members: dict[str, Any] = {"item": "m", "fqn": fqn, "dtype": "int8", "file": "f", "start": 0, "nbytes": 1}
    members |= {"shape": [1] * ndim, "offsets": [0] * ndim, "lengths": [1] * ndim}
    columns = [pa.repeat(pa.scalar(members.get(field.name, 0), type=field.type), rows) for field in schema]
    sink = io.BytesIO()
    options = {"store_schema": False, **options}
    if "column_encoding" in options:
        options["use_dictionary"] = False
    table: Any = pa.Table.from_arrays(columns, schema=schema)
    writer: Any = pq.write_table
    writer(table, sink, compression=compression, row_group_size=rows, **options)
    return sink.getvalue()
