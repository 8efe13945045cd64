"""The ranges that several ranks want: the rank that reads each, and the ranks that pass it on."""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import Struct

from reknit.errors import ProtocolError
from reknit.planner.pieces import reach_before

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


class Fetches(Struct, frozen=True):
    """Byte ranges in order of file and start, and who wants each.

    Fetch `f` is wanted by `rank[first[f]:first[f + 1]]`, in order of host, then of rank; `wanted` says how
    many of its bytes each of these wants.
    """

    file: NDArray[np.int64]
    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    first: NDArray[np.int64]
    rank: NDArray[np.int64]
    wanted: NDArray[np.int64]

    def of_rank(self) -> NDArray[np.int64]:
        """Return the number of the fetch for each row of `rank`."""
        return np.repeat(np.arange(len(self.file)), np.diff(self.first))

    def only(self, keep: NDArray[np.bool_]) -> Fetches:
        """Return some of the fetches."""
        counts = np.diff(self.first)
        rows = np.repeat(keep, counts)
        return Fetches(
            self.file[keep],
            self.start[keep],
            self.nbytes[keep],
            bounds_of(counts[keep]),
            self.rank[rows],
            self.wanted[rows],
        )


def merged(
    file: NDArray[np.int64],
    start: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    rank: NDArray[np.int64],
    host: NDArray[np.int64],
) -> Fetches:
    """Merge overlapping reads, a row for each read of a rank, and return the ranges that several ranks want.

    Rank `r` is on host `host[r]`.  Reads that only touch stay apart.
    """
    # Files are laid end to end, so that one sort serves them all.
    wide = int((start + nbytes).max(initial=0)) + 1
    order = np.argsort(file * wide + start, kind="stable")
    file, start, nbytes, rank = file[order], start[order], nbytes[order], rank[order]
    stop = start + nbytes
    fresh = start >= reach_before(file, stop)
    first = np.flatnonzero(fresh)
    # Ranks of one host side by side, since the next steps go by host.
    place = np.argsort(np.argsort(host, kind="stable"))
    fetch = np.cumsum(fresh) - 1
    by_rank = np.argsort(fetch * len(host) + place[rank], kind="stable")
    fetch, rank, nbytes = fetch[by_rank], rank[by_rank], nbytes[by_rank]
    wants = runs(fetch, rank)[:-1]
    counts = np.bincount(fetch[wants], minlength=len(first))
    everything = Fetches(
        file[first],
        start[first],
        np.maximum.reduceat(stop, first) - start[first],
        bounds_of(counts),
        rank[wants],
        np.add.reduceat(nbytes, wants),
    )
    return everything.only(counts > 1)


def bounds_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bounds of groups of these sizes, laid end to end."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def runs(*columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the starts of runs of equal rows, and the end of the last run."""
    fresh = np.zeros(max(len(columns[0]) - 1, 0), np.bool_)
    for column in columns:
        fresh |= column[1:] != column[:-1]
    if not len(columns[0]):
        return np.zeros(1, np.int64)
    return np.concatenate(([0], np.flatnonzero(fresh) + 1, [len(columns[0])]))


