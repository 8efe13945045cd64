"""The paths of files that a store makes of others: inflated members of archives, tensors put in order."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS = r"([0-9]+(?:x[0-9]+)*|-)"
_STRIDED = re.compile(rf"~strided/([0-9]+)/([0-9]+)/{_NUMBERS}/{_NUMBERS}/(.+)", re.DOTALL)
_INFLATED = re.compile(r"~inflated/([0-9]+)/([0-9]+)/([0-9]+)/(.+)", re.DOTALL)


class Strided(NamedTuple):
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


def derived(path: str) -> Strided | Inflated | None:
    """Return the meaning of a path, None for that of a file that exists."""
    if match := _STRIDED.fullmatch(path):
        return Strided(match[5], int(match[1]), int(match[2]), _numbers(match[3]), _numbers(match[4]))
    if match := _INFLATED.fullmatch(path):
        return Inflated(match[4], int(match[1]), int(match[2]), int(match[3]))
    return None


def _text(numbers: Sequence[int]) -> str:
    return "x".join(map(str, numbers)) or "-"


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "-" else tuple(map(int, text.split("x")))
