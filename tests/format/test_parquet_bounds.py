from __future__ import annotations

import io
from itertools import product
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.errors import FormatError
from reknit.format.index import encode_index, parquet
from reknit.format.index.arrow_file import write_with_arrow
from reknit.format.index.parquet import Work, check_parquet
from reknit.format.index.plain_file import read_plain, write_plain
from tests.attacks.hostile_index import attacks
from tests.attacks.thrift import BINARY, BYTE, DOUBLE, FALSE, I64, LIST, STRUCT, TRUE, Reader, Struct, write
from tests.format.samples import index_of, sample_index
from tests.running.examples import examples

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.types.manifest import Index

# why each attack is refused here, before Arrow sees it
REASONS = {
    "footer_of_four_gigabytes": "bytes of footer",
    "footer_nested_without_end": "nested too deep",
    "footer_lists_nested_without_end": "nested too deep",
    "footer_list_of_billions": "list is too long",
    "footer_number_without_end": "number is too long",
    "footer_claims_a_trillion_rows": "claims 1099511627776 rows",
    "group_claims_a_trillion_rows": "rows of a row group",
    "column_claims_a_trillion_values": "other sizes than its footer",
    "everything_claims_a_trillion_rows": "claims 1099511627776 rows",
    "everything_claims_a_million_rows": "claims 1048576 rows",
    "many_rows_in_few_bytes": "claims 400000 rows",
    "many_values_in_few_bytes": "values",
    "zstd_bomb_in_a_string": "bytes of a page",
    "zstd_bomb_in_many_pages": "bytes after decompression",
    "page_claims_two_gigabytes": "bytes of a page",
    "page_claims_to_be_longer_than_its_column": "bytes of a compressed page",
    "page_claims_billions_of_values": "other sizes than its footer|values",
    "page_has_an_unknown_encoding": "encoding",
    "page_is_of_an_unknown_type": "unknown kind",
    "dictionary_claims_billions_of_values": "values of a page",
    "other_compression": "compressed with something else",
    "column_is_gzip_by_its_footer": "compressed with something else",
    "delta_strings_that_multiply": "encoding",
    "two_columns_in_one_place": "overlap",
    "one_group_fifty_times": "overlap",
    "column_in_another_file": "outside the file",
    "column_begins_beyond_the_file": "outside the file",
    "encrypted_footer": "encrypted",
    "schema_nested_a_hundred_thousand_deep": "list is too long",
    "a_hundred_thousand_groups": "list is too long",
}


def check(data: bytes) -> Work:
    return check_parquet(data, num_columns=9, num_nodes=16)


def test_a_lie_is_found_before_anything_is_unpacked() -> None:
    payloads = dict(attacks())
    for name, why in REASONS.items():
        for data in (payloads[name], payloads.get(f"plain_{name}")):
            if data is not None:
                with pytest.raises(FormatError, match=why):
                    check(data)


def test_what_arrow_writes_is_accepted() -> None:
    table = pa.table({"a": list(range(5000)), "b": ["x", "y"] * 2500, "c": [[1]] * 5000})
    for version, compression in product(("1.0", "2.0"), ("zstd", "none")):
        sink = io.BytesIO()
        kind: Any = {"data_page_version": version, "compression": compression}
        pq.write_table(table, sink, row_group_size=1000, **kind)
        assert check_parquet(sink.getvalue(), num_columns=3, num_nodes=6).rows == 5000


def test_rows_are_counted() -> None:
    assert check(encode_index(sample_index())).rows == 5
    assert check(encode_index(index_of([]))).rows == 0


GOOD = write_with_arrow(sample_index())
odd: st.SearchStrategy[tuple[int, Any]] = st.sampled_from(
    [
        (I64, -1),
        (I64, 1 << 62),
        (I64, 0),
        (TRUE, None),
        (FALSE, None),
        (BYTE, 7),
        (DOUBLE, bytes(8)),
        (BINARY, b"x"),
        (STRUCT, {}),
        (STRUCT, {1: (I64, 1)}),
        (LIST, (I64, [1, 2])),
        (LIST, (STRUCT, [{}])),
        (LIST, (LIST, [(I64, [1])])),
        (LIST, (STRUCT, [])),
    ]
)


def places(fields: Struct) -> list[tuple[Struct, int]]:
    """Return every field of a structure and of those inside it."""
    found = []
    for number, (kind, value) in fields.items():
        found.append((fields, number))
        inner = [value] if kind == STRUCT else value[1] if kind == LIST and value[0] == STRUCT else []
        for member in inner:
            found += places(member)
    return found


def test_a_flood_of_empty_pages_is_refused_before_the_last_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number = check(GOOD).pages
    monkeypatch.setattr(parquet, "MAX_PAGES", number)
    check(GOOD)
    monkeypatch.setattr(parquet, "MAX_PAGES", number - 1)
    with pytest.raises(FormatError, match="pages, which is the limit"):
        check(GOOD)


@pytest.mark.parametrize("writer", [write_with_arrow, write_plain])
@settings(max_examples=examples(300))
@given(st.data())
def test_a_field_of_any_other_kind_gives_a_typed_error_or_is_ignored(
    writer: Callable[[Index], bytes], data: st.DataObject
) -> None:
    good = writer(sample_index())
    start = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    footer = Reader(good, start).struct()
    every = places(footer)
    for _ in range(data.draw(st.integers(1, 2))):
        fields, number = every[data.draw(st.integers(0, len(every) - 1))]
        if data.draw(st.booleans()):
            fields[number] = data.draw(odd)
        else:
            fields.pop(number, None)
    raw = write(footer)
    changed = good[:start] + raw + len(raw).to_bytes(4, "little") + b"PAR1"
    try:
        found = check(changed)
        columns = read_plain(changed)
        if columns is not None:
            columns.to_index()
    except FormatError:
        return
    assert found.rows == 5
