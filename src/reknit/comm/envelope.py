"""A rank's contribution to a round: its payload, or the errors that prevented it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from reknit.errors import ProtocolError, from_wire, typed
from reknit.types.decoding import decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.errors import ReknitError

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
