"""A msgpack reader for untrusted bytes, which builds large values piece by piece.

It exists because a general decoder follows nesting as deep as the recursion limit of the interpreter lets it.
It also takes the last of two equal keys, and copies every extension before a check.
"""

from __future__ import annotations

import codecs
import io
import mmap
import re
import struct
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from reknit.errors import CorruptError, FormatError
from reknit.system import without_collections
from reknit.types.shard import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from mmap import mmap as MappedFile

    Unpack = Callable[[int, Any], Any]


LARGE_NBYTES = 1 << 20
_PIECE_NBYTES = 4 << 20
ARRAY, BYTEARRAY, TAGGED = 7, 24, 25
"""Extensions whose bytes are built as an array of bytes, and as a `bytearray`; the last one on request."""


def file_memory(nbytes: int) -> bytearray | mmap.mmap:
    """Return new memory for a file that is decoded once.

    On Linux, `decode_blobs` gives the pages of a large file back to the system while it reads them.
    """
    if nbytes < LARGE_NBYTES or not sys.platform.startswith("linux"):
        return bytearray(nbytes)
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class LargeValues:
    """Builds large values out of the bytes of a file, each from the bytes after those of the one before."""

    writable = False
    """Whether the binaries of tagged values are a `bytearray`, which an array can have as its memory."""

    def __init__(self, data: bytes | mmap.mmap | memoryview) -> None:
        self._data = data
        self._given = 0

    def binary(self, start: int, nbytes: int, code: int) -> Any:
        """Return a binary, in the form in which the extension `code` builds its value from it."""
        pieces = self._pieces(start, nbytes)
        if code == ARRAY:
            array, place = np.empty(nbytes, np.uint8), 0
            for piece in pieces:
                array[place : place + len(piece)] = np.frombuffer(piece, np.uint8)
                place += len(piece)
            return array
        if code == BYTEARRAY or (self.writable and code == TAGGED):
            grown = bytearray()
            for piece in pieces:
                grown += piece
            return grown
        # This grows where it is, and gives its memory away as the result.
        buffer = io.BytesIO()
        for piece in pieces:
            buffer.write(piece)
        return buffer.getvalue()

    def text(self, start: int, nbytes: int) -> str:
        """Return a text.  Raises `UnicodeDecodeError`."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        text = ""
        for piece in self._pieces(start, nbytes):
            text += decoder.decode(piece)  # grows where it is
        return text + decoder.decode(b"", final=True)

    def give_back(self, stop: int) -> None:
        """Give back the memory of all bytes before `stop`, if that is enough to be worth a call."""
        if stop - self._given >= _PIECE_NBYTES and isinstance(self._data, mmap.mmap):
            stop -= stop % mmap.PAGESIZE
            self._data.madvise(mmap.MADV_DONTNEED, self._given, stop - self._given)
            self._given = stop

    def _pieces(self, start: int, nbytes: int) -> Iterator[memoryview]:
        view, stop = memoryview(self._data), start + nbytes
        for place in range(start, stop, _PIECE_NBYTES):
            yield view[place : min(place + _PIECE_NBYTES, stop)]
            self.give_back(min(place + _PIECE_NBYTES, stop))


_MOST_STRUCTURE, _MOST_TRUSTED = 256 << 20, 1 << 30
_BASE_STRUCTURE = 64 << 20
_STRUCTURE_PER_BYTE = 24
_LIST, _SLOT, _MAP_BASE, _PAIR, _TEXT, _EXTENSION = 64, 8, 64, 96, 56, 128
_DEQUE, _DEQUE_EXTRA = 19, 640

# numbers: one tag after another, from 0xCA on
_KINDS = {0xCA + place: kind for place, kind in enumerate("fdBHIQbhiq")}
_FIXED = {tag: struct.Struct(f">{kind}") for tag, kind in _KINDS.items()}
_ONE_BYTE: dict[int, Any] = (
    {tag: tag for tag in range(0x80)}
    | {tag: tag - 0x100 for tag in range(0xE0, 0x100)}
    | {0xC0: None, 0xC2: False, 0xC3: True}
)
"""Values of which one byte is all."""
# Long lists hold runs of values of one kind, which are read at once: that takes a tenth of the time.
_RUNS = {tag: b"(?:\\x%02x.{%d})+" % (tag, kind.size) for tag, kind in _FIXED.items()}
_ROWS = {tag: np.dtype([("tag", "u1"), ("value", f">{kind}")]) for tag, kind in _KINDS.items()}
_MOST_OF_RUN = 1 << 16
_RUN_OF_BYTES = rb"[\x00-\x7f\xe0-\xff\xc0\xc2\xc3]+"
# tag -> bytes of the length that follows it
_BIN = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXT = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_STR = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAY = {0xDC: 2, 0xDD: 4}
_MAP = {0xDE: 2, 0xDF: 4}
_FIXEXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def read_msgpack(
    data: bytes | MappedFile, unpack: Unpack, *, trusted: bool = False, writable: bool = False
) -> Any:
    """Return the one value that `data` holds.  Memory of `file_memory` is given back, and has no bytes then.

    `unpack(code, value)` returns the value of an extension, whose payload is itself one msgpack value.
    Raises `CorruptError`, or `FormatError` for more structure than `check_structure` allows, and for more
    than `MAX_DEPTH` levels of arrays, maps and extensions; the array that is all of an extension's payload
    does not count.  `trusted` data may have as much structure as older versions wrote.  With `writable`, the
    binaries of tagged values are a `bytearray`, and equal values of a map may be one object, which must stay
    as it is.
    """
    reader = _Reader(data, unpack, _MOST_TRUSTED if trusted else _MOST_STRUCTURE)
    reader.large.writable = writable
    reader.recent = [] if writable else None
    return _read(reader, data)


def check_structure(data: bytes | memoryview) -> None:
    """Raise `FormatError` when the value in `data` has too much structure to be read.

    Lists, maps, extensions, texts and binaries take far more memory than bytes in a file, and so do the
    places of their members.  The limits are in docs/format.md.
    """
    if len(data) > _BASE_STRUCTURE >> 8:  # fewer bytes cannot hold so much
        _read(_Weigher(data, lambda code, value: None, _MOST_STRUCTURE), data)


def _read(reader: _Reader, data: bytes | MappedFile | memoryview) -> Any:
    with without_collections():  # no value that is read refers back to those around it
        value = reader.value(0)
    reader.large.give_back(len(data))
    if reader.position != len(data):
        raise CorruptError(f"{len(data) - reader.position} bytes follow the end of the msgpack value")
    return value


class _ReadValue(Struct, frozen=True):
    """A value that was read: its bytes, and the memory that its structure takes."""

    data: bytes
    value: Any
    charged: int


_MOST_KNOWN, _MOST_KNOWN_NBYTES = 8, 4 << 10
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of dicts, lists, tuples and values that never change."""
    if type(value) in (dict, list, tuple):
        return all(map(_is_plain, value.values() if type(value) is dict else value))
    return type(value) in _PLAIN


