"""The paths of files that a store makes of others: inflated members of archives, tensors put in order."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS = r"([0-9]+(?:x[0-9]+)*|-)"
_STRIDED = re.compile(rf"~strided/([0-9]+)/([0-9]+)/{_NUMBERS}/{_NUMBERS}/(.+)", re.DOTALL)
_INFLATED = re.compile(r"~inflated/([0-9]+)/([0-9]+)/([0-9]+)/(.+)", re.DOTALL)


_CELL = re.compile(rf"~array/([a-z0-9-]+)/{_NUMBERS}/{_NUMBERS}/([0-9]+)/([0-9]+)/([0-9]+)/(.+)", re.DOTALL)


class Cell(NamedTuple):
    """A box of an array that a library reads, row-major: the array `name` in a `folder` of the checkpoint.

    `title` is the name of the tensor in messages.
    """

    kind: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    itemsize: int
    folder: str
    name: str
    title: str


class StridedPart(NamedTuple):
    """Elements of a file with strides, in elements, from byte `start` on; the derived file is row-major."""

    path: str
    start: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Inflated(NamedTuple):
    """A range of a file that is packed with DEFLATE; the derived file has `nbytes` bytes."""

    path: str
    start: int
    packed_nbytes: int
    nbytes: int


def strided_path(path: str, start: int, itemsize: int, shape: Sequence[int], strides: Sequence[int]) -> str:
    """Return the path of a derived file with the elements of a tensor in row-major order."""
    return f"~strided/{start}/{itemsize}/{_text(shape)}/{_text(strides)}/{path}"


def inflated_path(path: str, start: int, packed_nbytes: int, nbytes: int) -> str:
    """Return the path of a derived file with the unpacked bytes of a member of an archive."""
    return f"~inflated/{start}/{packed_nbytes}/{nbytes}/{path}"


def cell_path(cell: Cell) -> str:
    """Return the path of a derived file with the elements of a box of an array."""
    depth = cell.folder.count("/") + 1 if cell.folder else 0
    sides = f"{_text(cell.offsets)}/{_text(cell.lengths)}/{cell.itemsize}"
    place = f"{depth}/{cell.name.count('/') + 1}/{cell.folder}{'/' if depth else ''}{cell.name}"
    return f"~array/{cell.kind}/{sides}/{place}/{cell.title}"


def derived(path: str) -> StridedPart | Inflated | Cell | None:
    """Return the meaning of a path, None for that of a file that exists.

    No file of reknit has a path that begins with ``~``.
    """
    if not path.startswith("~"):
        return None
    if match := _STRIDED.fullmatch(path):
        return StridedPart(match[5], int(match[1]), int(match[2]), _numbers(match[3]), _numbers(match[4]))
    if match := _INFLATED.fullmatch(path):
        return Inflated(match[4], int(match[1]), int(match[2]), int(match[3]))
    if match := _CELL.fullmatch(path):
        parts, depth = match[7].split("/"), int(match[5])
        stop = depth + int(match[6])
        where = "/".join(parts[:depth]), "/".join(parts[depth:stop]), "/".join(parts[stop:])
        return Cell(match[1], _numbers(match[2]), _numbers(match[3]), int(match[4]), *where)
    return None


def _text(numbers: Sequence[int]) -> str:
    return "x".join(map(str, numbers)) or "-"


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "-" else tuple(map(int, text.split("x")))
