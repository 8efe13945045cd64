"""The messages between ranks: rounds to a root and back, in which an error travels like an answer.

Everything is one *round*: each rank sends a request, rank 0 decides once it has all requests, and each rank
receives its answer.  A backend only carries bytes (`Group.exchange`).  `turn` makes rounds safe: a rank that
fails before or while making its request sends the error in its place, and then every rank raises that same
error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

from reknit.comm.envelope import Envelope, decode, encode, failed, merged
from reknit.comm.topology import Topology
from reknit.errors import ReknitError
from reknit.monitor.phase import now, root_decided

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Merge = Callable[[Sequence[bytes]], bytes]
    Decide = Callable[[list[bytes]], Sequence[bytes]]


class Call(NamedTuple):
    """The input of a rank to a round.

    `subject` distinguishes rounds of one name about different things.  `merge` makes one request of several,
    first the rank's own and then one of each child's subtree, so that rank 0 receives a single request.  It
    must be associative, never raises, and is not called for a single request.  A round that `opens` is the
    first of a call that all ranks have to make: a rank that waits there for seconds logs the missing ranks.
    """

    name: str
    request: bytes
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

    def exchange(self, call: Call, decide: Decide) -> bytes:
        """Send the request to rank 0, which runs `decide` on all requests, and return this rank's answer.

        `decide` never raises, is called on rank 0 only, and returns one answer for each rank.  With a merge,
        it receives one request.  Every rank calls `exchange` with the same name and subject at the same place
        in its sequence of rounds.  Otherwise all raise `ProtocolError`, which names the place of each rank.
        Raises `DeadlineError`, which names the ranks that did not come within `timeout_s`, and `CommError` if
        a peer is gone.
        """

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

    def exchange(self, call: Call, decide: Decide) -> bytes:
        """Answer the only request."""
        return decide([call.request])[0]

    def close(self) -> None:
        """Do nothing: the group has no other ranks."""


class Turn:
    """This rank's part in one round, as a `with` block; see `turn`."""

    def __init__(self, group: Group, call: Call) -> None:
        self._group, self._call = group, call
        self._held = False
        self._own: BaseException | None = None
        """The first error of this rank itself."""

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._held:
            # After any error, the other ranks must not wait for this rank.
            error = error or ReknitError(f"round {self._call.name!r} ended without an exchange")
            self._hold(self._failed(error), lambda _: [])

    def exchange(self, request: bytes, decide: Decide) -> bytes:
        """Send `request`, let rank 0 `decide` on the requests of all ranks, and return this rank's answer."""
        return self._hold(Envelope(request), decide)

    def arrive(self) -> None:
        """End the block with an empty request: return when every rank has come here without an error."""
        self.exchange(b"", lambda _: [b""] * self._group.size)

    def _hold(self, request: Envelope, decide: Decide) -> bytes:
        data = encode(request)
        self._held = True
        try:
            answer = decode(
                self._group.exchange(
                    self._call._replace(request=data, merge=self._call.merge and self._merged),
                    lambda requests: self._decided(requests, decide),
                )
            )
        except ReknitError as error:
            error.sign(rank=self._group.rank, phase=self._call.name)
            raise (self._own or error) from (error if self._own else None)
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
        assert self._call.merge is not None
        try:
            return encode(merged([decode(request) for request in requests], self._call.merge))
        except BaseException as error:  # all ranks wait for this one, so a bug must reach them too
            return encode(self._failed(error))

    def _decided(self, requests: list[bytes], decide: Decide) -> Sequence[bytes]:
        """Make all answers of all requests, on rank 0; an error becomes the answer of every rank."""
        size = self._group.size
        try:
            envelopes = [decode(request) for request in requests]
            if any(envelope.error is not None for envelope in envelopes):
                return [encode(merged(envelopes, b"".join))] * size
            answers = list(decide([envelope.payload for envelope in envelopes]))
            if len(answers) != size:
                raise ReknitError(f"{len(answers)} answers for {size} ranks", rank=0)
            # A broadcast answers every rank with one object: encoded once, it stays one.
            at = now()
            encoded = {id(answer): encode(Envelope(answer, at=at)) for answer in answers}
            return [encoded[id(answer)] for answer in answers]
        except BaseException as error:  # every rank waits for an answer: a bug or Ctrl-C must reach them too
            return [encode(self._failed(error))] * size

    def _failed(self, error: BaseException) -> Envelope:
        """Keep an error of this rank, and return the envelope that describes it to the other ranks."""
        self._own = self._own or error
        return failed(error, self._group.rank, self._call.name)


def turn(
    group: Group,
    name: str,
    timeout_s: float,
    *,
    merge: Merge | None = None,
    subject: str = "",
    opens: bool = False,
) -> Turn:
    """Return a `with` block that holds one round: its body works, and ends with one `Turn.exchange`.

    `subject` names the subject of the round; ranks with different subjects are in different places.  With
    `merge`, requests become one request on the way up, which alone is passed to `decide`.  `merge` is called
    with the requests of a rank and of the subtrees below it, two or more, in any order of ranks, and has to
    be associative.  `opens` says that this is the first round of a call that all ranks have to make.

    If the body fails before its exchange, or `merge` or `decide` fails, every rank raises the same error,
    which names the rank where it began.  A foreign exception (a bug) becomes a `ReknitError` that describes
    it, and is its cause on the rank where it happened.  An interrupt (Ctrl-C) is raised unchanged where it
    happened.  A failure after the exchange concerns this rank only.
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
