from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.errors import CorruptError, FormatError
from reknit.format import strict_json
from reknit.format.strict_json import count_values, decode_strict
from tests.format.samples import json_values, taken


def decode(data: bytes, kind: Any = Any, max_depth: int = 64, max_values: int = 10_000_000) -> Any:
    return decode_strict(
        data, kind, what="it", max_nbytes=10_000_000, max_depth=max_depth, max_values=max_values
    )


@given(json_values)
def test_what_python_writes_is_read(value: Any) -> None:
    assert decode(json.dumps(value).encode()) == value
    assert decode(json.dumps(value, ensure_ascii=False).encode()) == value


def test_what_readers_would_understand_differently_is_refused() -> None:
    texts = [
        *(
            b"",
            b"{",
            b'{"a":1,"a":1}',
            b'[{"b":{"a":1,"a":2}}]',
            b'{"a":1}x',
            b"\xef\xbb\xbf{}",
            b'"\\ud800"',
        ),
        *(
            b'"\xff"',
            b"NaN",
            b"Infinity",
            b"1e999",
            b'{"a":1,"\\u0061":2}',
            b"'a'",
            b"{} {}",
            b'"a\nb"',
            b"[1,]",
        ),
    ]
    assert taken(texts, decode, CorruptError) == []


def test_nesting_is_counted_before_it_is_parsed() -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        for depth in (65, 1_000_000):
            with pytest.raises(FormatError, match="nested"):
                decode(opening * depth + b"1" + closing * depth)
        assert decode(opening * 64 + b"1" + closing * 64)


def test_values_are_counted_before_they_are_built() -> None:
    assert decode(b'[[],[],"[,,,"]', max_values=5) == [[], [], "[,,,"]
    with pytest.raises(FormatError, match="it holds more than 4 values"):
        decode(b'[[],[],"[,,,"]', max_values=4)


@given(json_values, st.integers(1, 9))
def test_a_document_is_counted_alike_in_pieces_of_any_size(value: Any, nbytes: int) -> None:
    data = json.dumps([value, 'a\\"[', "\\\\", ["[{"]]).encode()

    def count() -> int:
        return count_values(data, "it", max_nbytes=len(data), max_depth=64, max_values=len(data))

    whole = count()
    with mock.patch.object(strict_json, "_SCAN_NBYTES", nbytes):
        assert count() == whole


def test_counting_takes_little_memory_beside_the_document() -> None:
    for text in (b"a", b"\\\\", b" ", b'",["'):
        data = b'["' + text * ((32 << 20) // len(text)) + b'"]'
        tracemalloc.start()
        try:
            with suppress(FormatError):
                count_values(data, "it", max_nbytes=len(data), max_depth=1 << 30, max_values=len(data) // 8)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20, text
        finally:
            tracemalloc.stop()


def test_brackets_in_text_are_no_nesting() -> None:
    text = '[[[[[{{{{"\\[' * 100
    assert decode(json.dumps([text, {text: "\\"}]).encode(), max_depth=2) == [text, {text: "\\"}]


def test_a_text_that_never_ends_hides_no_nesting() -> None:
    with pytest.raises(FormatError, match="nested"):
        decode(b'["\\\\",' + b"[" * 100 + b'"')


def test_a_huge_number_takes_no_time() -> None:
    for kind in (dict[str, Any], dict[str, str], Any):
        with pytest.raises(CorruptError):
            decode(b'{"x":' + b"1" * 5_000_000 + b"}", kind)
    # A number that fits, in a member that is not read.
    assert decode(b'{"x":1.' + b"1" * 1_000_000 + b"}")
