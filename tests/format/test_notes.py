"""Notes come back as they were written; notes that reknit cannot have written are refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reknit.errors import CorruptError, FormatError
from reknit.format.manifest_file import (
    MAX_FOLLOWER_NBYTES,
    Follower,
    HolderLease,
    Metrics,
    Pin,
    decode_note,
    encode_note,
)
from reknit.format.paths import note_path, parse_path
from tests.format.samples import taken

_NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
_TEXTS = st.text(max_size=50)
_NOTES = st.one_of(
    st.builds(Pin, _TEXTS),
    st.builds(HolderLease, _TEXTS, _NUMBERS, st.none() | _NUMBERS),
    st.builds(Metrics, st.dictionaries(_TEXTS, st.none() | _NUMBERS)),
    st.builds(Follower, st.dictionaries(_TEXTS, _TEXTS)),
)


@given(_NOTES)
def test_notes_come_back_as_they_were(note: Pin | HolderLease | Metrics | Follower) -> None:
    assert decode_note(encode_note(note), type(note)) == note


def test_what_is_no_note_is_refused() -> None:
    texts = (
        b"",
        b"{}",
        b"[]",
        b'{"reason":5}',
        b'{"reason":"a"',
        b'{"reason":"\xff"}',
        b'{"reason":"a","reason":"b"}',
    )
    assert taken(texts, lambda data: decode_note(data, Pin), CorruptError) == []


def test_floods_are_refused_before_they_are_parsed() -> None:
    floods = b"[" * 1000, b'{"met":{' + b'"a":"b",' * (1 << 19), b" " * (MAX_FOLLOWER_NBYTES + 1)
    assert taken(floods, lambda data: decode_note(data, Follower), FormatError) == []


def test_paths_of_notes_carry_the_write_id() -> None:
    path = note_path("pin", "0123456789abcdef" * 2, "0" * 24)
    name = parse_path(path)
    assert name is not None
    assert (name.kind, name.write_id8, name.item) == ("pin", "01234567", None)
    assert parse_path(path.replace("pin", "nail")) is None
