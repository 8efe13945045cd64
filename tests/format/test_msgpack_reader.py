from __future__ import annotations

import contextlib
import struct
import sys
import tracemalloc
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.errors import CorruptError, FormatError
from reknit.format import msgpack_reader
from reknit.format.msgpack_reader import check_structure, read_msgpack
from reknit.types.shard import MAX_DEPTH
from tests.format.samples import taken
from tests.running.examples import examples

if TYPE_CHECKING:
    from collections.abc import Callable

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
    max_leaves=30,
)


def read(data: bytes) -> Any:
    return read_msgpack(data, lambda code, payload: (code, payload))


@given(plain)
def test_what_msgspec_writes_is_read(value: Any) -> None:
    found = read(msgspec.msgpack.encode(value))
    assert found == value
    assert repr(found) == repr(value)


def test_the_structure_of_memory_that_another_process_shares_is_checked() -> None:
    for value in (["short"] * 100_000, ["x" * 40] * 10_000, "x" * (5 << 20)):
        check_structure(memoryview(msgspec.msgpack.encode(value)))


def test_every_length_form_is_read() -> None:
    for count in (15, 16, 31, 32, 255, 256, 65535, 65536):
        for value in ("x" * count, b"x" * count, [0] * count, {str(n): n for n in range(count)}):
            assert read(msgspec.msgpack.encode(value)) == value
        ext = msgspec.msgpack.Ext(7, msgspec.msgpack.encode(b"x" * count))
        assert read(msgspec.msgpack.encode(ext)) == (7, b"x" * count)


def test_single_precision_and_short_extensions_of_other_writers_are_read() -> None:
    assert read(b"\xca" + struct.pack(">f", 1.5)) == 1.5
    for tag, nbytes in ((0xD4, 1), (0xD5, 2), (0xD6, 4), (0xD7, 8), (0xD8, 16)):
        payload = bytes([0xC4, nbytes - 2]) + bytes(nbytes - 2) if nbytes > 1 else b"\x05"
        assert read(bytes([tag, 9]) + payload)[0] == 9


def test_what_is_no_single_value_is_refused() -> None:
    files = [
        *(b"", b"\xc1", b"\xc0\xc0", b"\x92\x01", b"\x81\xa1a", b"\xcb\0", b"\xa2a", b"\xc4\x05a", b"\xd9"),
        *(b"\x82\xa1a\x01\xa1a\x02", b"\x81\x01\x01", b"\x81\xc4\x01a\x01", b"\xa1\xff", b"\xa3\xed\xa0\x80"),
        *(bytes([form]) + b"\xff\xff\xff\xff" for form in b"\xdd\xdf\xc6\xdb"),
        *(
            b"\xc9\xff\xff\xff\xff\x05",
            b"\xd4\x05\xa1",
            b"\xd5\x05\x01\x01",
            b"\xc7\x00\x05",
            b"\xd4\x05\x91\x01",
        ),
    ]
    assert taken(files, read, CorruptError) == []


def test_deep_nesting_is_refused_whatever_the_recursion_limit() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10**7)
    try:
        for level in (b"\x91", b"\x81\xa1a", b"\xdd\0\0\0\x01"):
            assert read(level * MAX_DEPTH + b"\xc0")
            for depth in (MAX_DEPTH + 1, 1_000_000):
                with pytest.raises(FormatError, match="nested"):
                    read(level * depth + b"\xc0")
    finally:
        sys.setrecursionlimit(limit)


def test_extensions_in_extensions_count_as_nesting() -> None:
    def nested(levels: int) -> bytes:
        data = b"\xc0"
        for _ in range(levels):
            data = b"\xc9" + struct.pack(">I", len(data) + 1) + b"\x05\x91" + data
        return data

    assert read(nested(MAX_DEPTH))
    with pytest.raises(FormatError, match="nested"):
        read(nested(MAX_DEPTH + 1))


def test_whoever_writes_refuses_what_a_reader_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgpack_reader, "_BASE_STRUCTURE", 1 << 18)
    extensions = msgspec.msgpack.Ext(1, b"\x90"), msgspec.msgpack.Ext(19, b"\x91\xc0")
    parts: tuple[Any, ...] = ([], {}, {"a": 1}, "", b"", *extensions)
    for part in parts:
        outcomes = set()
        for count in (10, 100, 1000, 3000, 100_000):
            data = msgspec.msgpack.encode({"x": [part] * count})
            outcome = [refused(deed, data) for deed in (read, check_structure)]
            assert outcome[0] == outcome[1], (part, count)
            outcomes |= set(outcome)
        assert outcomes == {False, True}, part


def refused(deed: Callable[[bytes], object], data: bytes) -> bool:
    try:
        deed(data)
    except FormatError as error:
        return "too many lists, maps and texts" in str(error)
    return False


