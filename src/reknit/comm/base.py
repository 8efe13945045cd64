"""What ranks can say to each other: rounds to a root and back, in which an error travels like an answer.

Everything is one *round*: each rank sends a request, rank 0 decides once it has them all, each rank gets its
answer. A backend only carries bytes (`Group.exchange`); `round` adds what makes it safe: a rank that fails
before or while making its request sends the error in its place, and then every rank raises that same error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from reknit.errors import ProtocolError, ReknitError, UsageError, from_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Group(Protocol):
    """Ranks `0 .. size - 1` that can hold rounds; `rank` is this process's own."""

    @property
    def rank(self) -> int:
        """This process's place in the group."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def broken(self) -> bool:
        """Whether the group is known to be broken: a rank is gone, and no later round can end well."""

    def exchange(
        self, name: str, request: bytes, decide: Callable[[list[bytes]], Sequence[bytes]], timeout_s: float
    ) -> bytes:
        """Send `request` to rank 0, which runs `decide` on all of them, and return this rank's answer.

        `decide` never raises, and is called on rank 0 only.  Every rank calls `exchange` with the same `name`
        at the same place in its sequence of rounds; otherwise all raise `ProtocolError`, which says who is
        where. Raises `DeadlineError` naming the ranks that did not come within `timeout_s`, `CommError` when
        a peer is gone.
        """

    def close(self) -> None:
        """Leave the group; later rounds fail on every rank."""


class SoloGroup:
    """The group of a process that is alone."""

    rank = 0
    size = 1
    broken = False

    def exchange(
        self, name: str, request: bytes, decide: Callable[[list[bytes]], Sequence[bytes]], timeout_s: float
    ) -> bytes:
        """Answer the only request."""
        return decide([request])[0]

    def close(self) -> None:
        """Do nothing: there is no one to leave."""


class _Envelope(msgspec.Struct, array_like=True):
    payload: bytes = b""
    error: dict[str, Any] | None = None


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Envelope)


def _decode(data: bytes) -> _Envelope:
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a rank sent bytes that are no part of a round: {error}") from error


class _Decision:
    """Rank 0's part of a round: turns all requests into all answers, and an error into everyone's answer."""

    def __init__(self, name: str, decide: Callable[[list[bytes]], Sequence[bytes]]) -> None:
        self._name = name
        self._decide = decide
        self.error: BaseException | None = None

    def __call__(self, requests: list[bytes]) -> Sequence[bytes]:
        try:
            envelopes = [_decode(request) for request in requests]
            failed = [from_wire(envelope.error) for envelope in envelopes if envelope.error is not None]
            if failed:
                refusal = _encode(_Envelope(error=_merged(failed).to_wire()))
                return [refusal] * len(requests)
            answers = list(self._decide([envelope.payload for envelope in envelopes]))
            if len(answers) != len(requests):
                raise ReknitError(f"{len(answers)} answers for {len(requests)} ranks", rank=0)
            # A broadcast answers every rank with one object: encoded once, it stays one.
            encoded = {id(answer): _encode(_Envelope(payload=answer)) for answer in answers}
            return [encoded[id(answer)] for answer in answers]
        except (
            BaseException
        ) as error:  # every rank waits for an answer, so a bug or Ctrl-C must reach them too
            self.error = error
            return [_encode(_Envelope(error=_described(error, 0, self._name).to_wire()))] * len(requests)


def round(
    group: Group,
    name: str,
    produce: Callable[[], bytes],
    decide: Callable[[list[bytes]], Sequence[bytes]],
    timeout_s: float,
) -> bytes:
    """Hold one round: run `produce` here for the request, `decide` on rank 0, and return this rank's answer.

    When `produce` fails on any rank, or `decide` fails, every rank raises the same error, naming the rank
    where it began.  An error that is not a `ReknitError` (a bug, Ctrl-C) is raised unchanged where it
    happened, and reaches the other ranks as a `ReknitError` that describes it.
    """
    own: BaseException | None = None
    decision = _Decision(name, decide)
    try:
        request = _encode(_Envelope(payload=produce()))
    except BaseException as error:  # whatever it is, the others must not wait for this rank
        own = error
        request = _encode(_Envelope(error=_described(error, group.rank, name).to_wire()))
    try:
        answer = _decode(group.exchange(name, request, decision, timeout_s))
    except ReknitError as error:
        error.sign(rank=group.rank, phase=name)
        own = own or decision.error
        raise (own or error) from (error if own else None)
    own = own or decision.error
    if own is not None and not isinstance(own, ReknitError):
        raise own
    if answer.error is not None:
        raise from_wire(answer.error) from own
    return answer.payload


def _described(error: BaseException, rank: int, name: str) -> ReknitError:
    """Return `error` itself, or a typed description of a foreign one."""
    typed = error if isinstance(error, ReknitError) else ReknitError(f"{type(error).__name__}: {error}")
    typed.sign(rank=rank, phase=name)
    return typed


def _merged(errors: list[ReknitError]) -> ReknitError:
    """Return the first error, saying how many other ranks failed too and how."""
    first = errors[0]
    if others := errors[1:]:
        ranks = ", ".join(f"{other.rank} ({type(other).__name__})" for other in others[:8])
        more = f" and {len(others) - 8} more" if len(others) > 8 else ""
        first.message += f"; also failed: rank {ranks}{more}"
    return first


def gather(group: Group, name: str, payload: bytes, timeout_s: float) -> list[bytes] | None:
    """Return every rank's payload on rank 0, and None elsewhere."""
    kept: list[list[bytes]] = []

    def keep(payloads: list[bytes]) -> list[bytes]:
        kept.append(payloads)
        return [b""] * len(payloads)

    round(group, name, lambda: payload, keep, timeout_s)
    return kept[0] if kept else None


def scatter(group: Group, name: str, payloads: Sequence[bytes] | None, timeout_s: float) -> bytes:
    """Return this rank's part of the `payloads` that rank 0 gave, one for each rank."""

    def decide(_: list[bytes]) -> Sequence[bytes]:
        if payloads is None:
            raise UsageError("rank 0 has to give the payloads of a scatter")
        return payloads

    return round(group, name, lambda: b"", decide, timeout_s)


def broadcast(group: Group, name: str, payload: bytes | None, timeout_s: float) -> bytes:
    """Return the payload that rank 0 gave; it is not looked at on other ranks."""

    def decide(requests: list[bytes]) -> list[bytes]:
        if payload is None:
            raise UsageError("rank 0 has to give the payload of a broadcast")
        return [payload] * len(requests)

    return round(group, name, lambda: b"", decide, timeout_s)


def barrier(group: Group, name: str, timeout_s: float) -> None:
    """Return when every rank has come here."""
    broadcast(group, name, b"", timeout_s)


def agree(group: Group, name: str, error: ReknitError | None, timeout_s: float) -> None:
    """Return on every rank when no rank brought an error; otherwise raise the same one on all."""

    def produce() -> bytes:
        if error is not None:
            raise error
        return b""

    round(group, name, produce, lambda requests: [b""] * len(requests), timeout_s)
