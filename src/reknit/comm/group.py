"""The messages between ranks: rounds to a root and back, in which an error travels like an answer.

Everything is one *round*: each rank sends a request, rank 0 decides once it has all requests, and each rank
receives its answer.  A backend only carries bytes (`Group.gather`, `Group.give`).  `turn` makes rounds safe.
A rank that fails before its request sends the error in its place, and an error of rank 0 between the two is
the answer; then every rank raises that same error.  The values of a rank alone are not packed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar, cast

from reknit.comm.envelope import Envelope, decode, encode, failed, merged, packed, unpacked
from reknit.comm.topology import Topology
from reknit.errors import ReknitError, shortage
from reknit.monitor.phase import now, root_decided

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Merge = Callable[[Sequence[Any]], Any]

_Value = TypeVar("_Value")


class Call(NamedTuple):
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

    @property
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
            self._call = self._call._replace(request=value)
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
        self._call = self._call._replace(request=encode(request), merge=merge)
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
    values that MessagePack can hold, or of a class with `pack` and `unpack` (`comm.envelope.packed`).  All
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
