from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from reknit.errors import CorruptError
from reknit.format.checksum import BlockDigester, block_digests, check_block, digest, num_blocks


def test_the_digest_is_plain_xxh3_64() -> None:
    # published test vector of the empty input
    assert digest(b"") == digest() == 0x2D06800538D394C2
    assert digest(b"abc") == xxhash.xxh3_64_intdigest(b"abc")


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_buffers_are_digested_as_if_laid_end_to_end(pieces: list[bytes]) -> None:
    assert digest(*[memoryview(piece) for piece in pieces]) == digest(b"".join(pieces))


def test_arrays_are_digested_by_their_bytes() -> None:
    array = np.arange(12, dtype="<f4").reshape(3, 4)
    assert digest(array) == digest(array.tobytes())
    assert block_digests(array, 16) == block_digests(array.tobytes(), 16)
    assert block_digests(np.zeros((0, 3))) == []


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 32))
@example([b"abc", b"defgh", b"ijkl", b"m"], 4)
@example([b"ab", b"cd", b"efghijklm"], 4)
def test_block_digests_do_not_depend_on_the_pieces_in_which_bytes_arrive(
    pieces: list[bytes], block_nbytes: int
) -> None:
    digester = BlockDigester(block_nbytes)
    for piece in pieces:
        digester.update(piece)
    data = b"".join(pieces)
    expected = [digest(data[at : at + block_nbytes]) for at in range(0, len(data), block_nbytes)]
    assert digester.finish() == expected == block_digests(data, block_nbytes)
    assert len(expected) == num_blocks(len(data), block_nbytes)


def test_a_damaged_block_is_named() -> None:
    check_block(digest(b"ab"), b"a", b"b", path="model/x", block=3)
    with pytest.raises(CorruptError, match="block 3 of model/x"):
        check_block(digest(b"ab"), b"a", b"c", path="model/x", block=3)
