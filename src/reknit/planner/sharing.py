"""The ranges that several ranks want: the rank that reads each, and the ranks that pass it on.

Ranks that want the same bytes are a *set*.  The root decides on one row for each fetch of a set, however many
ranks it has, and each rank works out its own part from these rows (`part_of`).  So the work of the root grows
with the number of different reads.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import Struct

from reknit.errors import ProtocolError
from reknit.planner.columns import spread
from reknit.planner.pieces import reach_before

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


class Reads(NamedTuple):
    """The reads of one rank without sharing: byte ranges, ascending by (file, start), disjoint, none empty.

    `file` is the number of the file, in a numbering common to all ranks.
    """

    file: Ints
    start: Ints
    nbytes: Ints


_MIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
"""Odd numbers without a pattern, one for each column of reads."""


def lists_of(reads: Reads) -> list[bytes]:
    """Cut the reads of a rank into lists of about 16, as bytes.

    A list ends where a mix of the numbers of a read says so.  So ranks that have most reads in common have
    most lists in common, wherever the other reads lie.
    """
    rows = np.stack(reads, axis=1).astype("<i8")
    ends = (np.flatnonzero((rows.view(np.uint64) * _MIX).sum(axis=1) >> np.uint64(60) == 0) + 1).tolist()
    return [rows[a:b].tobytes() for a, b in pairwise(dict.fromkeys([0, *ends, len(rows)]))]


class Wants(NamedTuple):
    """The reads of all ranks, as the different lists of reads that ranks have.

    A row for each read: `of` is the number of its list.  The ranks `rank[first[l]:first[l + 1]]` have list l.
    """

    file: Ints
    start: Ints
    nbytes: Ints
    of: Ints
    first: Ints
    rank: Ints

    @classmethod
    def collected(cls, lists: Sequence[bytes], number: Ints, rank: Ints) -> Wants:
        """Return the wants of ranks: each `rank` has the list with the `number` beside it."""
        if any(len(each) % 24 for each in lists):
            raise ProtocolError("a rank sent reads that are cut off", remedy=_SAME_VERSION)
        rows = np.frombuffer(b"".join(lists), "<i8").reshape(-1, 3)
        sizes = np.array([len(each) // 24 for each in lists], np.int64)
        first = bounds_of(np.bincount(number, minlength=len(lists)))
        order = np.argsort(number, kind="stable")
        return cls._make((*rows.T.copy(), np.repeat(np.arange(len(lists)), sizes), first, rank[order]))

    def only(self, here: NDArray[np.bool_]) -> Wants:
        """Return the wants of some ranks alone."""
        keep = here[self.rank]
        first = bounds_of(keep)[self.first]
        rows = (np.diff(first) > 0)[self.of]
        return Wants._make((*(column[rows] for column in self[:4]), first, self.rank[keep]))


_SAME_VERSION = "run the same version of reknit on all ranks"


def bounds_of(counts: Ints | NDArray[np.bool_]) -> Ints:
    """Return the bounds of groups of these sizes, laid end to end: sums, which may wrap around."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def runs(*columns: Ints) -> Ints:
    """Return the starts of runs of equal rows, and the end of the last run."""
    fresh = np.zeros(max(len(columns[0]) - 1, 0), np.bool_)
    for column in columns:
        fresh |= column[1:] != column[:-1]
    if not len(columns[0]):
        return np.zeros(1, np.int64)
    return np.concatenate(([0], np.flatnonzero(fresh) + 1, [len(columns[0])]))


class Fetches(NamedTuple):
    """Byte ranges in order of file and start, and the set of ranks that want each.

    `wanted` bytes of a fetch are wanted, counting every rank.  `of` is the number of its set.  Each rank of a
    set is a row of `member_of` (the number of the set), `rank` and `host`, in order of set, host and rank.
    """

    file: Ints
    start: Ints
    nbytes: Ints
    wanted: Ints
    of: Ints
    member_of: Ints
    rank: Ints
    host: Ints

    def only(self, keep: NDArray[np.bool_]) -> Fetches:
        """Return some of the fetches, and the sets that want them."""
        used = np.bincount(self.of[keep], minlength=int(self.of.max(initial=-1)) + 1) > 0
        rows, numbers = used[self.member_of], np.cumsum(used) - 1
        columns = [column[keep] for column in self[:4]]
        sets = numbers[self.of[keep]], numbers[self.member_of[rows]], self.rank[rows], self.host[rows]
        return Fetches._make((*columns, *sets))


