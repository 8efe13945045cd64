"""Bytes between hosts: never more than a bucket at once, and the bytes that were read or none."""

from __future__ import annotations

import pytest

from reknit.errors import CommError
from tests.world.sharing import BLOCK_NBYTES, World
from tests.world.test_resharding import assert_equal
from tests.world.test_sharing import NAME, OFF, TOUCHED, of_arrays, patterned, replicated, saved, targets


def test_a_fetch_for_many_hosts_travels_in_steps_so_that_no_rank_sends_more_than_a_bucket_at_once() -> None:
    cell, size = 4 * BLOCK_NBYTES, 7
    model = of_arrays(w=patterned(40_000))
    saved(model, replicated(model, 1), 1, small_blocks=True)
    for options in (OFF, TOUCHED):
        world = World(range(size), NAME, cell_nbytes=cell, bucket_nbytes=cell)
        shards = targets(model, replicated(model, size), size)
        world.load(shards, options)
        for each in shards:
            assert_equal(model, each)
        assert world.most == 1
        # Each of the other hosts gets a copy; a fetch in unequal parts may be a byte more.
        assert 0 < world.hub.most_sent <= cell + size


def test_bytes_that_change_on_their_way_are_an_error_that_names_file_and_sender() -> None:
    model = of_arrays(w=patterned(100_000))
    saved(model, replicated(model, 1), 1, small_blocks=True)
    world = World([0, 1, 1], NAME, cell_nbytes=4 * BLOCK_NBYTES, bucket_nbytes=8 * BLOCK_NBYTES)
    world.hub.spoiled_by = 0
    with pytest.raises(CommError, match=r"safetensors came from rank 0 by a queue of the test with other"):
        world.load(targets(model, replicated(model, 3), 3), TOUCHED)
    assert world.hub.is_in_step
