"""File names, keys inside data files, and the escapes that keep them apart.

Every name but ``manifest.json`` carries the first eight digits of the write id, so that no two attempts to
write ever meet in one file (docs/decisions/0001).
"""

from __future__ import annotations

import hashlib
import re
import uuid
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from msgspec import Struct

from reknit.errors import CorruptError, FormatError, StateError, UsageError
from reknit.types.box import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.types.shard import TensorSpec

MANIFEST_PATH = "manifest.json"
MAX_PLACE_NBYTES = 4096
NOTES_FOLDER = ".notes"
"""Holds the notes about a checkpoint, which are not a part of it; no item has a folder of this name."""
RUN_FOLDER = ".reknit"
"""Holds the record of a run, and its signs of life, beside the folders of its steps."""
MAX_NAME_NBYTES = 4096
"""Longest item name or FQN, in UTF-8."""
MAX_COMPONENT_NBYTES = 200
"""Longest part of a path between two slashes, in UTF-8."""
MAX_PATH_NBYTES = 1024

_METADATA_KEY = "__metadata__"
_WRITE_ID = r"[0-9a-f]{32}"
_PLAIN_BYTES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.")
_EMPTY_ITEM = "%"
_ROOT_NAME = r"(?isa)manifest\.json|index\.(?:.*\.)?parquet|pending\.[0-9a-f]{16}\.[0-9a-f]{8}"
_UNSAFE_IN_FQN = r"[\[\]%\x00-\x1f\x7f-\x9f]"
_UNSAFE_IN_PATH = r"[\x00-\x1f\x7f\\:]"
_NEWLINE, _DOT = b"\n."
_IS_END = np.isin(np.arange(256), list(b"\n/"))
_IS_ODD = ~np.isin(np.arange(256), list(b"\n" + bytes(range(0x20, 0x7F)).translate(None, b"\\:")))
_ESCAPED_BYTES = r"(?:%[0-9A-F]{2})+"
_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
_KEY = rf"([^\[\]]*)(?:\[({_NUMBER}:{_NUMBER}(?:,{_NUMBER}:{_NUMBER})*)\])?"
_RANK = r"([0-9]{5}|[1-9][0-9]{5,9})"
_MARKER_PATH = r"pending\.([0-9a-f]{16})\.([0-9a-f]{8})"
_RUN_PATH = r"\.reknit/run\.([0-9a-f]{16})\.[0-9a-f]{8}"
RUN_SIGN = r"\.reknit/(?:beat|end)\.[0-9a-f]{16}\.[0-9a-f]{8}"
_NOTE_PATH = r"\.notes/(pin|lease|removal|metrics|copy)\.([0-9a-f]{8})\.([0-9a-f]{24})\.json"
_INDEX_PATH = r"index\.([0-9a-f]{8})\.parquet"
_DATA_NAME = rf"{_RANK}(?:\.([1-9][0-9]{{0,8}}))?\.([0-9a-f]{{8}})\.safetensors"
_BLOB_NAME = rf"{_RANK}(?:(\.own)(?:\.([1-9][0-9]{{0,8}}))?)?\.([0-9a-f]{{8}})\.msgpack"


NoteKind = Literal["pin", "lease", "removal", "metrics", "copy"]
NOTE_KINDS: tuple[NoteKind, ...] = ("pin", "lease", "removal", "metrics", "copy")


class FileName(Struct, frozen=True):
    """The facts in the path of a file; `write_id8` is None for the manifest, `item` for a root file."""

    kind: Literal["manifest", "marker", "index", "data", "blobs", "own"] | NoteKind
    write_id8: str | None
    item: str | None = None
    rank: int | None = None
    part: int = 0
    """Number of the data file, or of the coordinate, among those of its rank."""
    generation: int | None = None
    """That of the run whose save a marker stands for."""


