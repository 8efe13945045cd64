from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from reknit.format.checksum import block_digests, digest, num_blocks


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


@given(st.binary(max_size=300), st.integers(1, 64))
def test_every_block_of_a_file_has_a_digest_of_its_own(data: bytes, block_nbytes: int) -> None:
    expected = [digest(data[at : at + block_nbytes]) for at in range(0, len(data), block_nbytes)]
    assert block_digests(data, block_nbytes) == expected
    assert len(expected) == num_blocks(len(data), block_nbytes)