class _Reader:
    recent: list[_ReadValue] | None = None
    """The last different values of the outermost map, if equal ones may be one object."""
    remedy = (
        "save long lists and large tables as tensors or arrays; of a checkpoint that you trust, "
        "LoadOptions(allow_pickle=True) reads more"
    )

    def __init__(self, data: bytes | MappedFile | memoryview, unpack: Unpack, most: int) -> None:
        self._data = data
        self._code = -1
        self.large = LargeValues(data)
        self._end = len(data)
        self._unpack = unpack
        self._most = min(_BASE_STRUCTURE + _STRUCTURE_PER_BYTE * len(data), most)
        self._left = self._most
        self.position = 0

    def value(self, depth: int) -> Any:
        """Read the value that begins here, inside `depth` others."""
        position = self.position
        if position >= self._end:
            raise _cut(position)
        tag = self._data[position]
        self.position = position + 1
        return self.BY_TAG[tag](self, tag, depth)

    def _one_byte(self, tag: int, depth: int) -> Any:
        return _ONE_BYTE[tag]

    def _fixed(self, tag: int, depth: int) -> Any:
        kind = _FIXED[tag]
        return kind.unpack_from(self._data, self._take(kind.size))[0]

    def _text(self, tag: int, depth: int) -> str:
        nbytes = tag & 0x1F if tag < 0xC0 else self._number(_STR[tag])
        self._charge(_TEXT)
        start = self._take(nbytes)
        try:
            if nbytes >= LARGE_NBYTES:
                return self.large.text(start, nbytes)
            return str(self._data[start : start + nbytes], "utf-8")
        except UnicodeDecodeError as error:
            raise _no_text(start) from error

    def _binary(self, tag: int, depth: int) -> Any:
        nbytes = self._number(_BIN[tag])
        self._charge(_TEXT)
        start = self._take(nbytes)
        if nbytes >= LARGE_NBYTES:
            return self.large.binary(start, nbytes, self._code)
        self.large.give_back(start)
        data = self._data[start : start + nbytes]
        return bytearray(data) if self.large.writable and self._code == TAGGED else data

    def _array(self, tag: int, depth: int) -> list[Any]:
        if depth >= MAX_DEPTH:
            raise _too_deep()
        count = tag & 0x0F if tag < 0xA0 else self._number(_ARRAY[tag])
        # every member takes at least one byte, so a short file cannot claim a long list
        if count > self._end - self.position:
            raise _cut(self.position)
        self._charge(_LIST + _SLOT * count)
        if count > 1:
            return self._members(count, depth + 1)
        return [self.value(depth + 1)] if count else []

    def _members(self, count: int, depth: int) -> list[Any]:
        members: list[Any] = []
        while len(members) < count:
            members += self._next(count - len(members), depth)
        return members

    def _next(self, most: int, depth: int) -> Iterable[Any]:
        """Read at least one value, and at most so many."""
        data, position = self._data, self.position
        tag = data[position] if position < self._end else -1
        if 0x80 <= tag < 0xA0:
            return (self.value(depth),)
        if tag in _ONE_BYTE:
            return map(_ONE_BYTE.__getitem__, self._run(_RUN_OF_BYTES, min(most, _MOST_OF_RUN)))
        if (row := _ROWS.get(tag)) is not None:
            after = position + row.itemsize
            if after < self._end and data[after] == tag:
                run = self._run(_RUNS[tag], min(most, _MOST_OF_RUN) * row.itemsize)
                values: list[Any] = np.frombuffer(run, row)["value"].tolist()
                return values
        if 0xA0 <= tag < 0xC0:
            return self._short_texts(most)
        return (self.value(depth),)

    def _short_texts(self, most: int) -> list[str]:
        """Read the texts of less than 32 bytes that follow, of which there is one, at most so many."""
        data, end, texts = self._data, self._end, list[str]()
        while len(texts) < most and self.position < end and 0xA0 <= data[self.position] < 0xC0:
            start = self.position + 1
            self.position = stop = start + data[start - 1] - 0xA0
            self._charge(_TEXT)
            try:
                texts.append(str(data[start:stop], "utf-8"))
            except UnicodeDecodeError as error:
                raise _no_text(start) from error
            if stop > end:
                raise _cut(start)
        return texts

    def _run(self, kind: bytes, most: int) -> bytes:
        """Read the values of one kind that follow, of which there is one, from at most so many bytes."""
        end = min(self._end, self.position + most)
        found = re.compile(kind, re.DOTALL).match(self._data, self.position, end)
        assert found is not None
        self.position = found.end()
        return found[0]

    def _charge(self, nbytes: int) -> None:
        """Count memory that structure takes; raise where it becomes too much."""
        self._left -= nbytes
        if self._left < 0:
            raise FormatError(
                f"the values have too many lists, maps and texts for a file of {len(self._data)} bytes: more "
                f"than {self._most >> 20} MiB of structure, up to byte {self.position}",
                remedy=self.remedy,
            )

    def _map(self, tag: int, depth: int) -> dict[str, Any]:
        if depth >= MAX_DEPTH:
            raise _too_deep()
        count = tag & 0x0F if tag < 0x90 else self._number(_MAP[tag])
        if count > (self._end - self.position) // 2:
            raise _cut(self.position)
        self._charge(_MAP_BASE + _PAIR * count)
        return self._pairs(count, depth + 1) if count else {}

    def _pairs(self, count: int, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for _ in range(count):
            key = self.value(depth)
            if type(key) is not str:
                raise CorruptError(f"a map has a key that is not a string, before byte {self.position}")
            if key in members:
                raise CorruptError(f"a map has the key {key[:200]!r} twice")
            members[key] = self.value(depth) if depth > 1 or self.recent is None else self._shared(depth)
        return members

    def _shared(self, depth: int) -> Any:
        """Read a value; one with the bytes of an earlier one, as options of parameters have, is the same."""
        recent, start, left = self.recent or [], self.position, self._left
        for known in recent:
            stop = start + len(known.data)
            if self._data[start:stop] == known.data:  # no value begins with all of another one
                self.position = stop
                self._charge(known.charged)
                return known.value
        value = self.value(depth)
        nbytes = self.position - start
        if type(value) is dict and nbytes <= _MOST_KNOWN_NBYTES and _is_plain(value):
            known = _ReadValue(bytes(self._data[start : self.position]), value, left - self._left)
            self.recent = [known, *recent[: _MOST_KNOWN - 1]]
        return value

    def _extension(self, tag: int, depth: int) -> Any:
        if depth >= MAX_DEPTH:
            raise _too_deep()
        nbytes = _FIXEXT.get(tag) or self._number(_EXT[tag])
        code = self._data[self._take(1)]
        self._charge(_EXTENSION + (_DEQUE_EXTRA if code == _DEQUE else 0))
        start = self._take(nbytes)
        outer, self._end, self.position = self._end, start + nbytes, start
        inner = self._data[start] if nbytes else 0
        around, self._code = self._code, code
        # the payload of a container is an array, which is not one more level
        payload = self.value(depth if 0x90 <= inner < 0xA0 or inner in _ARRAY else depth + 1)
        if self.position != self._end:
            raise CorruptError(f"an extension of type {code} holds more than one value, at byte {start}")
        self._end, self._code = outer, around
        return self._unpack(code, payload)

    def _nothing(self, tag: int, depth: int) -> Any:
        raise CorruptError(f"byte {self.position - 1} begins no msgpack value")

    def _number(self, nbytes: int) -> int:
        start = self._take(nbytes)
        return int.from_bytes(self._data[start : start + nbytes], "big")

    def _take(self, nbytes: int) -> int:
        """Step over `nbytes` bytes and return their start."""
        start = self.position
        if nbytes > self._end - start:
            raise _cut(start)
        self.position = start + nbytes
        return start

    BY_TAG = [_nothing] * 256
    """The method that reads a value, by its first byte."""
    for _tags, _read in (
        (_ONE_BYTE, _one_byte),
        (_FIXED, _fixed),
        (_BIN, _binary),
        ([*range(0x80, 0x90), *_MAP], _map),
        ([*range(0x90, 0xA0), *_ARRAY], _array),
        ([*range(0xA0, 0xC0), *_STR], _text),
        ([*_EXT, *_FIXEXT], _extension),
    ):
        for _tag in _tags:
            BY_TAG[_tag] = _read


class _Weigher(_Reader):
    """Reads values without keeping them."""

    remedy = "save long lists and large tables as tensors or arrays"

    def _members(self, count: int, depth: int) -> list[Any]:
        while count > 0:
            count -= len(list(self._next(count, depth)))
        return []

    def _pairs(self, count: int, depth: int) -> dict[str, Any]:
        for _ in range(2 * count):
            self.value(depth)
        return {}


def _no_text(position: int) -> CorruptError:
    return CorruptError(f"the text at byte {position} is not valid UTF-8")


def _cut(position: int) -> CorruptError:
    return CorruptError(f"the msgpack value is truncated at byte {position}")


def _too_deep() -> FormatError:
    return FormatError(f"the values are nested deeper than {MAX_DEPTH} levels")
