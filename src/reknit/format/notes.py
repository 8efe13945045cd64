"""Small files about a committed checkpoint: that it is pinned, is being read, has metrics.

They are not a part of the checkpoint: a process that may write to its folder adds one, and it goes with the
checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from reknit.errors import FormatError
from reknit.format.strict_json import decode_strict

if TYPE_CHECKING:
    from typing import TypeVar

    Note = TypeVar("Note", bound=msgspec.Struct)

MAX_NOTE_NBYTES = 1 << 20
MAX_FOLLOWER_NBYTES = 16 << 20
MAX_TEXT = 4096
"""Characters of a reason."""

_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_WriteId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class Pin(msgspec.Struct, frozen=True):
    """The checkpoint stays until the pin is taken away."""

    reason: _Text


class HolderLease(msgspec.Struct, frozen=True):
    """`holder` reads the checkpoint, or is about to remove it.

    That holds for `seconds` from the date of the note, by the clock of the store.  Without `seconds`, or in a
    store without dates, it holds until `until`, in seconds since the epoch by the clock of the holder.
    """

    holder: _Text
    until: float
    seconds: float | None = None


class Metrics(msgspec.Struct, frozen=True):
    """Numbers by name that were measured after the save; one that was not finite is None."""

    values: dict[str, float | None]


class ColdCopy(msgspec.Struct, frozen=True):
    """A copy of the checkpoint of a save is at `place`, or is being made there.

    `write_id` is that of its manifest.  It goes with the checkpoint, if it has a pin with this `reason`.
    """

    place: _Text
    save_id: _WriteId
    write_id: _WriteId
    reason: _Text


class Follower(msgspec.Struct, frozen=True):
    """The steps of a run that a follower has met: write ids by the names of their folders."""

    met: dict[str, str]


def encode_note(note: Pin | HolderLease | Metrics | ColdCopy | Follower) -> bytes:
    """Return a note as bytes.  Raises `FormatError` for a note that no reader would take."""
    try:
        data = msgspec.json.encode(note)
    except UnicodeEncodeError as error:
        raise FormatError(f"a text is not valid Unicode: {error}") from error
    most = MAX_FOLLOWER_NBYTES if isinstance(note, Follower) else MAX_NOTE_NBYTES
    if len(data) > most:
        raise FormatError(f"the note ({type(note).__name__}) has {len(data)} bytes; {most} is the limit")
    return data


def decode_note(data: bytes, kind: type[Note]) -> Note:
    """Return the note.  Raises `CorruptError`, `FormatError`."""
    what = f"the note ({kind.__name__})"
    return decode_strict(
        data, kind, what=what, max_nbytes=MAX_FOLLOWER_NBYTES, max_depth=4, max_values=1 << 18
    )