def numbers_of(first: NDArray[np.int64], rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a number for each list `rank[first[k]:first[k + 1]]`, the same for equal lists."""
    content = rank.astype(np.int32).tobytes()
    numbers: dict[bytes, int] = {}
    return np.fromiter(
        (
            numbers.setdefault(content[begin:end], len(numbers))
            for begin, end in pairwise((first * 4).tolist())
        ),
        np.int64,
        len(first) - 1,
    )


def occurrences(column: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each value the number of equal values before it."""
    order = np.argsort(column, kind="stable")
    bounds = runs(column[order])
    seen = np.empty(len(column), np.int64)
    seen[order] = np.arange(len(column)) - np.repeat(bounds[:-1], np.diff(bounds))
    return seen


SETTLING = 1 << 12
"""Up to this many different sets of ranks are gone through more than once."""


def readers(fetches: Fetches, alone: NDArray[np.int64], host: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank that reads each fetch, one of the ranks that want it, so that ranks read equally much.

    `alone` are the bytes that each rank would read without sharing.  All fetches that the same ranks want are
    divided at once.  Small sets of ranks come first, since the ranks of large sets can then still even out
    the rest.  The best choice for a set depends on the others.  So bytes are divided first, then whole
    fetches, and the sets whose fetches came out uneven once more.
    """
    reader = np.empty(len(fetches.file), np.int64)
    load = alone.astype(np.float64) - np.bincount(fetches.rank, fetches.wanted, len(host))
    sets = _sets(fetches, host)
    taken: list[NDArray[np.float64]] = [np.zeros(len(s.ranks)) for s in sets]
    for whole in (False, False, False, True, True) if 1 < len(sets) <= SETTLING else (True,):
        for k, (ranks, rows, nbytes) in enumerate(sets):
            load[ranks] -= taken[k]
            taken[k] = _levelling(load[ranks], nbytes)
            if whole:
                sizes = fetches.nbytes[rows]
                dealt = np.fromiter(_dealt(sizes, taken[k]), np.int64, len(rows))
                reader[rows] = ranks[dealt]
                taken[k] = np.bincount(dealt, sizes, len(ranks)).astype(np.float64)
            load[ranks] += taken[k]
    return reader


class _Set(NamedTuple):
    """Ranks that want the same fetches, numbers `rows`, of `nbytes` bytes in all."""

    ranks: NDArray[np.int64]
    rows: NDArray[np.int64]
    nbytes: int


def _sets(fetches: Fetches, host: NDArray[np.int64]) -> list[_Set]:
    """Return the different sets of ranks, small ones first, neighbours on different hosts."""
    number = numbers_of(fetches.first, fetches.rank)
    order = np.argsort(number, kind="stable")
    place = np.argsort(np.lexsort((host, occurrences(host))))
    sets = []
    for begin, end in pairwise(runs(number[order]).tolist()):
        rows = order[begin:end]
        ranks = fetches.rank[fetches.first[rows[0]] : fetches.first[rows[0] + 1]]
        sets.append(_Set(ranks[np.argsort(place[ranks])], rows, int(fetches.nbytes[rows].sum())))
    sets.sort(key=lambda s: len(s.ranks))
    return sets


def _levelling(load: NDArray[np.float64], nbytes: int) -> NDArray[np.float64]:
    """Return the share of each in `nbytes`, in whole bytes, so that the least loaded come to one level."""
    # The lowest k, filled up evenly, reach a level that falls with k until all below it are among them.
    level = float(((nbytes + np.cumsum(np.sort(load))) / np.arange(1, len(load) + 1)).min())
    shares: NDArray[np.float64] = np.ceil(np.maximum(level - load, 0))
    return shares


def _dealt(nbytes: NDArray[np.int64], shares: NDArray[np.float64]) -> Iterator[int]:
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


class Reads(NamedTuple):
    """The reads of one rank without sharing: byte ranges, ascending by (file, start), disjoint, none empty.

    `file` is the number of the file, in a numbering common to all ranks.
    """

    file: NDArray[np.int64]
    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]


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

    number: NDArray[np.int64]
    file: NDArray[np.int64]
    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    source: NDArray[np.int64]
    reader: NDArray[np.int64]
    turn: NDArray[np.int64]
    taker_first: NDArray[np.int64]
    taker: NDArray[np.int64]
    remote_first: NDArray[np.int64]
    remote: NDArray[np.int64]


class Division(Struct, frozen=True):
    """The part of every rank, and the number of exchanges between hosts."""

    parts: tuple[FetchTable, ...]
    num_turns: int


def divide(
    reads: Sequence[Reads], hosts: Sequence[int], *, cell_nbytes: int, bucket_nbytes: int, costs: Costs | None
) -> Division:
    """Divide the bytes that several ranks want among these ranks, so that each byte is read once.

    Pure.  `reads[r]` are the reads of rank `r`, on host `hosts[r]`, without sharing; no read crosses a
    multiple of `cell_nbytes`.  Reads that overlap become one fetch.  One of the ranks that want it reads it,
    chosen such that all ranks read about equally many bytes, private ones included.  On each other host one
    rank that wants it receives it and serves the rest of its host.  In no turn does a rank send or receive
    more than `bucket_nbytes`, counting every copy, except for a single fetch that is larger.

    With `costs`, fetches that ranks read sooner alone are left out; with None all fetches are shared.

    Ranks work off their rows in order, and fill in order the places where they keep fetches for others.  Then
    they never wait for each other in a circle, even if a rank has only one such place and an exchange waits
    for all fetches that its turn sends.  For the reads of a host in a turn wait only for earlier turns, and
    each exchange waits only for these reads.

    Raises `ProtocolError` when a rank's reads do not keep to the cells.
    """
    host = np.unique(np.asarray(hosts, np.int64), return_inverse=True)[1].reshape(-1).astype(np.int64)
    columns = [np.concatenate(column) for column in zip(*reads, strict=True)]
    rank = np.repeat(np.arange(len(reads)), [len(r.file) for r in reads])
    _require_cells(columns[1], columns[2], rank, cell_nbytes)
    fetches = merged(columns[0], columns[1], columns[2], rank, host)
    if costs is not None:
        fetches = _worthwhile(fetches, host, costs)
    alone = np.array([int(r.nbytes.sum()) for r in reads], np.int64)
    reader = readers(fetches, alone, host)
    routes = _routes(fetches, reader, host)
    turn = _turns(fetches, reader, routes, bucket_nbytes)
    num_turns = int(turn.max(initial=-1)) + 1
    stage = np.where(turn < 0, _stages(fetches, reader, num_turns), turn)
    return Division(_parts(fetches, reader, routes, turn=turn, stage=stage, num_ranks=len(reads)), num_turns)


def fetch_of(reads: Reads, part: FetchTable) -> NDArray[np.int64]:
    """Return for each of a rank's reads the row of its part that contains it, or -1 where it is private."""
    found = np.full(len(reads.file), -1, np.int64)
    if not len(part.number) or not len(found):
        return found
    wide = int(max((reads.start + reads.nbytes).max(), (part.start + part.nbytes).max())) + 1
    key = part.file * wide + part.start
    order = np.argsort(key)
    row = order[np.maximum(np.searchsorted(key[order], reads.file * wide + reads.start, side="right") - 1, 0)]
    inside = (part.file[row] == reads.file) & (part.start[row] <= reads.start)
    inside &= reads.start + reads.nbytes <= part.start[row] + part.nbytes[row]
    found[inside] = row[inside]
    return found


class _Routes(Struct, frozen=True):
    """How fetches reach hosts: a row for each fetch and host that wants it, in order of fetch and host.

    `first` cuts the rows of `Fetches.rank` by fetch and host.  `source` is the rank that has the bytes first
    on that host: the reader on its own, a receiver on others (`away`).
    """

    fetch: NDArray[np.int64]
    first: NDArray[np.int64]
    source: NDArray[np.int64]
    away: NDArray[np.bool_]


def _require_cells(
    start: NDArray[np.int64], nbytes: NDArray[np.int64], rank: NDArray[np.int64], cell_nbytes: int
) -> None:
    """Raise `ProtocolError` naming the first rank that has a read which is empty or crosses cells."""
    broken = (nbytes < 1) | (start // cell_nbytes != (start + nbytes - 1) // cell_nbytes)
    if broken.any():
        row = int(broken.argmax())
        raise ProtocolError(
            f"rank {rank[row]} means to read {nbytes[row]} bytes from byte {start[row]} of a file on, which "
            f"is not inside one cell of {cell_nbytes} bytes",
            remedy="run the same version of reknit on all ranks",
        )


def _worthwhile(fetches: Fetches, host: NDArray[np.int64], costs: Costs) -> Fetches:
    """Return the fetches that are quicker shared: none, if they are too few to set up sharing for."""
    want = fetches.of_rank()
    hosts = host[fetches.rank]
    across = np.bincount(want[runs(want, hosts)[:-1]], minlength=len(fetches.file)) > 1
    # Ranks that want different bytes of a fetch save less than their number says.
    times = np.bincount(want, fetches.wanted, len(fetches.file)) / fetches.nbytes
    shared_s = 1 / (times * costs.read) + 1 / costs.copy + across / costs.network
    fetches = fetches.only(shared_s < 1 / costs.read)
    taken = np.bincount(fetches.rank, fetches.nbytes[fetches.of_rank()])
    if taken.max(initial=0) >= WORTH_NBYTES:
        return fetches
    return fetches.only(np.zeros(len(fetches.file), np.bool_))


def _routes(fetches: Fetches, reader: NDArray[np.int64], host: NDArray[np.int64]) -> _Routes:
    """Choose the receiver of each fetch on each other host: the ranks there that want it take turns."""
    want, hosts = fetches.of_rank(), host[fetches.rank]
    first = runs(want, hosts)
    fetch = want[first[:-1]]
    away = hosts[first[:-1]] != host[reader[fetch]]
    source = reader[fetch]
    # Counted for each set of ranks alone: else a rhythm in the file could meet the rhythm of the counting.
    turns = occurrences(np.where(away, numbers_of(first, fetches.rank), -1))
    row = first[:-1] + turns % np.diff(first)
    source[away] = fetches.rank[row[away]]
    return _Routes(fetch, first, source, away)


def _turns(
    fetches: Fetches, reader: NDArray[np.int64], routes: _Routes, bucket_nbytes: int
) -> NDArray[np.int64]:
    """Return the exchange of each fetch: the first that has room on all ranks that send or receive it.

    No rank goes back to an earlier turn, so that it sends and receives in order of file and start.
    """
    turn = np.full(len(reader), -1, np.int64)
    fetch, receiver = routes.fetch[routes.away], routes.source[routes.away]
    bounds = runs(fetch)
    travelling = fetch[bounds[:-1]]
    # Each rank has two buckets, an even one for fetches that it sends, an odd one for fetches that it
    # receives.
    num_buckets = 2 * int(fetches.rank.max(initial=-1)) + 2
    current, filled = [0] * num_buckets, [0] * num_buckets
    receiving = (2 * receiver + 1).tolist()
    columns = (travelling, reader[travelling], fetches.nbytes[travelling], bounds[:-1], bounds[1:])
    for number, rank, nbytes, begin, end in zip(*(c.tolist() for c in columns), strict=True):
        more = [(2 * rank, nbytes * (end - begin)), *[(bucket, nbytes) for bucket in receiving[begin:end]]]
        now = max([current[bucket] for bucket, _ in more])
        # An empty bucket takes a fetch of any size.
        if any([current[b] == now and 0 < filled[b] > bucket_nbytes - size for b, size in more]):
            now += 1
        for bucket, size in more:
            filled[bucket] = size if current[bucket] < now else filled[bucket] + size
            current[bucket] = now
        turn[number] = now
    return turn


def _stages(fetches: Fetches, reader: NDArray[np.int64], num_turns: int) -> NDArray[np.int64]:
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


def _parts(
    fetches: Fetches,
    reader: NDArray[np.int64],
    routes: _Routes,
    *,
    turn: NDArray[np.int64],
    stage: NDArray[np.int64],
    num_ranks: int,
) -> tuple[FetchTable, ...]:
    """Return every rank's rows; fetches have numbers in the order of stage, file and start."""
    number = np.empty(len(reader), np.int64)
    number[np.argsort(stage, kind="stable")] = np.arange(len(reader))
    # Keys that ascend in the order of the rows of all ranks, for the fetches that a host reads or receives.
    read_key = 2 * stage * len(reader) + number
    wide = 2 * (int(stage.max(initial=0)) + 1) * len(reader)
    counts = np.diff(routes.first)
    fetch = np.repeat(routes.fetch, counts)
    source = np.repeat(routes.source, counts)
    key = read_key[fetch] + np.repeat(routes.away, counts) * len(reader)
    own_key = fetches.rank * wide + key
    order = np.argsort(own_key)
    taking = source != fetches.rank
    sent = routes.fetch[routes.away]
    served = (
        _served(own_key[order], source[taking] * wide + key[taking], fetches.rank[taking]),
        _served(own_key[order], reader[sent] * wide + read_key[sent], routes.source[routes.away]),
    )
    fetch, source = fetch[order], source[order]
    of_fetch = (number, fetches.file, fetches.start, fetches.nbytes, reader, turn)
    parts = []
    for a, b in pairwise(bounds_of(np.bincount(fetches.rank, minlength=num_ranks)).tolist()):
        columns = [column[fetch[a:b]] for column in of_fetch]
        columns.insert(4, source[a:b].copy())
        for first, ranks in served:
            columns += [first[a : b + 1] - first[a], ranks[first[a] : first[b]].copy()]
        parts.append(FetchTable(*columns))
    return tuple(parts)


def _served(
    key: NDArray[np.int64], served_key: NDArray[np.int64], ranks: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group ranks by the row that serves them, and return the bounds of the groups, and the ranks."""
    order = np.argsort(served_key, kind="stable")
    first = np.searchsorted(served_key[order], key).astype(np.int64)
    return np.append(first, len(ranks)), ranks[order]
