"""The messages between ranks: rounds to a root and back, in which an error travels like an answer.

Everything is one *round*: each rank sends a request, rank 0 decides once it has all requests, and each rank
receives its answer.  A backend only carries bytes (`Group.gather`, `Group.give`).  `turn` makes rounds safe.
A rank that fails before its request sends the error in its place, and an error of rank 0 between the two is
the answer; then every rank raises that same error.  The values of a rank alone are not packed.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import sys
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

import msgspec
from msgspec import Struct, structs

from reknit.environment import grpc_handles_forks, remove_grpc_variables, set_grpc_variables
from reknit.errors import ProtocolError, ReknitError, from_wire, shortage, typed
from reknit.events.phase import now, root_decided
from reknit.system import Switch
from reknit.types.small import decoder, lazy_property

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    Merge = Callable[[Sequence[Any]], Any]


_Value = TypeVar("_Value")

MOST_OTHERS = 8
"""The most failed ranks that are named besides the first; of all others only their number is kept."""


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """A payload; or the error of the lowest failed rank, with the other failed ranks and their errors.

    In an answer, `at` is the time of the root's decision, in seconds since the epoch by its clock.
    """

    payload: bytes = b""
    error: dict[str, Any] | None = None
    others: list[tuple[int | None, str]] = []
    more: int = 0
    at: float | None = None

    def failure(self) -> ReknitError | None:
        """Return the error, which says how many other ranks failed too and how; None without one."""
        if self.error is None:
            return None
        first = from_wire(self.error)
        if self.others:
            ranks = ", ".join(f"{rank} ({kind})" for rank, kind in self.others)
            more = f" and {self.more} more" if self.more else ""
            first.message += f"; also failed: rank {ranks}{more}"
        return first


encode = msgspec.msgpack.Encoder().encode
_decode = decoder(Envelope)


def decode(data: bytes) -> Envelope:
    """Return the envelope in `data`.  Raises `ProtocolError` for other data."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a rank sent bytes that are not a message of a round: {error}") from error


def packed(value: Any) -> bytes:
    """Return a request or an answer as bytes: by its method `pack`, or in MessagePack; bytes as they are."""
    if isinstance(value, bytes):
        return value
    return value.pack() if hasattr(value, "pack") else msgspec.msgpack.encode(value)


def unpacked(parts: Sequence[bytes], kind: type[_Value]) -> list[_Value]:
    """Return the values of a type that `packed` made into bytes.  Raises `ProtocolError` for other bytes.

    A type with a method `pack` has a class method `unpack` for several at once, which may share parts.
    """
    if kind is bytes:
        return list(parts)  # type: ignore[arg-type]
    try:
        if (own := getattr(kind, "unpack", None)) is not None:
            values: list[_Value] = own(parts)
            return values
        return [decoder(kind)(part) for part in parts]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a rank sent another message than a {kind.__name__}: {error}") from error


def failed(error: BaseException, rank: int, name: str) -> Envelope:
    """Return the envelope of a rank that met an error: a typed description of it, if it is a foreign one."""
    typed_error = typed(error)
    typed_error.sign(rank=rank, phase=name)
    return Envelope(error=typed_error.to_wire())


def merged(envelopes: Sequence[Envelope], merge: Callable[[list[bytes]], bytes]) -> Envelope:
    """Return one envelope for several: `merge` of the payloads, or the errors if a rank failed."""
    failures = [envelope for envelope in envelopes if envelope.error is not None]
    if not failures:
        return Envelope(merge([envelope.payload for envelope in envelopes]))
    failures.sort(key=lambda envelope: _order(_culprit(envelope)))
    others = [_culprit(envelope) for envelope in failures[1:]]
    others += [other for envelope in failures for other in envelope.others]
    others.sort(key=_order)
    more = sum(envelope.more for envelope in failures) + max(0, len(others) - MOST_OTHERS)
    return Envelope(b"", failures[0].error, others[:MOST_OTHERS], more)


def _culprit(envelope: Envelope) -> tuple[int | None, str]:
    wire = envelope.error or {}
    rank = wire.get("rank")
    return rank if isinstance(rank, int) else None, str(wire.get("type"))


def _order(culprit: tuple[int | None, str]) -> tuple[bool, int]:
    rank, _ = culprit
    return rank is None, rank or 0


