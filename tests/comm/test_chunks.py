from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.comm.rank_messages import CHUNK_NBYTES, FIRST_NBYTES, divided, joined
from reknit.errors import CommError, ProtocolError
from tests.running.examples import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 4 * CHUNK_NBYTES
sizes = st.sampled_from([0, 1, FIRST_NBYTES - 1, FIRST_NBYTES, FIRST_NBYTES + 1, 2 * CHUNK_NBYTES, LIMIT])


@settings(max_examples=examples(30))
@given(sizes, st.binary(min_size=1, max_size=7))
def test_a_message_is_what_it_was_before_it_was_divided(nbytes: int, pattern: bytes) -> None:
    message = (pattern * (nbytes // len(pattern) + 1))[:nbytes]
    chunks = list(divided(message))
    assert joined(chunks, LIMIT) == message
    assert all(len(chunk) <= CHUNK_NBYTES for chunk in chunks)
    assert (len(chunks) == 1) == (nbytes <= FIRST_NBYTES)


def test_a_message_above_the_limit_is_refused_before_more_of_it_is_taken() -> None:
    taken: list[int] = []

    def stream() -> Iterator[bytes]:
        for chunk in divided(bytes(LIMIT + 1)):
            taken.append(len(chunk))
            yield chunk

    with pytest.raises(CommError, match="larger than this rank") as caught:
        joined(stream(), LIMIT)
    assert len(taken) == 1
    assert "max_message_nbytes" in str(caught.value.remedy)


@settings(max_examples=examples(30))
@given(sizes.filter(bool), st.data())
def test_a_stream_that_lacks_its_end_is_refused(nbytes: int, data: st.DataObject) -> None:
    chunks = list(divided(bytes(nbytes)))
    keep = data.draw(st.integers(0, len(chunks) - 1))
    cut = chunks[keep][: data.draw(st.integers(0, len(chunks[keep]) - 1))]
    with pytest.raises(ProtocolError, match=r"truncated|empty"):
        joined([*chunks[:keep], cut], LIMIT)
    with pytest.raises(ProtocolError, match=r"truncated|empty"):
        joined([*chunks[:keep], cut, *chunks[keep + 1 :]], LIMIT)


def test_a_stream_that_does_not_end_is_given_up() -> None:
    taken: list[bytes] = []

    def stream() -> Iterator[bytes]:
        yield from divided(bytes(FIRST_NBYTES + 1))
        while True:
            taken.append(b"")
            yield bytes(CHUNK_NBYTES)

    with pytest.raises(ProtocolError, match="mixed up"):
        joined(stream(), LIMIT)
    assert len(taken) == 1


def test_empty_chunks_are_no_way_to_keep_a_rank_busy() -> None:
    def stream() -> Iterator[bytes]:
        yield next(divided(bytes(CHUNK_NBYTES)))
        while True:
            yield b""

    with pytest.raises(ProtocolError, match=r"truncated|empty"):
        joined(stream(), LIMIT)