def new_write_id() -> str:
    """Return a write id that no other write has: 32 lower-case hex digits of a random UUID."""
    return uuid.uuid4().hex


def numbered_write_id(seed: str, number: int) -> str:
    """Return the write id of the `number`-th save of a series; it follows from the `seed` alone."""
    return hashlib.sha256(f"{seed}:{number}".encode()).hexdigest()[:32]


def short_id(write_id: str) -> str:
    """Return the part of a write id that stands in file names."""
    if not re.fullmatch(_WRITE_ID, write_id):
        raise UsageError(f"a write id is 32 lower-case hex digits, not {write_id!r}")
    return write_id[:8]


def data_path(item: str, rank: int, write_id: str, part: int = 0) -> str:
    """Return the path of a data file; `part` counts the files of one rank and item that rolled over."""
    return f"{escape_item(item)}/{rank:05d}{data_tail(write_id, part)}"


def blob_path(item: str, rank: int, write_id: str, *, own: int | None = None) -> str:
    """Return the path of a rank's file of shared blobs, or of the values of its `own`-th coordinate."""
    return f"{escape_item(item)}/{rank:05d}{blob_tail(write_id, own)}"


def rank_paths(
    items: Sequence[str], item: NDArray[np.int64], ranks: NDArray[np.int64], tails: Sequence[str]
) -> list[str]:
    """Return the paths of many files, each of one of these items, with the tail that follows its rank."""
    folders = [f"{escape_item(name)}/" for name in items]
    texts = {rank: f"{rank:05d}" for rank in set(ranks.tolist())}
    return [
        f"{folders[number]}{texts[rank]}{tail}"
        for number, rank, tail in zip(item.tolist(), ranks.tolist(), tails, strict=True)
    ]


def data_tail(write_id: str, part: int = 0) -> str:
    """Return the end of the path of a data file, after the rank."""
    return f"{f'.{part}' if part else ''}.{short_id(write_id)}.safetensors"


def blob_tail(write_id: str, own: int | None = None) -> str:
    """Return the end of the path of a file of blobs, after the rank."""
    kind = "" if own is None else f".own.{own}" if own else ".own"
    return f"{kind}.{short_id(write_id)}.msgpack"


def index_path(write_id: str) -> str:
    """Return the path of the index."""
    return f"index.{short_id(write_id)}.parquet"


def marker_path(generation: int, write_id: str) -> str:
    """Return the path of the marker that stands there while a save is under way."""
    if not 0 <= generation < 1 << 63:
        raise UsageError(f"a generation is a whole number from 0 on, of 63 bits, not {generation}")
    return f"pending.{generation:016x}.{short_id(write_id)}"


def run_path(generation: int, identity: str) -> str:
    """Return the path, below a folder of steps, of the record that a run has opened it.

    `identity` is 8 hex digits: two runs may take one generation if a store cannot prevent it.
    """
    return f"{RUN_FOLDER}/run.{generation:016x}.{identity}"


def run_generation(path: str) -> int | None:
    """Return the generation of the run that `run_path` names, None for another path."""
    match = re.fullmatch(_RUN_PATH, path)
    return int(match[1], 16) if match else None


def sign_path(record: str, sign: Literal["beat", "end"]) -> str:
    """Return the path of a sign of the run with a record: its last beat, or the mark of its end."""
    return record.replace("/run.", f"/{sign}.")


def note_path(kind: NoteKind, write_id: str, identity: str) -> str:
    """Return the path of a note about the checkpoint of a write; `identity` is 24 hex digits."""
    return f"{NOTES_FOLDER}/{kind}.{short_id(write_id)}.{identity}.json"


