"""What travels between the ranks of a tree: a report up, an outcome down, as bounded msgpack."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from reknit.errors import CommError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable

COMPRESS_NBYTES = 1 << 20
"""Messages above this size are compressed."""

OVERHEAD_NBYTES = 1 << 10
"""What a message may need beyond the payloads and the numbers in it."""

_PLAIN, _ZLIB = b"\0", b"\1"


class Parcel(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Payloads of several ranks; equal ones (a broadcast, a barrier) are carried once."""

    parts: list[bytes] = []
    which: list[int] = []

    @classmethod
    def of(cls, payloads: Iterable[bytes]) -> Parcel:
        """Return the parcel of `payloads`."""
        places: dict[bytes, int] = {}
        which = [places.setdefault(payload, len(places)) for payload in payloads]
        return cls(list(places), which)

    def payloads(self, count: int) -> list[bytes]:
        """Return the payloads; raises `ProtocolError` unless there are `count`."""
        if len(self.which) != count or any(not 0 <= place < len(self.parts) for place in self.which):
            raise ProtocolError(f"a message carries payloads for {len(self.which)} ranks instead of {count}")
        return [self.parts[place] for place in self.which]

    @property
    def nbytes(self) -> int:
        """An upper bound of the size of this parcel in a message."""
        return sum(len(part) + 5 for part in self.parts) + 5 * len(self.which)


class Hello(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a rank says once to the rank above it, before all else."""

    job: str
    rank: int
    size: int
    fan_out: int


class Report(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a rank sends up in a round, for itself and all ranks below it.

    Either everyone is there, under `name`, and `requests` holds a payload of each in ascending order of
    ranks; or the round has failed already: `places` says who is there by which name, `missing` who did not
    come, and `error` is set when something else went wrong.
    """

    job: str
    sender: int
    number: int
    name: str
    requests: Parcel = Parcel()
    places: dict[str, list[int]] = {}
    missing: list[int] = []
    error: dict[str, Any] | None = None

    @property
    def whole(self) -> bool:
        """Whether every rank of the sender's subtree is there, under one name."""
        return not (self.places or self.missing or self.error)


class Outcome(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What comes down: the answers for a rank and all ranks below it, or the error that everyone raises."""

    answers: Parcel = Parcel()
    error: dict[str, Any] | None = None


_Message = TypeVar("_Message", Hello, Report, Outcome)


def encode(message: Hello | Report | Outcome) -> bytes:
    """Return the bytes of a message, compressed when it is large and that helps."""
    plain = msgspec.msgpack.encode(message)
    if len(plain) > COMPRESS_NBYTES:
        # The lowest level: what is large here are tables, which shrink well at once or not at all.
        packed = zlib.compress(plain, 1)
        if len(packed) < len(plain):
            return _ZLIB + packed
    return _PLAIN + plain


def decode(data: bytes, kind: type[_Message], max_nbytes: int) -> _Message:
    """Return the message in `data`; raises `ProtocolError` when there is none, or one above `max_nbytes`."""
    marker, body = data[:1], memoryview(data)[1:]
    try:
        if marker == _ZLIB:
            body = memoryview(_inflated(body, max_nbytes + OVERHEAD_NBYTES))
        elif marker != _PLAIN:
            raise ProtocolError("a message begins with an unknown marker: the ranks run different versions")
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, zlib.error) as error:
        raise ProtocolError(f"a message cannot be read as {kind.__name__}: {error}") from error


def _inflated(body: memoryview, max_nbytes: int) -> bytes:
    inflater = zlib.decompressobj()
    plain = inflater.decompress(body, max_nbytes)
    if inflater.unconsumed_tail or not inflater.eof:
        raise ProtocolError(f"a message is cut off, or larger than {max_nbytes} bytes when decompressed")
    return plain


def too_large(what: str, nbytes: int, max_nbytes: int) -> CommError | None:
    """Return the error of a message above the limit, None for one within it."""
    if nbytes <= max_nbytes:
        return None
    return CommError(
        f"{what}: {nbytes} bytes, more than max_message_nbytes ({max_nbytes})",
        remedy="raise CommOptions.max_message_nbytes, or lower CommOptions.fan_out",
    )


def wire_limit(max_nbytes: int) -> int:
    """Return the largest encoded message in bytes, for a limit on its payloads (gRPC counts in 32 bits)."""
    return min(max_nbytes + OVERHEAD_NBYTES, (1 << 31) - 1)
