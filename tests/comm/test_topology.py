from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from reknit.comm.group import Topology

host_lists = st.lists(st.integers(0, 12), min_size=1, max_size=120)
topologies = st.one_of(
    st.builds(Topology.flat, st.integers(1, 120), st.integers(1, 40)),
    st.builds(Topology, host_lists, st.integers(1, 40)),
)


def leaders(topology: Topology) -> list[int]:
    """Return the lowest rank of each host, in order."""
    hosts = list(topology.hosts)
    return sorted(hosts.index(host) for host in set(hosts))


@given(topologies)
def test_every_rank_but_the_first_is_a_child_of_its_parent_and_of_no_other(topology: Topology) -> None:
    ranks = range(topology.size)
    above = {child: rank for rank in ranks for child in topology.children(rank)}
    assert above == {rank: topology.parent(rank) for rank in ranks[1:]}
    assert topology.parent(0) is None
    assert sum(len(topology.children(rank)) for rank in ranks) == topology.size - 1
    for rank in ranks:
        below = [deep for child in topology.children(rank) for deep in topology.subtree(child)]
        assert topology.subtree(rank) == tuple(sorted([rank, *below]))
    assert topology.subtree(0) == tuple(ranks)
    depths = [topology.depth(rank) for rank in ranks]
    assert depths == [0, *(depths[above[rank]] + 1 for rank in ranks[1:])]
    assert topology.height == max(depths)
    assert [rank for rank in ranks if topology.leads_host(rank)] == leaders(topology)
    assert topology.num_hosts == len(leaders(topology))


@given(topologies)
def test_a_rank_has_at_most_as_many_children_on_its_host_and_elsewhere_as_the_fan_out(
    topology: Topology,
) -> None:
    for rank in range(topology.size):
        children = topology.children(rank)
        here = [child for child in children if topology.hosts[child] == topology.hosts[rank]]
        assert len(here) <= topology.fan_out
        assert len(children) - len(here) <= topology.fan_out
        assert list(children) == sorted(children)
        assert all(child > rank for child in children)


@given(topologies)
def test_only_the_lowest_rank_of_a_host_reports_to_another_host_and_only_to_its_lowest_rank(
    topology: Topology,
) -> None:
    first = leaders(topology)
    for rank in range(1, topology.size):
        parent = topology.parent(rank)
        assert parent is not None
        if rank in first:
            assert parent in first
        else:
            assert topology.hosts[parent] == topology.hosts[rank]


@given(host_lists, st.integers(1, 5), st.permutations(range(13)))
def test_the_names_of_the_hosts_change_nothing(hosts: list[int], fan_out: int, names: list[int]) -> None:
    one, other = Topology(hosts, fan_out), Topology([names[host] for host in hosts], fan_out)
    assert one.digest == other.digest
    assert [one.parent(rank) for rank in range(one.size)] == [
        other.parent(rank) for rank in range(other.size)
    ]


@given(topologies, topologies)
def test_trees_that_differ_have_different_digests(one: Topology, other: Topology) -> None:
    same = one.fan_out == other.fan_out and list(one.hosts) == list(other.hosts)
    assert (one.digest == other.digest) == same


@given(st.integers(1, 3000), st.integers(1, 64), st.integers(2, 32))
def test_the_height_grows_with_the_logarithm_of_hosts_and_of_ranks_on_a_host(
    size: int, per_host: int, fan_out: int
) -> None:
    topology = Topology([rank // per_host for rank in range(size)], fan_out)
    num_hosts = math.ceil(size / per_host)
    steps = [math.ceil(math.log(count * (fan_out - 1) + 1, fan_out)) for count in (num_hosts, per_host)]
    assert topology.height <= sum(steps)
    assert Topology.flat(17, 16).height == 1
    assert Topology.flat(18, 16).height == 2
    assert Topology.flat(40, 1).height == Topology([7] * 40, 1).height == 39


def test_a_hundred_thousand_ranks_are_no_work() -> None:
    topology = Topology([rank // 8 for rank in range(100_000)], 16)
    assert topology.height == 5
    assert topology.depth(99_999) == 5
    assert len(topology.subtree(0)) == 100_000
    assert sum(len(topology.subtree(child)) for child in topology.children(0)) == 99_999