def parse_path(path: str) -> FileName | None:
    """Return the facts in the path of a file, or None when no reknit gave it that name."""
    if path == MANIFEST_PATH:
        return FileName("manifest", None)
    if path.startswith("index.") and (match := re.fullmatch(_INDEX_PATH, path)):
        return FileName("index", match[1])
    if path.startswith("pending.") and (match := re.fullmatch(_MARKER_PATH, path)):
        return FileName("marker", match[2], generation=int(match[1], 16))
    if path.startswith(NOTES_FOLDER) and (match := re.fullmatch(_NOTE_PATH, path)):
        return FileName(cast("NoteKind", match[1]), match[2])
    folder, slash, name = path.partition("/")
    if not slash:
        return None
    try:
        item = unescape_item(folder)
    except FormatError:
        return None
    if match := re.fullmatch(_DATA_NAME, name):
        return FileName("data", match[3], item, int(match[1]), int(match[2] or 0))
    if match := re.fullmatch(_BLOB_NAME, name):
        return FileName("own" if match[2] else "blobs", match[4], item, int(match[1]), int(match[3] or 0))
    return None


def checked_relative(path: str) -> str:
    """Return `path` if it names a file below the checkpoint on every system, else raise `FormatError`."""
    parts = path.split("/")
    why = None
    if re.search(_UNSAFE_IN_PATH, path):
        why = "it has a control character, a backslash or a colon"
    elif not {"", ".", ".."}.isdisjoint(parts):
        why = "it is absolute, or has a part that is empty, '.' or '..'"
    elif not encodable(path):
        why = "it is not valid Unicode"
    elif len(path.encode()) > MAX_PATH_NBYTES or max(map(len, map(str.encode, parts))) > MAX_COMPONENT_NBYTES:
        why = "it is too long"
    if why is not None:
        raise FormatError(f"unsafe path {path[:200]!r}: {why}")
    return path


def check_all_relative(paths: Sequence[str]) -> None:
    """Raise `FormatError` for the first path that `checked_relative` refuses; quick where it refuses none."""
    if not _all_plain(paths):
        for path in paths:
            checked_relative(path)


def _all_plain(paths: Sequence[str]) -> bool:
    """Return True if all paths are safe, but False for some safe paths that are not ASCII."""
    joined = "\n".join(["", *paths, ""])
    if not joined.isascii() or not paths:
        return not paths
    text = np.frombuffer(joined.encode(), np.uint8)
    ends = np.flatnonzero(_IS_END[text])
    lines = np.diff(np.flatnonzero(text == _NEWLINE)) - 1
    parts = np.diff(ends) - 1
    dots = (text[ends[:-1] + 1] == _DOT) & (parts <= 2)
    wrong = dots | (parts == 0) | (parts > MAX_COMPONENT_NBYTES)
    # a newline inside a path makes one line more
    too_long = len(lines) != len(paths) or bool((lines > MAX_PATH_NBYTES).any())
    return not (too_long or wrong.any() or _IS_ODD[text].any())


@lru_cache(maxsize=1024)  # tens of thousands of ranks have files of the same few items
def escape_item(name: str) -> str:
    """Return the folder name of an item: ``[A-Za-z0-9_.-]``, with everything else as ``%XX`` of its UTF-8.

    A dot that begins or ends the name is escaped too, and so is the first character of a name that a file
    at the root has.  The empty name is ``%``.  Raises `StateError` for a name that no folder can have.
    """
    raw = checked_name(name, "item name").encode()
    if not raw:
        return _EMPTY_ITEM
    last = len(raw) - 1
    reserved = "." in name and re.fullmatch(_ROOT_NAME, name) is not None
    parts = []
    for at, byte in enumerate(raw):
        edge_dot = byte == 0x2E and at in (0, last)
        plain = byte in _PLAIN_BYTES and not edge_dot and not (reserved and at == 0)
        parts.append(chr(byte) if plain else f"%{byte:02X}")
    escaped = "".join(parts)
    if len(escaped) > MAX_COMPONENT_NBYTES:
        raise StateError(
            f"the item name {name[:40]!r}... makes a folder name of {len(escaped)} bytes; "
            f"{MAX_COMPONENT_NBYTES} is the limit",
            remedy="give the top-level entry of the state a shorter name",
        )
    return escaped


