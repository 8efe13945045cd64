"""What small files say of a committed checkpoint: that it is pinned, is being read, has metrics.

They are no part of the checkpoint: whoever may write to its folder adds one, and it goes with the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from reknit.format.strict_json import decode_strict

if TYPE_CHECKING:
    from typing import TypeVar

    Note = TypeVar("Note", bound=msgspec.Struct)

MAX_NOTE_NBYTES = 1 << 20
MAX_FOLLOWER_NBYTES = 16 << 20

_Text = Annotated[str, msgspec.Meta(max_length=4096)]


class Pin(msgspec.Struct, frozen=True):
    """The checkpoint stays until the pin is taken away."""

    reason: _Text


class ReadLease(msgspec.Struct, frozen=True):
    """`holder` reads the checkpoint, which stays until `until`, in seconds since the epoch."""

    holder: _Text
    until: float


class Metrics(msgspec.Struct, frozen=True):
    """Numbers by name that were measured after the save; one that was not finite is None."""

    values: dict[str, float | None]


class Follower(msgspec.Struct, frozen=True):
    """The steps of a run that a follower has met: write ids by the names of their folders."""

    met: dict[str, str]


def encode_note(note: Pin | ReadLease | Metrics | Follower) -> bytes:
    """Return a note as bytes."""
    return msgspec.json.encode(note)


def decode_note(data: bytes, kind: type[Note]) -> Note:
    """Return the note.  Raises `CorruptError`, `FormatError`."""
    what = f"the note ({kind.__name__})"
    return decode_strict(
        data, kind, what=what, max_nbytes=MAX_FOLLOWER_NBYTES, max_depth=4, max_values=1 << 18
    )