def copies(member_of: Ints, host: Ints) -> Ints:
    """Return for each set the number of hosts that receive a fetch from another."""
    return np.bincount(member_of[runs(member_of, host)[:-1]]) - 1


def merged(wants: Wants, host: Ints) -> tuple[Fetches, Ints]:
    """Merge reads that overlap, and return the ranges that several ranks want, with that of each row or -1.

    Rank `r` is on host `host[r]`.  Reads that only touch stay apart.
    """
    file, start, nbytes, of = wants[:4]
    # Files are laid end to end, so that one sort serves them all.
    wide = int((start + nbytes).max(initial=0)) + 1
    order = np.argsort(file * wide + start, kind="stable")
    file, start, nbytes, of = file[order], start[order], nbytes[order], of[order]
    stop, times = start + nbytes, np.diff(wants.first)
    fresh = start >= reach_before(file, stop)
    first, fetch = np.flatnonzero(fresh), np.cumsum(fresh) - 1
    several = np.bincount(fetch, times[of], len(first)) > 1
    rows, number = several[fetch], np.cumsum(several) - 1
    within = np.full(len(order), -1, np.int64)
    within[order[rows]] = number[fetch[rows]]
    of_fetch, *sets = _sets_of(number[fetch[rows]], of[rows], wants, host)
    everything = Fetches(
        file[first][several],
        start[first][several],
        (np.maximum.reduceat(stop, first) if len(first) else stop)[several] - start[first][several],
        np.bincount(fetch, nbytes * times[of], len(first)).astype(np.int64)[several],
        of_fetch,
        *sets,
    )
    return everything, within