def unescape_item(folder: str) -> str:
    """Return the item name of a folder.  Raises `FormatError` for a name that `escape_item` never returns."""
    name = "" if folder == _EMPTY_ITEM else _unescaped(folder)
    with suppress(StateError):
        if name is not None and escape_item(name) == folder:
            return name
    raise FormatError(f"{folder[:200]!r} is not the folder of an item")


def entry_key(fqn: str, spec: TensorSpec, box: Box) -> str:
    """Return the key of a box of a tensor inside a data file.

    The whole tensor has the escaped FQN as its key, a part ``fqn[0:128,256:512]``: from and to, by dimension.
    In the FQN ``[``, ``]``, ``%`` and control characters become ``%XX`` of their UTF-8, and the name
    ``__metadata__`` becomes ``%5F_metadata__``.  Raises `StateError` for a name that cannot be written.
    """
    checked_name(fqn, "name")
    escaped = _escape_fqn(fqn)
    return escaped if box == Box.whole(spec.shape) else f"{escaped}{box}"


def parse_entry_key(key: str) -> tuple[str, Box | None]:
    """Return FQN and box of a key, the box None for a whole tensor.  Raises `CorruptError`."""
    match = re.fullmatch(_KEY, key)
    fqn = _unescaped(match[1]) if match else None
    if match is None or fqn is None or _escape_fqn(fqn) != match[1]:
        raise CorruptError(f"{key[:200]!r} is not the key of a tensor")
    if match[2] is None:
        return fqn, None
    ranges = [tuple(map(int, pair.split(":"))) for pair in match[2].split(",")]
    if any(end < begin or end >= 1 << 63 for begin, end in ranges):
        raise CorruptError(f"the key {key[:200]!r} has a range that ends before it begins")
    return fqn, Box(tuple(begin for begin, _ in ranges), tuple(end - begin for begin, end in ranges))


def checked_name(name: str, what: str) -> str:
    """Return an item name or FQN that every file can hold, else raise `StateError`."""
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        raise StateError(
            f"the {what} {name[:200]!r} is not valid Unicode", remedy="rename the entry"
        ) from None
    if nbytes > MAX_NAME_NBYTES:
        raise StateError(
            f"the {what} {name[:40]!r}... is longer than {MAX_NAME_NBYTES} bytes", remedy="rename the entry"
        )
    return name


def read_name(name: str, what: str, document: str) -> None:
    """Raise `FormatError` for an item name or FQN in a document that `checked_name` would not let through."""
    try:
        checked_name(name, what)
    except StateError as error:
        raise FormatError(f"bad {document}: {error.message}") from error


def _escape_fqn(fqn: str) -> str:
    if fqn == _METADATA_KEY:
        return "%5F" + fqn[1:]
    return re.sub(_UNSAFE_IN_FQN, lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), fqn)


def _unescaped(text: str) -> str | None:
    """Return the text with every ``%XX`` decoded, or None when that gives no valid UTF-8."""
    if "%" not in text:
        return text
    try:
        return re.sub(_ESCAPED_BYTES, lambda match: bytes.fromhex(match[0].replace("%", "")).decode(), text)
    except UnicodeDecodeError:
        return None


def encodable(text: str) -> bool:
    """Return whether a text is valid Unicode: UTF-8 has no bytes for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def wrong_place(place: str) -> str | None:
    """Return the fault of a place for moved files, None for an absolute path or a URL without options."""
    if not 0 < len(place.encode(errors="surrogatepass")) <= MAX_PLACE_NBYTES:
        return f"is empty, or longer than {MAX_PLACE_NBYTES} bytes"
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in place):
        return "has a control character"
    if not place.startswith("/") and "://" not in place:
        return "is neither an absolute path nor a URL"
    return "has options" if "?" in place and "://" in place else None
