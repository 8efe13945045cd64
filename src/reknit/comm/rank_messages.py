"""The messages of the tree, as bounded msgpack in chunks: reports go up, outcomes go down."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from reknit.errors import CommError, ProtocolError, shortage
from reknit.types.small import decoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reknit.errors import ReknitError


CHUNK_NBYTES = 1 << 20
"""The largest chunk."""

_TOTAL = struct.Struct("<Q")

FIRST_NBYTES = CHUNK_NBYTES - _TOTAL.size
"""The largest message that is a single chunk."""


def divided(message: bytes) -> Iterator[bytes]:
    """Yield the chunks of a message, at least one; the first begins with the size of the message."""
    view, end = memoryview(message), FIRST_NBYTES
    yield _TOTAL.pack(len(view)) + view[:end]
    while end < len(view):
        yield bytes(view[end : end + CHUNK_NBYTES])
        end += CHUNK_NBYTES


def joined(chunks: Iterable[bytes], max_nbytes: int) -> bytes:
    """Return the message that was divided into `chunks`.

    Raises `CommError` for one larger than `max_nbytes`, before any of it is collected, and `ProtocolError`
    for a stream that is cut off or too long.  Errors of the stream itself pass through.
    """
    stream = iter(chunks)
    first = next(stream, b"")
    if len(first) < _TOTAL.size:
        raise ProtocolError("a message is empty")
    (total,) = _TOTAL.unpack_from(first)
    if total > max_nbytes:
        raise beyond_limit(total, max_nbytes)
    found, nbytes = [memoryview(first)[_TOTAL.size :]], len(first) - _TOTAL.size
    for chunk in stream:
        nbytes += len(chunk)
        if nbytes > total or not chunk:
            break
        found.append(memoryview(chunk))
    if nbytes != total:
        raise ProtocolError(
            f"a message of {total} bytes came with {nbytes}: truncated, or mixed up with another"
        )
    return b"".join(found)


def beyond_limit(nbytes: int, max_nbytes: int) -> CommError:
    """Return the refusal of a message that is larger than this rank takes."""
    return CommError(
        f"a message of {nbytes} bytes is larger than this rank's limit of {max_nbytes}",
        remedy="give every rank the same CommOptions.max_message_nbytes",
    )


COMPRESS_NBYTES = 64 << 10
"""Messages above this size are compressed."""

OVERHEAD_NBYTES = 1 << 10
"""The most bytes of a message beyond the payloads and the numbers in it."""

_PLAIN, _ZSTD = b"\0", b"\1"
_SIZE = struct.Struct("<Q")


class Parcel(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Payloads of several ranks; equal payloads (a broadcast, a barrier) are carried once."""

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
    """The first message of a rank to its parent; `topology` is the digest of its tree."""

    job: str
    generation: int
    rank: int
    topology: str


