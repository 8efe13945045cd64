from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.errors import ProtocolError
from reknit.planner.sharing import WORTH_NBYTES, Costs, Division, FetchTable, Reads, divide, fetch_of
from tests.tables import table

CELL = 16
FILES = 2
CELLS = 4
MIB = 1 << 20

Range = tuple[int, int, int]
"""File, start, end."""

World = tuple[list[Reads], list[int], int]
"""The reads of each rank, their hosts, and the size of a bucket."""


def reads_of(ranges: list[Range]) -> Reads:
    columns = np.array(sorted(ranges), np.int64).reshape(-1, 3)
    return Reads(columns[:, 0], columns[:, 1], columns[:, 2] - columns[:, 1])


def ranges_of(reads: Reads) -> list[Range]:
    return [(f, s, s + n) for f, s, n in zip(*(c.tolist() for c in reads), strict=True)]


def whole(num_cells: int, cell: int = CELL, per_file: int = 1000) -> Reads:
    """Return reads of whole cells, one after another."""
    n = np.arange(num_cells)
    return Reads(n // per_file, n % per_file * cell, np.full(num_cells, cell))


def joined(*reads: Reads) -> Reads:
    """Return reads of one rank after another's, which lie in later files."""
    return Reads(*(np.concatenate(columns) for columns in zip(*reads, strict=True)))


def in_file(file: int, reads: Reads) -> Reads:
    return reads._replace(file=np.full(len(reads.file), file))


@st.composite
def wants(draw: st.DrawFn) -> Reads:
    """Draw disjoint reads of one rank: in each cell, some of the ranges between a few cuts."""
    ranges = []
    for file in range(FILES):
        for cell in draw(st.sets(st.integers(0, CELLS - 1))):
            cuts = sorted(draw(st.sets(st.integers(0, CELL), min_size=2, max_size=4)))
            keep = draw(st.lists(st.booleans(), min_size=len(cuts) - 1, max_size=len(cuts) - 1))
            ranges += [
                (file, cell * CELL + a, cell * CELL + b)
                for a, b, k in zip(cuts[:-1], cuts[1:], keep, strict=True)
                if k
            ]
    return reads_of(ranges)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draw the reads of up to six ranks (some of the same bytes), their hosts, and a bucket's size."""
    kinds = draw(st.lists(wants(), min_size=1, max_size=4))
    reads = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    hosts = draw(st.lists(st.integers(0, 2), min_size=len(reads), max_size=len(reads)))
    return reads, hosts, draw(st.sampled_from([1, 5, CELL, 3 * CELL, 1000]))


def shared(world: World) -> Division:
    reads, hosts, bucket = world
    return divide(reads, hosts, cell_nbytes=CELL, bucket_nbytes=bucket, costs=None)


class Row(NamedTuple):
    """A row of a part, as plain values."""

    number: int
    range: Range
    source: int
    reader: int
    turn: int
    takers: list[int]
    remotes: list[int]


def rows_of(part: FetchTable) -> list[Row]:
    takers, remotes = part.taker_first.tolist(), part.remote_first.tolist()
    assert takers[0] == remotes[0] == 0
    assert takers[-1] == len(part.taker)
    assert remotes[-1] == len(part.remote)
    return [
        Row(
            int(part.number[k]),
            (int(part.file[k]), int(part.start[k]), int(part.start[k] + part.nbytes[k])),
            int(part.source[k]),
            int(part.reader[k]),
            int(part.turn[k]),
            part.taker[takers[k] : takers[k + 1]].tolist(),
            part.remote[remotes[k] : remotes[k + 1]].tolist(),
        )
        for k in range(len(part.number))
    ]


def by_number(division: Division) -> dict[int, dict[int, Row]]:
    """Return the row of each rank for each fetch."""
    known: dict[int, dict[int, Row]] = defaultdict(dict)
    for rank, part in enumerate(division.parts):
        for row in rows_of(part):
            assert rank not in known[row.number]
            known[row.number][rank] = row
    return known


def hulls(reads: list[Reads]) -> dict[Range, set[int]]:
    """Return the overlapping ranges, and the ranks that want them, by merging pairs until none overlaps."""
    groups = [(r, {rank}) for rank, mine in enumerate(reads) for r in ranges_of(mine)]
    done: list[tuple[Range, set[int]]] = []
    while groups:
        (file, start, end), ranks = groups.pop()
        for k, ((f, s, e), others) in enumerate(done):
            if f == file and max(s, start) < min(e, end):
                groups.append(((file, min(s, start), max(e, end)), ranks | others))
                del done[k]
                break
        else:
            done.append(((file, start, end), ranks))
    return {hull: ranks for hull, ranks in done if len(ranks) > 1}


@given(worlds())
def test_what_several_ranks_want_is_in_one_fetch_that_reaches_these_ranks_and_no_others_by_one_way(
    world: World,
) -> None:
    division, again, hosts = shared(world), shared(world), world[1]
    known = by_number(division)
    assert sorted(known) == list(range(len(known)))
    found = {}
    for rows in known.values():
        ((hull, reader, _),) = {(row.range, row.reader, row.turn) for row in rows.values()}
        assert reader in rows
        assert hull not in found
        found[hull] = set(rows)
        sources: dict[int, int] = {}
        for rank, row in rows.items():
            assert hosts[row.source] == hosts[rank]
            assert rows[row.source].source == row.source
            assert sources.setdefault(hosts[rank], row.source) == row.source
            served = [r for r in sorted(rows) if hosts[r] == hosts[rank] and r != rank]
            assert row.takers == (served if row.source == rank else [])
        assert sources[hosts[reader]] == reader
        receivers = sorted(source for source in sources.values() if source != reader)
        assert all(sorted(row.remotes) == (receivers if r == reader else []) for r, row in rows.items())
        assert all((row.turn >= 0) == bool(receivers) for row in rows.values())
    assert found == hulls(world[0])
    check_amounts(known, division.num_turns, world[2])
    assert division.num_turns == again.num_turns, "the same reads are divided the same way"
    for mine, theirs in zip(division.parts, again.parts, strict=True):
        assert all(a.tolist() == b.tolist() for a, b in zip(mine, theirs, strict=True))


def check_amounts(known: dict[int, dict[int, Row]], num_turns: int, bucket: int) -> None:
    """Check that no rank sends or receives more in a turn than a bucket or one fetch."""
    amounts: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for rows in known.values():
        for rank, row in rows.items():
            nbytes = row.range[2] - row.range[1]
            if row.remotes:
                amounts["sends", rank, row.turn].append(nbytes * len(row.remotes))
            if row.source == rank != row.reader:
                amounts["receives", rank, row.turn].append(nbytes)
    for moved in amounts.values():
        assert sum(moved) <= bucket or len(moved) == 1
    assert {turn for _, _, turn in amounts} == set(range(num_turns))


@given(worlds())
def test_a_byte_that_several_ranks_want_is_read_once_and_none_that_nobody_wants(world: World) -> None:
    division = shared(world)
    wanted: Counter[tuple[int, int]] = Counter()
    read: Counter[tuple[int, int]] = Counter()
    for rank, (reads, part) in enumerate(zip(world[0], division.parts, strict=True)):
        for file, start, end in ranges_of(reads):
            wanted.update((file, byte) for byte in range(start, end))
        alone = fetch_of(reads, part) < 0
        ranges = [r for r, k in zip(ranges_of(reads), alone.tolist(), strict=True) if k]
        ranges += [row.range for row in rows_of(part) if row.reader == rank]
        for file, start, end in ranges:
            read.update((file, byte) for byte in range(start, end))
    assert set(read) == set(wanted)
    assert set(read.values()) <= {1}


@given(worlds())
def test_the_ranks_of_a_host_have_one_order_and_fetches_are_numbered_turn_by_turn(world: World) -> None:
    division, hosts = shared(world), world[1]
    travelling = sorted(
        {(row.number, row.turn) for p in division.parts for row in rows_of(p) if row.turn >= 0}
    )
    assert [turn for _, turn in travelling] == sorted(turn for _, turn in travelling)
    for a, part in enumerate(division.parts):
        assert (np.diff(part.turn[part.turn >= 0]) >= 0).all()
        assert (np.diff(part.number[part.reader == a]) > 0).all()
        assert (np.diff(part.number[(part.reader != a) & (part.source == a)]) > 0).all()
        for b in range(a):
            if hosts[a] == hosts[b]:
                other = division.parts[b]
                both = np.intersect1d(part.number, other.number)
                mine, theirs = (p.number[np.isin(p.number, both)] for p in (part, other))
                assert mine.tolist() == theirs.tolist()


@given(worlds())
def test_ranks_that_keep_one_fetch_for_others_and_go_row_by_row_come_to_an_end(world: World) -> None:
    division = shared(world)
    rows = [rows_of(part) for part in division.parts]
    at = [0] * len(rows)
    kept: dict[
        int, tuple[int, set[int]]
    ] = {}  # the fetch in the one place of a rank, and the ranks that have yet to take it
    exchanged = -1

    def step(rank: int) -> bool:
        row = rows[rank][at[rank]]
        if row.source != rank:
            number, missing = kept.get(row.source, (-1, set()))
            if number != row.number:
                return False
            missing.remove(rank)
            return True
        if (rank in kept and kept[rank][1]) or (row.reader != rank and row.turn > exchanged):
            return False
        kept[rank] = (row.number, set(row.takers))
        return True

    moved = True
    while moved:
        moved = False
        for rank in range(len(rows)):
            while at[rank] < len(rows[rank]) and step(rank):
                at[rank] += 1
                moved = True
        sends = [row.turn for rank, mine in enumerate(rows) for row in mine[at[rank] :] if row.remotes]
        done = min([division.num_turns, *sends]) - 1
        moved |= done > exchanged
        exchanged = done
    assert at == [len(mine) for mine in rows]


@given(worlds())
def test_each_read_finds_the_fetch_that_holds_it(world: World) -> None:
    for reads, part in zip(world[0], shared(world).parts, strict=True):
        fetches = [row.range for row in rows_of(part)]
        found = fetch_of(reads, part).tolist()
        for (file, start, end), row in zip(ranges_of(reads), found, strict=True):
            holding = [k for k, (f, s, e) in enumerate(fetches) if f == file and s <= start and end <= e]
            assert holding == ([] if row < 0 else [row])
        assert {row for row in found if row >= 0} == set(range(len(fetches)))


def loads(reads: list[Reads], division: Division) -> list[int]:
    """Return the number of bytes that each rank reads from storage."""
    return [
        int(mine.nbytes[fetch_of(mine, part) < 0].sum() + part.nbytes[part.reader == rank].sum())
        for rank, (mine, part) in enumerate(zip(reads, division.parts, strict=True))
    ]


@given(wants(), st.lists(st.integers(0, 2), min_size=2, max_size=6))
def test_what_all_want_is_read_once_in_equal_parts(reads: Reads, hosts: list[int]) -> None:
    load = loads([reads] * len(hosts), shared(([reads] * len(hosts), hosts, CELL)))
    assert sum(load) == reads.nbytes.sum()
    assert max(load) <= sum(load) / len(load) + CELL


def test_ranks_with_much_to_read_alone_read_less_for_others() -> None:
    private_cells = [30, 0, 10, 100]
    reads = [joined(whole(100), in_file(r + 5, whole(n))) for r, n in enumerate(private_cells)]
    # 100 shared and 40 private cells of ranks 0 to 2 make a level of 46 and two thirds.
    load = np.array(loads(reads, shared((reads, [0, 0, 1, 1], 1000)))) / CELL
    assert load[3] == 100
    assert sorted(load[:3]) == [46, 47, 47]


def test_a_rank_with_much_to_read_alone_reads_for_others_now_and_then_not_at_the_end() -> None:
    mine = joined(whole(200), in_file(5, whole(100)))
    division = shared(([mine, whole(200)], [0, 0], 1000))
    numbers = division.parts[0].number[division.parts[0].reader == 0]
    assert len(numbers) == 50
    assert np.diff(numbers, prepend=-4, append=204).max() <= 8


def test_ranks_that_share_in_a_chain_of_pairs_read_equally_much() -> None:
    files = [in_file(k, whole(100)) for k in range(5)]
    chain = [files[0], *(joined(a, b) for a, b in pairwise(files)), files[-1]]
    load = np.array(loads(chain, shared((chain, [0] * 6, 1000)))) / CELL
    assert load.sum() == 500
    assert load.max() <= 88  # level at 83 and a third


def test_different_sets_of_ranks_with_one_fetch_each_read_equally_many() -> None:
    rng = np.random.default_rng(7)
    picks = rng.random((300, 60)) < 0.5
    cells = whole(300)
    reads = [Reads(*(column[picks[:, rank]] for column in cells)) for rank in range(60)]
    assert set(loads(reads, shared((reads, [0] * 60, 1000)))) == {300 // 60 * CELL}


def test_neighbouring_fetches_are_read_and_received_all_over_the_hosts() -> None:
    hosts = [0, 0, 0, 1, 1, 1]
    parts = shared(([whole(600)] * 6, hosts, 1000)).parts
    reader = np.empty(600, np.int64)
    for part in parts:
        reader[part.number] = part.reader
    assert all(len(set(reader[k : k + 6].tolist())) == 6 for k in range(0, 600, 6))
    assert all(hosts[a] != hosts[b] for a, b in pairwise(reader.tolist()))
    for rank, part in enumerate(parts):
        assert ((part.source == rank) & (part.reader != rank)).sum() == 100


def test_exchanges_are_full_though_each_file_is_shared_by_two_ranks_alone() -> None:
    per_file = [in_file(r % 4, whole(64)) for r in range(8)]
    division = shared((per_file, [0] * 4 + [1] * 4, 4 * CELL))
    assert division.num_turns == 32 // 4


def test_fetches_that_stay_on_their_host_lie_between_the_turns() -> None:
    travelling = whole(80)
    both = joined(travelling, in_file(1, whole(80)))
    parts = shared(([both, both, travelling, travelling], [0, 0, 1, 1], 4 * CELL)).parts
    staying = np.flatnonzero(parts[0].turn < 0)
    assert len(staying) == 80
    assert np.diff(staying, prepend=-1, append=160).max() <= 10


@table("broken", [(0, 12, 20), (0, 3, 3)])
def test_a_read_that_keeps_to_no_cell_is_refused_with_its_rank(broken: Range) -> None:
    with pytest.raises(ProtocolError, match=f"rank 1 .* from byte {broken[1]} "):
        shared(([whole(1), reads_of([broken])], [0, 0], CELL))


def num_shared(reads: list[Reads], hosts: list[int], costs: Costs) -> list[int]:
    division = divide(reads, hosts, cell_nbytes=8 * MIB, bucket_nbytes=64 * MIB, costs=costs)
    return [len(part.number) for part in division.parts]


def test_fetches_are_shared_only_where_that_is_quicker() -> None:
    reads = [whole(8, 8 * MIB)] * 4
    assert num_shared(reads, [0] * 4, Costs(read=100, copy=140, network=1)) == [8] * 4
    assert num_shared(reads, [0] * 4, Costs(read=100, copy=130, network=1e9)) == [0] * 4
    assert num_shared(reads, [0, 0, 1, 1], Costs(read=100, copy=1e9, network=140)) == [8] * 4
    assert num_shared(reads, [0, 0, 1, 1], Costs(read=100, copy=1e9, network=130)) == [0] * 4


def test_across_a_slow_network_only_what_stays_on_a_host_is_shared() -> None:
    high = in_file(1, whole(8, 8 * MIB))
    both = joined(whole(8, 8 * MIB), high)
    costs = Costs(read=100, copy=1000, network=50)
    assert num_shared([both, both, high], [0, 0, 1], costs) == [8, 8, 0]


def test_ranks_that_have_little_in_common_read_it_twice() -> None:
    low = whole(8, 8 * MIB)._replace(nbytes=np.full(8, 5 * MIB))
    high = Reads(low.file, low.start + 4 * MIB, np.full(8, 4 * MIB))
    # Of 8 MiB, 9 are wanted: sharing saves a ninth of the reading, at best.
    assert num_shared([low, high], [0, 0], Costs(read=100, copy=800, network=1)) == [0, 0]
    assert num_shared([low, high], [0, 0], Costs(read=100, copy=1000, network=1)) == [8, 8]


def test_a_few_shared_bytes_are_not_worth_the_setup() -> None:
    costs = Costs(read=1, copy=100, network=100)
    assert num_shared([whole(4, 8 * MIB)] * 2, [0, 0], costs) == [WORTH_NBYTES // (8 * MIB)] * 2
    assert num_shared([whole(3, 8 * MIB)] * 2, [0, 0], costs) == [0, 0]


@table(
    ("num_cells", "hosts"), [(40_000, [0, 0, 0, 0, 1, 1, 1, 1]), (2_000, [rank // 8 for rank in range(1000)])]
)
def test_many_fetches_and_many_ranks_are_divided_evenly(num_cells: int, hosts: list[int]) -> None:
    reads = [whole(num_cells, 8 * MIB)] * len(hosts)
    division = divide(reads, hosts, cell_nbytes=8 * MIB, bucket_nbytes=64 * MIB, costs=None)
    assert set(loads(reads, division)) == {num_cells // len(hosts) * 8 * MIB}
    received = sum(len(part.remote) for part in division.parts)
    assert received == num_cells * max(hosts)
    # As many turns as the buckets need, and a few more, as some buckets are not quite full.
    assert division.num_turns <= received / len(hosts) / 8 * 1.1
