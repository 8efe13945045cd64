"""``manifest.json``: makes a checkpoint exist, lists its content; beside it tombstones and notes.

A tombstone in the place of a manifest, and a manifest with another byte: a late commit loses against both.

An object store may carry out a commit after its process has given up.  The commit has a condition: there is
no manifest, or the manifest is unchanged.  So a tombstone, or a change of the manifest, refuses it for good
(docs/decisions/0029).

Small files about a committed checkpoint: that it is pinned, is being read, has metrics.

They are not a part of the checkpoint: a process that may write to its folder adds one, and it goes with the
checkpoint.
"""

from __future__ import annotations

import base64
import math
import re
import uuid
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import msgspec
import numpy as np

from reknit.errors import CorruptError, FormatError, ReknitError
from reknit.format.checksum import (
    FILE_TABLE,
    FORMAT_VERSION,
    MAX_BLOBS_NBYTES,
    MAX_INDEX_NBYTES,
    MOVED,
    TOMBSTONE,
    check_version,
    digest,
    num_blocks,
)
from reknit.format.paths import MANIFEST_PATH, checked_relative, read_name, wrong_place
from reknit.format.strict_json import (
    check_object,
    count_values,
    decode_member,
    decode_strict,
    refuse_duplicates,
)
from reknit.types.manifest import BlobFile, FileEntry, Manifest, TablePlace
from reknit.types.small import decoder

if TYPE_CHECKING:
    Note = TypeVar("Note", bound=msgspec.Struct)


MAX_MANIFEST_NBYTES = 256 << 20
MAX_DEPTH = 32
MAX_SPARE_VALUES = 1 << 18
"""Values that a manifest holds beside the values of each of its files: `items`, `metadata`, and so on."""
MAX_COORDINATE_NBYTES = 1 << 10
MAX_TIME_S = 1e11
"""A time, in seconds since the epoch, that calendars still have."""
MIN_BLOCK_NBYTES = 4 << 10
MAX_BLOCK_NBYTES = 1 << 30

_NAME = "reknit"
_DIGEST_KEY = b',"digest":"'
_VALUES_OF_A_FILE = 4
_LEAST_VALUE_NBYTES = 8
"""Bytes of a file's entry for each value in it, at least: the names of its members alone are longer."""
_TAIL_NBYTES = len(_DIGEST_KEY) + 16 + len(b'"}')

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Member = TypeVar("_Member")
_WriteId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]


class _File(msgspec.Struct):
    path: str
    nbytes: _Count
    digests: str


class _Blobs(msgspec.Struct):
    item: str
    path: str
    coordinate: msgspec.Raw


class _Head(msgspec.Struct):
    """The members that every version of the format keeps, so that a reader finds the version."""

    format: str
    format_version: _Count
    requires: list[str]
    generation: _Count | msgspec.UnsetType = msgspec.UNSET


class _Document(msgspec.Struct, kw_only=True):
    """The document but its last member, in the order in which the members are written.

    Members that may hold any number of values are left raw until the values are counted.
    """

    format: str
    format_version: _Count
    requires: list[str]
    write_id: _WriteId
    generation: _Count | msgspec.UnsetType = msgspec.UNSET
    step: _Count | None
    created: float
    items: msgspec.Raw
    block_nbytes: _Count
    index: str
    files: list[_File]
    blobs: list[_Blobs]
    table: TablePlace | msgspec.UnsetType = msgspec.UNSET
    saved_as: _WriteId | msgspec.UnsetType = msgspec.UNSET
    dropped: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    moved_to: str | msgspec.UnsetType = msgspec.UNSET
    uses_pickle: bool
    origin: msgspec.Raw
    metadata: msgspec.Raw


_CONVERTED = {"step", "created", "items", "files", "blobs", "dropped", "origin", "metadata"}
_PLAIN = sorted({*Manifest.__struct_fields__} & {*_Document.__struct_fields__} - _CONVERTED)
"""The members with the name and the value of a field of `Manifest`; they are left out if that is None."""