class Heading(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The round that a message belongs to: the job and its generation, the round's number, name and subject.

    Ranks are in the same place when they are in rounds of equal number, name and subject.
    """

    job: str
    generation: int
    number: int
    name: str
    subject: str

    @property
    def place(self) -> str:
        """The name and the subject, as errors spell them."""
        return f"{self.name!r} of {self.subject}" if self.subject else repr(self.name)

    @property
    def label(self) -> str:
        """The round, as errors spell it."""
        return f"round {self.number} ({self.place})"

    def report(
        self,
        sender: int,
        requests: Parcel | None = None,
        *,
        places: dict[str, list[int]] | None = None,
        missing: list[int] | None = None,
        error: ReknitError | None = None,
        opens: bool = False,
    ) -> Report:
        """Return a report of `sender` in this round."""
        wire = None if error is None else error.to_wire()
        return Report(
            **self._itself,
            sender=sender,
            requests=requests or Parcel(),
            places=places or {},
            missing=missing or [],
            error=wire,
            opens=opens,
        )

    def outcome(self, answers: Parcel | None = None, error: ReknitError | None = None) -> Outcome:
        """Return an outcome of this round."""
        wire = None if error is None else error.to_wire()
        return Outcome(**self._itself, answers=answers or Parcel(), error=wire)

    @property
    def _itself(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Heading.__struct_fields__}


class Report(Heading, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The message of a rank to its parent in a round, for itself and all ranks below it.

    If all ranks are there, in one place, `requests` holds a payload of each in ascending order of ranks, or
    one payload that was merged from all of them.  If the round has failed already, `places` has the place of
    each rank, `missing` the ranks that did not come, and `error` is set after any other failure.  `opens` is
    set in the first round of a call that all ranks have to make.
    """

    sender: int
    requests: Parcel = Parcel()
    places: dict[str, list[int]] = {}
    missing: list[int] = []
    error: dict[str, Any] | None = None
    opens: bool = False

    @property
    def whole(self) -> bool:
        """Whether every rank of the sender's subtree is there, in one place."""
        return not (self.places or self.missing or self.error)


class Outcome(Heading, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The message to a child that ends a round: the answers for its subtree, or the error of all ranks."""

    answers: Parcel = Parcel()
    error: dict[str, Any] | None = None


NOWHERE = Heading("", 0, -1, "", "")
"""The round of a report that cannot be read."""


class News(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The message of a rank to its parent when the group is broken."""

    job: str
    generation: int
    sender: int
    error: dict[str, Any]


class Reply(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The answer to any message but a report: an error if it was refused, and a requested value."""

    error: dict[str, Any] | None = None
    value: bytes | None = None


Message = TypeVar("Message", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message, compressed when it is large and that helps."""
    plain = msgspec.msgpack.encode(message)
    if len(plain) > COMPRESS_NBYTES:
        import pyarrow as pa  # it is loaded only where something is large

        # The lowest level: large messages are tables, which shrink well at once or not at all.
        packed = pa.Codec("zstd", compression_level=1).compress(plain, asbytes=True)
        if _SIZE.size + len(packed) < len(plain):
            return _ZSTD + _SIZE.pack(len(plain)) + packed
    return _PLAIN + plain


def decode(data: bytes, kind: type[Message], max_nbytes: int) -> Message:
    """Return the message in `data`.  Raises `ProtocolError` for other data, or more than `max_nbytes`."""
    marker, body = data[:1], memoryview(data)[1:]
    try:
        if marker == _ZSTD:
            body = memoryview(_plain(body, max_nbytes + OVERHEAD_NBYTES))
        elif marker != _PLAIN:
            raise ProtocolError("a message begins with an unknown marker: the ranks run different versions")
        return decoder(kind)(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a message cannot be read as {kind.__name__}: {error}") from error


def _plain(body: memoryview, max_nbytes: int) -> bytes:
    """Return the decompressed bytes.  The declared size is checked before any of them is made."""
    if len(body) < _SIZE.size:
        raise ProtocolError("a message is truncated")
    (nbytes,) = _SIZE.unpack_from(body)
    if nbytes > max_nbytes:
        raise ProtocolError(f"a message is larger than {max_nbytes} bytes when decompressed: {nbytes} bytes")
    import pyarrow as pa

    try:
        return pa.Codec("zstd").decompress(body[_SIZE.size :], decompressed_size=nbytes, asbytes=True)
    except OSError as error:
        failure = ProtocolError(f"a message is truncated, or has another size than it declares: {error}")
        raise shortage(error) or failure from error


def too_large(what: str, nbytes: int, max_nbytes: int) -> CommError | None:
    """Return the error of a message above the limit, None for one within it."""
    if nbytes <= max_nbytes:
        return None
    return CommError(
        f"{what}: {nbytes} bytes, more than max_message_nbytes ({max_nbytes})",
        remedy="raise CommOptions.max_message_nbytes, or lower CommOptions.fan_out",
    )