def doubling(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield seconds without end: `first_s`, then twice as many each time, up to `longest_s`."""
    while True:
        yield first_s
        first_s = min(longest_s, first_s * 2)


class Topology:
    """A tree over ranks ``0 .. size - 1``, within hosts first and then between them.

    `hosts` has the host of each rank, by any numbers.  The lowest rank of a host stands for it: the other
    ranks of the host are below it, `fan_out` at each rank.  The lowest ranks of all hosts form a tree of
    their own likewise, in ascending order.  Rank 0 is above all.  A rank has thus at most ``2 * fan_out``
    children, which all have higher numbers, and only one rank of a host talks to other hosts above it.
    """

    def __init__(self, hosts: Sequence[int], fan_out: int) -> None:
        self.size, self.fan_out = len(hosts), fan_out
        ranks_of: dict[int, list[int]] = {}
        for rank, host in enumerate(hosts):
            ranks_of.setdefault(host, []).append(rank)
        # Numbered anew by their lowest ranks, so that the names of hosts do not matter.
        numbers = {host: number for number, host in enumerate(ranks_of)}
        self.hosts = [numbers[host] for host in hosts]
        self.num_hosts = len(numbers)
        """Number of hosts."""
        self._leaders = [ranks[0] for ranks in ranks_of.values()]
        self._parents, self._depths = [0] * self.size, [0] * self.size
        for ranks in ranks_of.values():
            for turn, rank in enumerate(ranks):
                number = self.hosts[rank]
                if turn:
                    parent = ranks[(turn - 1) // fan_out]
                elif number:
                    parent = self._leaders[(number - 1) // fan_out]
                else:
                    continue  # rank 0
                self._parents[rank], self._depths[rank] = parent, self._depths[parent] + 1

    @classmethod
    def flat(cls, size: int, fan_out: int) -> Topology:
        """Return the tree of ranks that are each on a host of their own."""
        return cls(range(size), fan_out)

    def parent(self, rank: int) -> int | None:
        """Return the rank that `rank` reports to, None for rank 0."""
        return None if rank == 0 else self._parents[rank]

    def children(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that report to `rank`, in ascending order."""
        return tuple(self._below.get(rank, ()))

    def subtree(self, rank: int) -> tuple[int, ...]:
        """Return `rank` and every rank below it, in ascending order."""
        if rank == 0:
            return tuple(range(self.size))
        found = [rank]
        for deep in found:  # which grows meanwhile
            found += self._below.get(deep, ())
        return tuple(sorted(found))

    def depth(self, rank: int) -> int:
        """Return the number of steps from `rank` up to rank 0."""
        return self._depths[rank]

    def leads_host(self, rank: int) -> bool:
        """Return whether a rank is the lowest of its host."""
        return self._leaders[self.hosts[rank]] == rank

    @lazy_property
    def height(self) -> int:
        """Return the number of steps from the deepest rank up to rank 0."""
        return max(self._depths)

    @lazy_property
    def digest(self) -> str:
        """Equal for equal trees only, to compare them between ranks."""
        shape = struct.pack(f"<{1 + self.size}q", self.fan_out, *self.hosts)
        return hashlib.blake2b(shape, digest_size=16).hexdigest()

    @lazy_property
    def _below(self) -> dict[int, list[int]]:
        """Return the children of each rank with children."""
        below: dict[int, list[int]] = {}
        for rank, parent in enumerate(self._parents[1:], 1):
            below.setdefault(parent, []).append(rank)
        return below


_log = logging.getLogger("reknit.comm")
_quiet = Switch(set_grpc_variables, remove_grpc_variables)


def quietly() -> AbstractContextManager[object]:
    """Let gRPC, if it is imported meanwhile, report only errors, and do nothing in forked processes."""
    if "reknit.comm.serving" not in sys.modules and grpc_handles_forks():
        _log.warning(
            "gRPC acts in processes that this one forks: workers of a data loader may end with a segmentation"
            " fault; set GRPC_ENABLE_FORK_SUPPORT=0 before gRPC is imported"
        )
    return _quiet.turned()


class Call(Struct, frozen=True):
    """The input of a rank to a round; `request` is bytes, or any value of a rank alone.

    `subject` distinguishes rounds of one name about different things.  `merge` makes one request of several,
    first the rank's own and then one of each child's subtree, so that rank 0 receives a single request.  It
    must be associative, never raises, and is not called for a single request.  A round that `opens` is the
    first of a call that all ranks have to make: a rank that waits there for seconds logs the missing ranks.
    """

    name: str
    request: Any
    timeout_s: float
    subject: str = ""
    merge: Merge | None = None
    opens: bool = False


class Group(Protocol):
    """Ranks `0 .. size - 1` that can hold rounds; `rank` is this process's own."""

    @property
    def rank(self) -> int:
        """This process's place in the group."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def topology(self) -> Topology:
        """The tree of the ranks, and their hosts."""

    @property
    def generation(self) -> int:
        """A number that is higher than in all earlier runs of this job; the same on all ranks."""

    @property
    def broken(self) -> bool:
        """Whether the group has been found broken: a rank is gone, and no later round can succeed."""

    def gather(self, call: Call) -> list[Any] | None:
        """Enter a round, and return on rank 0 the requests of all ranks; None on the others, at once.

        With a merge, it returns one request.  `give` has to follow, or `leave` after any error, Ctrl-C too.
        Every rank calls this with the same name and subject at the same place in its sequence of rounds.
        Otherwise all raise `ProtocolError`, which names the place of each rank.  Raises `DeadlineError`,
        which names the ranks that did not come within `timeout_s`, and `CommError` if a peer is gone.
        """

    def give(self, answers: Sequence[Any] | None) -> Any:
        """End the round with one answer for each rank, from rank 0; others pass None.

        Return this rank's answer.  Raises the errors that `gather` has on rank 0.
        """

    def leave(self, call: Call, error: BaseException) -> None:
        """End the round of `call` with an error for all ranks, unless it is over."""

    def close(self) -> None:
        """Leave the group; later rounds fail on every rank."""


class SoloGroup:
    """The group of a process that is alone."""

    rank = 0
    size = 1
    broken = False

    def __init__(self, generation: int | None = None) -> None:
        self.given = generation

    def __repr__(self) -> str:
        return "<SoloGroup: this process alone>"

    @lazy_property
    def topology(self) -> Topology:
        """A tree of one rank."""
        return Topology.flat(1, 1)

    @property
    def generation(self) -> int:
        """The given generation, or else the time in ms: a process that is alone saves the newest state.

        A process that is alone has no record of earlier runs.  It can only find that another process has
        saved later.
        """
        return int(now() * 1000) if self.given is None else self.given

    def gather(self, call: Call) -> list[Any]:
        """Return the only request."""
        return [call.request]

    def give(self, answers: Sequence[Any] | None) -> Any:
        """Return the only answer."""
        assert answers is not None
        return answers[0]

    def leave(self, call: Call, error: BaseException) -> None:
        """Do nothing: no other rank waits."""

    def close(self) -> None:
        """Do nothing: the group has no other ranks."""


class Turn:
    """This rank's part in one round, as a `with` block; see `turn`."""

    def __init__(self, group: Group, call: Call) -> None:
        self._group, self._call, self._merge = group, call, call.merge
        self._is_alone = isinstance(group, SoloGroup)
        self._stage = "before"
        """How far the round is: before, entering, between (its two parts), ending, or over."""
        self._kind: type[Any] = bytes
        """The type of the request."""
        self._own: BaseException | None = None
        """The first error of this rank itself."""

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._stage == "over":
            return
        error = error or ReknitError(f"round {self._call.name!r} ended without an answer")
        try:
            if self._stage in {"before", "between"}:
                self._conclude(self._send_error(error))
        finally:
            # Ctrl-C may come at any line, also where the group has just entered the round.
            if self._stage != "over":
                self._group.leave(self._call, error)

    def gather(self, value: _Value) -> list[_Value] | None:
        """Send this rank's request; return on rank 0 the requests of all ranks, None on the others."""
        if self._is_alone:
            self._call = structs.replace(self._call, request=value)
            values = self._group.gather(self._call)
            self._stage = "between"
            return values
        self._kind = type(value)
        envelopes = self._enter(Envelope(packed(value)))
        if envelopes is None:
            return None
        if any(envelope.error is not None for envelope in envelopes):
            failure = merged(envelopes, b"".join).failure()
            assert failure is not None
            raise failure
        return unpacked([envelope.payload for envelope in envelopes], self._kind)

    def give(self, answers: Sequence[_Value] | None, kind: type[_Value]) -> _Value:
        """Send each rank its answer of a type, from rank 0; others pass None.  Return this rank's own."""
        size, envelopes = self._group.size, None
        if self._group.rank == 0:
            if answers is None or len(answers) != size:
                raise ReknitError(f"{len(answers or ())} answers for {size} ranks", rank=0)
            if self._is_alone:
                own: _Value = self._group.give(answers)
                self._stage = "over"
                return own
            # A broadcast answers every rank with one object: encoded once, it stays one.
            at = now()
            distinct = {id(answer): answer for answer in answers}
            encoded = {key: encode(Envelope(packed(answer), at=at)) for key, answer in distinct.items()}
            envelopes = [encoded[id(answer)] for answer in answers]
        (own,) = unpacked([self._conclude(self._end(envelopes))], kind)
        return own

    def give_all(self, answer: _Value | None, kind: type[_Value]) -> _Value:
        """Send one answer to all ranks, from rank 0, and return it; the argument of others does not count."""
        if self._group.rank > 0:
            return self.give(None, kind)
        return self.give(cast("list[_Value]", [answer] * self._group.size), kind)

    def arrive(self) -> None:
        """End the block: return when every rank has come here without an error."""
        if self._stage == "before":
            self.gather(b"")
        self.give_all(b"", bytes)

    def _enter(self, request: Envelope) -> list[Envelope] | None:
        """Enter the round; return the requests on rank 0."""
        merge = None if self._merge is None else self._merged
        self._call = structs.replace(self._call, request=encode(request), merge=merge)
        self._stage = "entering"
        try:
            requests = self._group.gather(self._call)
        except Exception as error:
            self._raise_signed(error)
        self._stage = "between"
        return None if requests is None else [decode(data) for data in requests]

    def _end(self, answers: Sequence[bytes] | None) -> Envelope:
        """End the round, and return this rank's answer."""
        self._stage = "ending"
        try:
            answer = decode(self._group.give(answers))
        except Exception as error:
            self._raise_signed(error)
        self._stage = "over"
        return answer

    def _send_error(self, error: BaseException) -> Envelope:
        """Send an error of this rank to all ranks, since they wait for it; return this rank's answer."""
        mine, group = self._failed(error), self._group
        if self._is_alone:
            self._stage = "over"
            return mine
        if self._stage == "before":
            envelopes = self._enter(mine)
            if envelopes is None:
                return self._end(None)
            mine = merged(envelopes, b"".join)
        elif group.rank > 0:
            group.leave(self._call, mine.failure() or error)
            self._stage = "over"
            return mine
        return self._end([encode(mine)] * group.size)

    def _conclude(self, answer: Envelope) -> bytes:
        """Return the answer of this rank; raise its error."""
        if answer.at is not None and self._group.size > 1:
            root_decided(answer.at if self._group.rank else now())
        own = self._own
        if own is not None and not isinstance(own, Exception):
            raise own
        failure = answer.failure()
        if failure is not None:
            # It has all parts of a `ReknitError`; a reader may only miss its cause.
            raise failure from (own.__cause__ if isinstance(own, ReknitError) else own)
        return answer.payload

    def _merged(self, requests: Sequence[bytes]) -> bytes:
        """Make one request of several, on the way up."""
        merge = self._merge
        assert merge is not None
        try:
            return encode(
                merged(
                    [decode(request) for request in requests],
                    lambda parts: packed(merge(unpacked(parts, self._kind))),
                )
            )
        except BaseException as error:  # all ranks wait for this one, so a bug must reach them too
            return encode(self._failed(error))

    def _failed(self, error: BaseException) -> Envelope:
        """Keep an error of this rank, and return the envelope that describes it to the other ranks."""
        self._own = self._own or error
        return failed(error, self._group.rank, self._call.name)

    def _raise_signed(self, error: Exception) -> NoReturn:
        """Raise an error of the group, or the error of this rank that it could not send."""
        reported = error if isinstance(error, ReknitError) else shortage(error)
        if reported is None:  # a bug in the group itself
            raise error
        reported.sign(rank=self._group.rank, phase=self._call.name)
        if self._own is not None:
            raise self._own from error
        raise reported from (None if reported is error else error)


def turn(
    group: Group,
    name: str,
    timeout_s: float,
    *,
    merge: Merge | None = None,
    subject: str = "",
    opens: bool = False,
) -> Turn:
    """Return a `with` block that holds one round: its body works, then gathers, and ends with its answer.

    `Turn.gather` returns the requests of all ranks on rank 0, and None on the others; rank 0 decides in the
    lines that follow, and `Turn.give` returns the answer of this rank.  Requests and answers are bytes, or
    values that MessagePack can hold, or of a class with `pack` and `unpack` (`packed`).  All
    ranks send requests of one type.

    `subject` names the subject of the round; ranks with different subjects are in different places.  With
    `merge`, requests become one request on the way up, which alone is gathered.  `merge` is called with the
    requests of a rank and of the subtrees below it, two or more, in any order of ranks, and has to be
    associative.  `opens` says that this is the first round of a call that all ranks have to make.

    If the body fails before it gathers, or `merge` fails, or rank 0 fails before it gives, every rank raises
    the same error, which names the rank where it began.  A foreign exception (a bug) becomes a `ReknitError`
    that describes it, and is its cause on the rank where it happened.  An interrupt (Ctrl-C) is raised
    unchanged where it happened.  A failure after the answer concerns this rank only.
    """
    return Turn(group, Call(name, b"", timeout_s, subject, merge, opens=opens))


def barrier(group: Group, name: str, timeout_s: float) -> None:
    """Wait until every rank has come here."""
    with turn(group, name, timeout_s, merge=b"".join, opens=True) as its_turn:
        its_turn.arrive()


def fail(group: Group, name: str, error: BaseException, timeout_s: float, *, subject: str = "") -> NoReturn:
    """Enter a round only to raise this rank's error, here and on all other ranks."""
    with turn(group, name, timeout_s, subject=subject, opens=True):
        raise error