def test_of_what_values_are_made_of_there_may_be_any_number_up_to_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(msgpack_reader, "_BASE_STRUCTURE", 1 << 12)
    for part in (7, 300, 1 << 40, 0.5, None, "text", [300, 400], {"id": 123456, "text": "some"}):
        values = [part] * 30_000
        data = msgspec.msgpack.encode(values)
        assert read(data) == values
        check_structure(data)
        with monkeypatch.context() as patch:
            patch.setattr(msgpack_reader, "_MOST_STRUCTURE", 1 << 17)
            assert refused(read, data), part
            assert refused(check_structure, data), part


runs: st.SearchStrategy[Any] = st.sampled_from(
    [7, -3, None, True, 300, 70_000, 1 << 40, -200, -70_000, 0.5, "text", "", []]
)


@given(st.lists(st.tuples(runs, st.integers(1, 40)), max_size=8))
def test_runs_of_values_of_one_kind_are_read_like_each_by_itself(parts: list[tuple[Any, int]]) -> None:
    values = [value for value, count in parts for _ in range(count)]
    data = msgspec.msgpack.encode(values)
    found = read(data)
    assert repr(found) == repr(values)
    check_structure(data)
    assert taken((data[:nbytes] for nbytes in range(len(data))), read, CorruptError) == []


def test_a_long_list_of_one_kind_is_not_read_value_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    reader = vars(msgpack_reader)["_Reader"]
    by_itself = reader.value

    def counted(self: Any, depth: int) -> Any:
        calls.append(depth)
        return by_itself(self, depth)

    monkeypatch.setattr(reader, "value", counted)
    for value in (7, -3, None, 300, -70_000, 1 << 40, 0.5, "text"):
        calls.clear()
        values = [value] * 20_000
        assert read(msgspec.msgpack.encode(values)) == values
        assert len(calls) < 10, value


def test_more_structure_than_the_limit_is_refused_before_it_is_built_and_read_where_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = b"\xdd" + struct.pack(">I", 34 << 20) + bytes(34 << 20)
    tracemalloc.start()
    try:
        assert refused(read, data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    monkeypatch.setattr(msgpack_reader, "_MOST_STRUCTURE", 1 << 10)
    data = msgspec.msgpack.encode([[]] * 100)
    assert refused(read, data)
    assert read_msgpack(data, lambda code, payload: None, trusted=True) == [[]] * 100


@settings(max_examples=examples(300))
@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_a_typed_error(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        read(data)


def test_what_follows_the_value_of_an_extension_is_not_taken_for_the_next_member() -> None:
    assert read(b"\x92\xd4\x01\xc0\xc2") == [(1, None), False]
    with pytest.raises(CorruptError, match="more than one value"):
        read(b"\x92\xd5\x01\xc0\xc2")


def options(**more: Any) -> dict[str, Any]:
    return {"lr": 0.1, "betas": [0.9, 0.999], "name": "x" * 40} | more


def test_equal_plain_values_of_a_file_are_one_object_where_the_caller_allows_it() -> None:
    inside = msgspec.msgpack.Ext(9, msgspec.msgpack.encode(b"ab"))
    other, longer = options(lr=-0.0), options(lr=0.0, more=1)
    values: dict[str, Any] = {"a": options(), "b": options(), "c": options(lr=0.0), "d": other, "e": longer}
    values |= {"f": options(), "g": {"array": inside}, "h": {"array": inside}, "i": [1, 2], "j": [1, 2]}
    data = msgspec.msgpack.encode(values)

    def unpack(code: int, payload: bytes) -> bytearray:
        return bytearray(payload)

    apart, found = read_msgpack(data, unpack), read_msgpack(data, unpack, writable=True)
    assert repr(found) == repr(apart)
    assert list(found) == list(values)
    assert found["a"] is found["b"] is found["f"]
    assert len({id(found[name]) for name in "acdeghij"}) == 8
    assert len({id(value) for value in apart.values()}) == len(apart)


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_file_that_ends_within_a_value_that_began_like_another_is_refused(cut: int) -> None:
    data = msgspec.msgpack.encode({"a": options(), "b": options()})
    with pytest.raises(CorruptError, match="truncated"):
        read_msgpack(data[:-cut], lambda code, payload: None, writable=True)


def test_values_that_are_read_once_count_as_structure_as_often_as_they_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = msgspec.msgpack.encode({str(number): options() for number in range(50)})
    monkeypatch.setattr(msgpack_reader, "_MOST_STRUCTURE", 10_000)
    for writable in (False, True):
        with pytest.raises(FormatError, match="too many lists, maps and texts"):
            read_msgpack(data, lambda code, payload: None, writable=writable)