def _sets_of(fetch: Ints, of: Ints, wants: Wants, host: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the set of each fetch, and the sets as in `Fetches`, given fetches and their lists of reads.

    Fetches with equal sums of marks are wanted by the same ranks.  If two sums are equal by chance, a rank
    reads a fetch alone that others share.
    """
    keys = np.sort(fetch * len(wants.first) + of)
    fetch, of = np.divmod(keys[runs(keys)[:-1]], len(wants.first))
    marks = (np.arange(len(host), dtype=np.uint64) + np.uint64(1)) * _MIX[0]
    marks = (marks ^ marks >> np.uint64(32)) * _MIX[1]
    of_list = np.diff(bounds_of(marks.view(np.int64)[wants.rank])[wants.first])
    bounds = runs(fetch)
    sums = np.diff(bounds_of(of_list[of])[bounds])
    _, first, number = np.unique(sums, return_index=True, return_inverse=True)
    # One fetch of each set says which ranks it has.
    begin, count = bounds[:-1][first], np.diff(bounds)[first]
    lists, which = of[spread(begin, count)], np.repeat(np.arange(len(count)), count)
    counts = np.diff(wants.first)[lists]
    # Ranks of one host side by side, since the next steps go by host.
    by_host = np.argsort(host, kind="stable")
    place = np.argsort(by_host)[wants.rank[spread(wants.first[lists], counts)]]
    keys = np.sort(np.repeat(which, counts) * len(host) + place)
    which, place = np.divmod(keys[runs(keys)[:-1]], len(host))
    return number, which, by_host[place], host[by_host[place]]


def occurrences(column: Ints) -> Ints:
    """Return for each value the number of equal values before it."""
    order = np.argsort(column, kind="stable")
    bounds = runs(column[order])
    seen = np.empty(len(column), np.int64)
    seen[order] = np.arange(len(column)) - np.repeat(bounds[:-1], np.diff(bounds))
    return seen


SETTLING = 1 << 12
"""Up to this many different sets of ranks are gone through more than once."""


class _Set(NamedTuple):
    """Ranks that want the same fetches, numbers `rows`, of `nbytes` bytes in all."""

    ranks: Ints
    rows: Ints
    nbytes: int


def _sets(fetches: Fetches, host: Ints) -> list[_Set]:
    """Return the sets; in each, neighbours are on different hosts."""
    place = np.lexsort((host, occurrences(host))).argsort()
    order = np.argsort(fetches.of, kind="stable")
    rows, bounds = runs(fetches.of[order]), runs(fetches.member_of)
    sets = []
    for number in range(len(rows) - 1):
        ranks = fetches.rank[bounds[number] : bounds[number + 1]]
        mine = order[rows[number] : rows[number + 1]]
        sets.append(_Set(ranks[np.argsort(place[ranks])], mine, int(fetches.nbytes[mine].sum())))
    return sets


def readers(sets: Sequence[_Set], nbytes: Ints, load: NDArray[np.float64]) -> Ints:
    """Return the rank that reads each fetch, one of the ranks that want it, so that ranks read equally much.

    `load` are the bytes that each rank reads for itself alone.  All fetches that the same ranks want are
    divided at once.  Small sets of ranks come first, since the ranks of large sets can then still even out
    the rest.  The best choice for a set depends on the others.  So bytes are divided first, then whole
    fetches, and the sets whose fetches came out uneven once more.
    """
    reader = np.empty(len(nbytes), np.int64)
    sets = sorted(sets, key=lambda s: len(s.ranks))
    taken: list[NDArray[np.float64]] = [np.zeros(len(s.ranks)) for s in sets]
    for whole in (False, False, False, True, True) if 1 < len(sets) <= SETTLING else (True,):
        for k, (ranks, rows, total) in enumerate(sets):
            load[ranks] -= taken[k]
            taken[k] = _levelling(load[ranks], total)
            if whole:
                sizes = nbytes[rows]
                dealt = np.fromiter(_dealt(sizes, taken[k]), np.int64, len(rows))
                reader[rows] = ranks[dealt]
                taken[k] = np.bincount(dealt, sizes, len(ranks)).astype(np.float64)
            load[ranks] += taken[k]
    return reader


def _levelling(load: NDArray[np.float64], nbytes: int) -> NDArray[np.float64]:
    """Return the share of each in `nbytes`, in whole bytes, so that the least loaded come to one level."""
    # The lowest k, filled up evenly, reach a level that falls with k until all below it are among them.
    level = float(((nbytes + np.cumsum(np.sort(load))) / np.arange(1, len(load) + 1)).min())
    shares: NDArray[np.float64] = np.ceil(np.maximum(level - load, 0))
    return shares


def _dealt(nbytes: Ints, shares: NDArray[np.float64]) -> Iterator[int]:
    """Deal fetches one by one, each to the rank that has the smallest part of its share so far.

    No rank gets more than its share and one fetch, at any time: the rank that is behind has at most the part
    that all have together.
    """
    waiting = [(0.0, -share, k, 0) for k, share in enumerate(shares.tolist()) if share > 0]
    heapq.heapify(waiting)
    for size in nbytes.tolist():
        _, share, k, dealt = waiting[0]
        yield k
        heapq.heapreplace(waiting, (-(dealt + size) / share, share, k, dealt + size))


WORTH_NBYTES = 32 << 20
"""With costs given, sharing is set up only if some rank takes part in fetches of this many bytes."""


class Costs(Struct, frozen=True):
    """Speeds per rank while all ranks are busy, in bytes per second.

    `read`: from storage.  `copy`: from memory to memory.  `network`: between hosts.
    """

    read: float
    copy: float
    network: float


class FetchTable(NamedTuple):
    """The part of one rank in sharing: a row for each fetch that it takes part in.

    `number` counts the fetches of all ranks; `file`, `start`, `nbytes` are the bytes.  `reader` is the rank
    that reads them from storage.  `source` is the rank of this host from which this rank takes them: itself
    where it reads them or receives them from another host.  `turn` is the exchange between hosts in which
    they travel, -1 where no other host wants them.

    Rows are in the order in which all ranks of this host work: turn by turn (rows with turn -1 lie between).
    In each turn, the fetches that this host reads come before the fetches that it receives; else rows go by
    `number`.  So the reads of a rank ascend by `number`, and so do the fetches that it sends and receives.

    The other ranks of this host that take row `k` from this rank (none where `source` is another) are
    `taker[taker_first[k]:taker_first[k + 1]]`.  The ranks of other hosts to which this rank sends it (none
    where `reader` is another) are `remote[remote_first[k]:remote_first[k + 1]]`.
    """

    number: Ints
    file: Ints
    start: Ints
    nbytes: Ints
    source: Ints
    reader: Ints
    turn: Ints
    taker_first: Ints
    taker: Ints
    remote_first: Ints
    remote: Ints


class Division(NamedTuple):
    """The fetches of all ranks, a row for each in the order of their numbers, and the sets as in `Fetches`.

    `reader` reads a fetch from storage.  `stage` is the exchange between hosts with which it comes, and in
    which it travels if its set `of` ranks has several hosts.  In an exchange, a rank receives the fetches of
    one `lane` of a set, and a host has at least as many ranks of the set as there are lanes.  Each exchange
    is held in `num_steps` steps, so that no rank sends more than a bucket in one.
    """

    file: Ints
    start: Ints
    nbytes: Ints
    reader: Ints
    stage: Ints
    lane: Ints
    of: Ints
    member_of: Ints
    rank: Ints
    host: Ints
    num_steps: int = 1

    @property
    def turn(self) -> Ints:
        """The exchange of each fetch between hosts, -1 where no other host wants it."""
        return np.where(copies(self.member_of, self.host)[self.of] > 0, self.stage, -1)

    @property
    def num_turns(self) -> int:
        """The number of exchanges between hosts."""
        return int(self.turn.max(initial=-1)) + 1


def divide(
    wants: Wants, host: Ints, *, cell_nbytes: int, bucket_nbytes: int, costs: Costs | None
) -> Division:
    """Divide the bytes that several ranks want among these ranks, so that each byte is read once.

    Pure.  Rank `r` is on host `host[r]`; no read crosses a multiple of `cell_nbytes`.  Reads that overlap
    become one fetch.  One of the ranks that want it reads it, chosen such that all ranks read about equally
    many bytes, private ones included.  On each other host one rank that wants it receives it and serves the
    rest of its host.  In no turn does a rank send or receive more than `bucket_nbytes`, counting every copy,
    except for a single fetch that is larger.

    With `costs`, fetches that ranks read sooner alone are left out; with None all fetches are shared.

    Ranks work off their rows in order, and fill in order the places where they keep fetches for others.  Then
    they never wait for each other in a circle, even if a rank has only one such place and an exchange waits
    for all fetches that its turn sends.  For the reads of a host in a turn wait only for earlier turns, and
    each exchange waits only for these reads.

    Raises `ProtocolError` when a rank's reads do not keep to the cells.
    """
    _require_cells(wants, cell_nbytes)
    fetches, fetch = merged(wants, host)
    keep = np.bincount(fetches.member_of)[fetches.of] > 1
    if costs is not None:
        keep &= _worthwhile(fetches, costs)
    fetches, private = fetches.only(keep), ~np.append(keep, False)[fetch]
    alone = np.bincount(wants.of, wants.nbytes * private, len(wants.first) - 1)
    load = np.bincount(wants.rank, np.repeat(alone, np.diff(wants.first)), len(host)).astype(np.float64)
    sets = _sets(fetches, host)
    reader = readers(sets, fetches.nbytes, load)
    turn, lane = _turns(sets, fetches.nbytes, reader, host, bucket_nbytes)
    stage = np.where(turn < 0, _stages(fetches, reader, int(turn.max(initial=-1)) + 1), turn)
    order = np.argsort(stage, kind="stable")
    columns = (*fetches[:3], reader, stage, lane, fetches.of)
    # In an exchange, a rank sends at most a bucket, or one fetch, of which every host gets a copy.
    most = int((fetches.nbytes * copies(*fetches[5::2])[fetches.of]).max(initial=1))
    return Division._make((*(column[order] for column in columns), *fetches[5:], -(-most // bucket_nbytes)))


def part_of(division: Division, rank: int) -> FetchTable:
    """Return the part of a rank."""
    mine = np.bincount(division.member_of, division.rank == rank) > 0
    number = np.flatnonzero(mine[division.of])
    file, start, nbytes, reader, stage, lane, of = (column[number] for column in division[:7])
    source, away = reader.copy(), np.zeros(len(number), np.bool_)
    served = [[(number[:0], number[:0])], [(number[:0], number[:0])]]
    for k in np.flatnonzero(mine).tolist():
        rows, members = np.flatnonzero(of == k), slice(*np.searchsorted(division.member_of, (k, k + 1)))
        ranks, host = division.rank[members], division.host[members]
        here = host == host[ranks == rank]
        near, far, bounds = ranks[here], ranks[~here], runs(host[~here])
        away[rows] = (reader[rows][:, None] != near).all(axis=1)
        receiving, sending = rows[away[rows]], rows[reader[rows] == rank]
        source[receiving] = near[lane[receiving] % len(near)]
        takers, serving = near[near != rank], rows[source[rows] == rank]
        served[0].append((np.repeat(serving, len(takers)), np.tile(takers, len(serving))))
        receivers = far[bounds[:-1] + lane[sending][:, None] % np.diff(bounds)]
        served[1].append((np.repeat(sending, len(bounds) - 1), receivers.reshape(-1)))
    # In each turn, fetches of this host's own readers come before those from other hosts.
    order = np.lexsort((number, away, stage))
    columns = [c[order] for c in (number, file, start, nbytes, source, reader, division.turn[number])]
    for pairs in served:
        columns += _grouped(order, *map(np.concatenate, zip(*pairs, strict=True)))
    return FetchTable(*columns)


def _grouped(order: Ints, rows: Ints, ranks: Ints) -> tuple[Ints, Ints]:
    """Return the bounds of the ranks of each row, for rows in another order, and these ranks."""
    place = np.argsort(order)[rows]
    return bounds_of(np.bincount(place, minlength=len(order))), ranks[np.argsort(place, kind="stable")]


def fetch_of(reads: Reads, part: FetchTable | Division) -> Ints:
    """Return for each read the row of a part, or of all fetches, that contains it; -1 where it is private."""
    found = np.full(len(reads.file), -1, np.int64)
    if not len(part.file) or not len(found):
        return found
    wide = int(max((reads.start + reads.nbytes).max(), (part.start + part.nbytes).max())) + 1
    key = part.file * wide + part.start
    order = np.argsort(key)
    row = order[np.maximum(np.searchsorted(key[order], reads.file * wide + reads.start, side="right") - 1, 0)]
    inside = (part.file[row] == reads.file) & (part.start[row] <= reads.start)
    inside &= reads.start + reads.nbytes <= part.start[row] + part.nbytes[row]
    found[inside] = row[inside]
    return found


def _require_cells(wants: Wants, cell_nbytes: int) -> None:
    """Raise `ProtocolError` naming the first rank that has a read which is empty or crosses cells."""
    _, start, nbytes, *_ = wants
    broken = (nbytes < 1) | (start // cell_nbytes != (start + nbytes - 1) // cell_nbytes)
    if broken.any():
        row = int(broken.argmax())
        raise ProtocolError(
            f"rank {wants.rank[wants.first[wants.of[row]]]} means to read {nbytes[row]} bytes from byte "
            f"{start[row]} of a file on, which is not inside one cell of {cell_nbytes} bytes",
            remedy=_SAME_VERSION,
        )


def _worthwhile(fetches: Fetches, costs: Costs) -> NDArray[np.bool_]:
    """Return the fetches that are quicker shared: none, if they are too few to set up sharing for."""
    across = copies(fetches.member_of, fetches.host) > 0
    # Ranks that want different bytes of a fetch save less than their number says.
    times = fetches.wanted / fetches.nbytes
    shared_s = 1 / (times * costs.read) + 1 / costs.copy + across[fetches.of] / costs.network
    quicker: NDArray[np.bool_] = shared_s < 1 / costs.read
    of_set = np.bincount(fetches.of, fetches.nbytes * quicker)
    taken = np.bincount(fetches.rank, of_set[fetches.member_of])
    quicker &= taken.max(initial=0) >= WORTH_NBYTES
    return quicker


def _turns(
    sets: Sequence[_Set], nbytes: Ints, reader: Ints, host: Ints, bucket_nbytes: int
) -> tuple[Ints, Ints]:
    """Return the exchange of each fetch, -1 where it stays on its host, and its lane.

    Sets come one after another, those with the most bytes first, others by their marks.  In the order of
    their ranks they would form chains.  A set begins in the last exchange of its ranks, if that has room, and
    goes on from there.
    """
    turn, lane = np.full(len(reader), -1, np.int64), np.zeros(len(reader), np.int64)
    last, filled = np.zeros(len(host), np.int64), np.zeros(len(host), np.int64)
    for ranks, rows, _ in sorted(sets, key=lambda s: -s.nbytes):
        counts = np.diff(runs(np.sort(host[ranks])))
        if len(counts) == 1:
            continue
        begin, lanes = int(last[ranks].max()), int(counts.min())
        before = filled[ranks] * (last[ranks] == begin)
        columns = (np.minimum(nbytes[rows], bucket_nbytes), reader[rows], host[reader[rows]])
        fetches = list(zip(*(column.tolist() for column in columns), strict=True))
        lane[rows], load = _lanes(fetches, lanes, len(counts), bucket_nbytes, int(before.max()))
        turn[rows] = begin + lane[rows] // lanes
        last[ranks], filled[ranks] = turn[rows[-1]], load + before * (turn[rows[-1]] == begin)
    return turn, lane


def _lanes(
    rows: Sequence[tuple[int, int, int]], lanes: int, hosts: int, bucket: int, before: int
) -> tuple[list[int], int]:
    """Return the lane of each fetch, and the most bytes that a rank sends or receives in the last exchange.

    Fetches are given with their bytes (at most a `bucket`), reader, and host of the reader.  An exchange has
    so many `lanes`, which are numbered through all exchanges.  The first one has the bytes `before`.
    """
    largest, away = max(row[0] for row in rows), sum(row[0] for row in rows) * (hosts - 1) // hosts
    exchanges = max(1, -(-away // (lanes * bucket)))
    even = min(bucket, max(1, -(-away // (lanes * exchanges * largest))) * largest)
    room, most = min(even, bucket - before), bucket - before
    found, lane, end, total, load = [], 0, lanes, 0, 0
    own, sent = dict[int, int](), dict[int, int]()
    for nbytes, rank, host in rows:
        own[host] = own.get(host, 0) + nbytes
        total += nbytes
        # A host does not receive the fetches that its own ranks read.
        coming = total - min(own.values()) if len(own) == hosts else total
        leaving = min(nbytes * (hosts - 1), bucket)
        if coming > room or sent.get(rank, 0) + leaving > most:
            lane += 1
            if lane == end or nbytes > room or sent.get(rank, 0) + leaving > most:
                lane, end, room, most = end, end + lanes, even, bucket
                load, sent = 0, {}
            own, total, coming = {host: nbytes}, nbytes, nbytes
        sent[rank] = sent.get(rank, 0) + leaving
        load = max(load, coming, sent[rank])
        found.append(lane)
    return found, load


def _stages(fetches: Fetches, reader: Ints, num_turns: int) -> Ints:
    """Return the turn with which each fetch would come, by the bytes that its reader has read before.

    That is where fetches that stay on their host have their place, so that exchanges go on beside them.
    """
    order = np.argsort(reader, kind="stable")
    bounds = runs(reader[order])
    past = bounds_of(fetches.nbytes[order])
    before = past[:-1] - np.repeat(past[bounds[:-1]], np.diff(bounds))
    total = np.repeat(np.diff(past[bounds]), np.diff(bounds))
    stage = np.empty(len(reader), np.int64)
    stage[order] = before * num_turns // total
    return stage
