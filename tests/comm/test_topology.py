from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.comm.topology import Topology

topologies = st.builds(Topology, st.integers(1, 120), st.integers(1, 40))


@settings(deadline=None)
@given(topologies)
def test_every_rank_but_the_first_is_a_child_of_its_parent_and_of_no_other(topology: Topology) -> None:
    above = {child: rank for rank in range(topology.size) for child in topology.children(rank)}
    assert above == {rank: topology.parent(rank) for rank in range(1, topology.size)}
    assert topology.parent(0) is None
    assert sum(len(topology.children(rank)) for rank in range(topology.size)) == topology.size - 1


@settings(deadline=None)
@given(topologies)
def test_no_rank_has_more_children_than_the_fan_out(topology: Topology) -> None:
    assert all(len(topology.children(rank)) <= topology.fan_out for rank in range(topology.size))


@settings(deadline=None)
@given(topologies)
def test_a_subtree_is_the_rank_and_the_subtrees_of_its_children_in_ascending_order(
    topology: Topology,
) -> None:
    for rank in range(topology.size):
        below = [deep for child in topology.children(rank) for deep in topology.subtree(child)]
        assert topology.subtree(rank) == tuple(sorted([rank, *below]))
    assert topology.subtree(0) == tuple(range(topology.size))


@settings(deadline=None)
@given(topologies)
def test_depth_counts_the_steps_to_the_top_and_height_is_the_largest(topology: Topology) -> None:
    depths = [topology.depth(rank) for rank in range(topology.size)]
    assert depths[0] == 0
    assert all(
        depths[child] == depths[rank] + 1
        for rank in range(topology.size)
        for child in topology.children(rank)
    )
    assert topology.height == max(depths)


@pytest.mark.parametrize(("size", "fan_out", "height"), [(1, 16, 0), (17, 16, 1), (18, 16, 2), (40, 1, 39)])
def test_the_height_of_known_trees(size: int, fan_out: int, height: int) -> None:
    assert Topology(size, fan_out).height == height


def test_a_hundred_thousand_ranks_are_five_steps_deep() -> None:
    topology = Topology(100_000, 16)
    assert topology.height == 5
    assert len(topology.subtree(0)) == 100_000