_DECODE_HEAD = decoder(_Head, json=True)
_DECODE_DOCUMENT = decoder(_Document, json=True)
_DECODE_DROPPED = decoder(dict[str, float], json=True)
_DECODE_ITEMS = decoder(tuple[str, ...], json=True)
_DECODE_OBJECT = decoder(dict[str, Any], json=True)
_DECODE_COORDINATE = decoder(dict[str, _Int64] | None, json=True)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``.

    Raises `StateError` when `metadata` or `origin` is not plain JSON, and `FormatError` when the manifest
    breaks a rule that a reader checks.
    """
    for name in ("metadata", "origin"):
        check_object(getattr(manifest, name), name, depth=2, max_depth=MAX_DEPTH)
    _check_manifest(manifest)
    try:
        body = msgspec.json.encode(_document(manifest))[:-1]
    except (TypeError, UnicodeEncodeError) as error:
        raise FormatError(f"the manifest has a value that JSON cannot hold: {error}") from error
    data = body + _DIGEST_KEY + f'{digest(body):016x}"}}'.encode()
    if decode_record(data) != manifest:
        raise FormatError("the manifest has a value that its file cannot hold", path=MANIFEST_PATH)
    return data


def _document(manifest: Manifest) -> _Document:
    return _Document(
        format=_NAME,
        requires=[
            *([] if manifest.table is None else [FILE_TABLE]),
            *([] if manifest.moved_to is None else [MOVED]),
        ],
        step=manifest.step,
        created=float(manifest.created),
        items=_raw(list(manifest.items)),
        index=manifest.index_path,
        files=[_File(f.path, f.nbytes, _encode_digests(f.digests)) for f in manifest.files],
        blobs=[
            _Blobs(b.item, b.path, _raw(None if b.coordinate is None else dict(b.coordinate)))
            for b in manifest.blobs
        ],
        dropped=_raw(dict(manifest.dropped)) if manifest.dropped else msgspec.UNSET,
        origin=_raw(dict(manifest.origin)),
        metadata=_raw(dict(manifest.metadata)),
        **{name: value for name in _PLAIN if (value := getattr(manifest, name)) is not None},
    )


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def decode_manifest(data: bytes) -> Manifest:
    """Return a manifest that lists all files of its checkpoint; raises as `decode_record` does."""
    manifest = decode_record(data)
    if manifest.table is not None:
        raise FormatError("the files are listed in the index, not in the manifest", path=MANIFEST_PATH)
    return manifest


def decode_record(data: bytes) -> Manifest:
    """Return the content of ``manifest.json``; if it has a `table`, most files are not in it.

    Raises `VersionError` for a newer format, `CorruptError` for damage, `FormatError` for content that no
    writer writes.
    """
    try:
        return _decode(data)
    except ReknitError as error:
        error.sign(path=MANIFEST_PATH)
        raise


def decode_generation(data: bytes) -> int | None:
    """Return the generation of the run that wrote a manifest of any version; None if it has none.

    Raises as `decode_manifest` does, but never `VersionError`.
    """
    try:
        return _known(_decode_head(data)[0].generation)
    except ReknitError as error:
        error.sign(path=MANIFEST_PATH)
        raise


def _known(member: _Member | msgspec.UnsetType) -> _Member | None:
    return None if isinstance(member, msgspec.UnsetType) else member


def _decode_head(data: bytes) -> tuple[_Head, int]:
    """Return the members that every version has, and how many values there are in all."""
    if len(data) > MAX_MANIFEST_NBYTES:
        raise FormatError(f"the manifest has {len(data)} bytes; {MAX_MANIFEST_NBYTES} is the limit")
    _check_own_digest(data)
    most = MAX_SPARE_VALUES + len(data) // _LEAST_VALUE_NBYTES
    num_values = count_values(
        data, "the manifest", max_nbytes=MAX_MANIFEST_NBYTES, max_depth=MAX_DEPTH, max_values=most
    )
    head = decode_member(_DECODE_HEAD, data, "the manifest")
    if head.format != _NAME:
        raise FormatError(f"this is a manifest of {head.format[:40]!r}, not of reknit")
    return head, num_values


def _decode(data: bytes) -> Manifest:
    what = "the manifest"
    head, num_values = _decode_head(data)
    check_version(head.format_version, head.requires)
    document = decode_member(_DECODE_DOCUMENT, data, what)
    table = _known(document.table)
    if (FILE_TABLE in document.requires) != (table is not None):
        _refuse(f"it has a table of files without saying {FILE_TABLE!r}, or says so without one")
    moved_to = _known(document.moved_to)
    if (MOVED in document.requires) != (moved_to is not None):
        _refuse(f"it names another place without saying {MOVED!r}, or says so without one")
    _check_spare(document, num_values)
    refuse_duplicates(data, what)
    plain: dict[str, Any] = {name: _known(getattr(document, name)) for name in _PLAIN}
    manifest = Manifest(
        step=document.step,
        created=document.created,
        items=decode_member(_DECODE_ITEMS, document.items, what),
        index_path=document.index,
        files=tuple(FileEntry(f.path, f.nbytes, _decode_digests(f)) for f in document.files),
        blobs=tuple(
            BlobFile(b.item, b.path, decode_member(_DECODE_COORDINATE, b.coordinate, what))
            for b in document.blobs
        ),
        origin=decode_member(_DECODE_OBJECT, document.origin, what),
        metadata=decode_member(_DECODE_OBJECT, document.metadata, what),
        dropped=decode_member(_DECODE_DROPPED, _known(document.dropped) or b"{}", what),
        **plain,
    )
    _check_manifest(manifest)
    return manifest


def _check_spare(document: _Document, num_values: int) -> None:
    """Raise before values are built that no manifest of so many files has."""
    spare = num_values - _VALUES_OF_A_FILE * (len(document.files) + len(document.blobs))
    for blob in document.blobs:
        coordinate = bytes(blob.coordinate)
        if len(coordinate) > MAX_COORDINATE_NBYTES:
            _refuse(f"the coordinate of {blob.path[:200]!r} has more than {MAX_COORDINATE_NBYTES} bytes")
        spare -= coordinate.count(b",") + 1
    if spare > MAX_SPARE_VALUES:
        raise FormatError(
            f"the manifest holds {spare} values beside those of its files; {MAX_SPARE_VALUES} is the limit",
            remedy="save long lists and large tables as entries of the state, not as `metadata`",
        )


def _check_own_digest(data: bytes) -> None:
    """Check the last member: the xxh3-64 of every byte before it."""
    tail = data[-_TAIL_NBYTES:]
    if tail[: len(_DIGEST_KEY)] != _DIGEST_KEY:
        raise CorruptError("the manifest does not end with its digest: it is truncated, or was edited")
    expected = _DIGEST_KEY + f'{digest(memoryview(data)[:-_TAIL_NBYTES]):016x}"}}'.encode()
    if tail != expected:
        raise CorruptError(
            "the manifest is damaged: its digest does not match its bytes",
            remedy="load another checkpoint; do not edit a manifest by hand",
        )


def _check_manifest(manifest: Manifest) -> None:
    check_version(manifest.format_version)
    block = manifest.block_nbytes
    if not MIN_BLOCK_NBYTES <= block <= MAX_BLOCK_NBYTES or block & (block - 1):
        _refuse(f"block_nbytes is {block}, not a power of two from {MIN_BLOCK_NBYTES} to {MAX_BLOCK_NBYTES}")
    if not math.isfinite(manifest.created):
        _refuse(f"created is {manifest.created}")
    sizes = _check_files(manifest)
    if sizes.get(manifest.index_path, MAX_INDEX_NBYTES + 1) > MAX_INDEX_NBYTES:
        _refuse(f"its index {manifest.index_path!r} is not among the files, or too large")
    if manifest.table is not None:
        _check_table(manifest, manifest.table)
    items = set(manifest.items)
    if len(items) != len(manifest.items):
        _refuse("an item is listed twice")
    for item in manifest.items:
        read_name(item, "item name", "manifest")
    if bool(manifest.dropped) != (manifest.saved_as is not None) or not items.isdisjoint(manifest.dropped):
        _refuse("it names dropped items that it has, or does not say of which save they were")
    for item, time in manifest.dropped.items():
        read_name(item, "item name", "manifest")
        if not 0 <= time <= MAX_TIME_S:
            _refuse(f"{item[:200]!r} was dropped at {time}")
    if manifest.moved_to is not None and (why := wrong_place(manifest.moved_to)) is not None:
        _refuse(f"it has moved to {manifest.moved_to[:200]!r}, which {why}")
    used = {manifest.index_path}
    for blob in manifest.blobs:
        if blob.item not in items:
            _refuse(f"the blob file {blob.path!r} belongs to {blob.item[:200]!r}, which is not an item")
        if sizes.get(blob.path, MAX_BLOBS_NBYTES + 1) > MAX_BLOBS_NBYTES:
            _refuse(f"the blob file {blob.path!r} is not among the files, or too large")
        if blob.path in used:
            _refuse(f"{blob.path!r} is listed for two purposes")
        used.add(blob.path)


def _check_table(manifest: Manifest, table: TablePlace) -> None:
    if len(manifest.files) > 1 or manifest.blobs:
        _refuse("it lists files beside the index, though this has a table of them")
    if min(table.start, table.files_nbytes) < 0 or min(table.nbytes, table.num_files) < 1:
        _refuse("its table of files is empty, or before the index")
    if table.start + table.nbytes > manifest.index.nbytes:
        _refuse("its table of files is not inside the index")


def _check_files(manifest: Manifest) -> dict[str, int]:
    """Return the sizes of all files by path."""
    sizes: dict[str, int] = {}
    for file in manifest.files:
        checked_relative(file.path)
        if file.path in sizes:
            _refuse(f"the file {file.path!r} is listed twice")
        if file.path == MANIFEST_PATH:
            _refuse("the manifest lists itself")
        if len(file.digests) != num_blocks(file.nbytes, manifest.block_nbytes):
            _refuse(f"{file.path!r} has {file.nbytes} bytes and {len(file.digests)} digests")
        sizes[file.path] = file.nbytes
    return sizes


def _encode_digests(digests: tuple[int, ...]) -> str:
    try:
        return base64.b64encode(np.array(digests, dtype="<u8").tobytes()).decode()
    except OverflowError:
        _refuse("a digest has more than 64 bits")


def _decode_digests(file: _File) -> tuple[int, ...]:
    try:
        raw = base64.b64decode(file.digests, validate=True)
    except ValueError:
        raw = None
    if raw is None or len(raw) % 8 or base64.b64encode(raw).decode() != file.digests:
        raise CorruptError(f"the digests of {file.path[:200]!r} are not base64 of 64-bit numbers")
    return tuple(np.frombuffer(raw, dtype="<u8").tolist())


def _refuse(why: str) -> NoReturn:
    raise FormatError(f"bad manifest: {why}", path=MANIFEST_PATH)


_HEAD_OF_ANY = rb'\{"format":"reknit","format_version":\d+,"requires":\["%s"\]' % TOMBSTONE.encode()
"""The begin of a tombstone of any version: a later one may write its own number."""
_HEAD = f'{{"format":"reknit","format_version":{FORMAT_VERSION},"requires":["{TOMBSTONE}"]'.encode()
_DIGEST_NBYTES = len(',"digest":"0123456789abcdef"}')
_CHANGE = rb',"changed":"[0-9a-f]{32}"'
_CHANGE_NBYTES = len(',"changed":""') + 32


def encode_tombstone() -> bytes:
    """Return the bytes of a new tombstone, which differ from those of all others."""
    return _with_digest(_HEAD + _change())


def is_tombstone(head: bytes) -> bool:
    """Return whether a file with the name of the manifest is a tombstone, by its first bytes."""
    return re.match(_HEAD_OF_ANY, head) is not None


def changed(manifest: bytes) -> bytes:
    """Return a manifest with the same content and other bytes.

    A store may derive the version of an object from its bytes, so these must differ.  Raises as
    `decode_record` does: a manifest that cannot be read stays as it is.
    """
    decode_record(manifest)
    body = manifest[:-_DIGEST_NBYTES]
    if re.fullmatch(_CHANGE, body[-_CHANGE_NBYTES:]):
        body = body[:-_CHANGE_NBYTES]
    return _with_digest(body + _change())


def _change() -> bytes:
    return f',"changed":"{uuid.uuid4().hex}"'.encode()


def _with_digest(body: bytes) -> bytes:
    return body + f',"digest":"{digest(body):016x}"}}'.encode()


MAX_NOTE_NBYTES = 1 << 20
MAX_FOLLOWER_NBYTES = 16 << 20
MAX_TEXT = 4096
"""Characters of a reason."""

_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_notes_WriteId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


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
    save_id: _notes_WriteId
    write_id: _notes_WriteId
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
