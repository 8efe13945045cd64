"""Damaged copies of a folder, one file at a time: removed, emptied, cut, flipped, swapped, or one too many.

A reader of a format passes if no copy is read with a wrong value in silence:

    for damage, broken in damages(folder, tmp_path):
        assert not wrong_in_silence(broken, whole), damage

A format without digests cannot show a flipped byte of a tensor: leave `FLIPPED` out, or compare names alone.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import reknit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

REMOVED, EMPTIED, CUT, FLIPPED, SWAPPED, ADDED = "removed", "emptied", "cut", "flipped", "swapped", "added"
KINDS = (REMOVED, EMPTIED, CUT, FLIPPED, SWAPPED, ADDED)
_NUMBERS = re.compile(r"[0-9a-f]{8,}|[0-9]+")

Edit = dict[str, bytes | None]
"""New contents of files by path in the folder; None removes a file."""


def damages(
    folder: Path, place: Path, *, kinds: Collection[str] = KINDS, files: str = "*", flips: int = 3
) -> Iterator[tuple[str, Path]]:
    """Yield the name of each damage, such as ``cut a/b.pt``, and a copy of the folder that has it.

    Undamaged files are hard links, and a copy is gone when the next one is made.  `files` is a pattern of the
    files to damage, and `flips` the number of bytes that are flipped in each file, one in each copy.
    """
    for number, (name, edit) in enumerate(_edits(folder, kinds, files, flips)):
        broken = place / f"damage-{number}" / folder.name
        shutil.copytree(folder, broken, copy_function=os.link)
        for path, data in edit.items():
            (broken / path).unlink(missing_ok=True)
            if data is not None:
                (broken / path).write_bytes(data)
        try:
            yield name, broken
        finally:
            shutil.rmtree(broken.parent)


def _edits(folder: Path, kinds: Collection[str], files: str, flips: int) -> Iterator[tuple[str, Edit]]:
    """Yield the damages of each file with their names."""
    paths = sorted(str(one.relative_to(folder)) for one in folder.rglob(files) if one.is_file())
    for path in paths:
        data = (folder / path).read_bytes()
        edits: dict[str, Edit] = {REMOVED: {path: None}}
        if data:
            edits |= {EMPTIED: {path: b""}, CUT: {path: data[: len(data) // 2]}}
        yield from ((f"{kind} {path}", edit) for kind, edit in edits.items() if kind in kinds)
        for at in _places(len(data), flips) if FLIPPED in kinds else ():
            flipped = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
            yield f"{FLIPPED} byte {at} of {path}", {path: flipped}
    if SWAPPED in kinds:
        for one, other in sorted(_siblings(paths)):
            first, second = ((folder / path).read_bytes() for path in (one, other))
            if first != second:
                yield f"{SWAPPED} {one} and {other}", {one: second, other: first}
    if ADDED in kinds:
        for path in paths:
            if (after := _next(path)) != path and after not in paths:
                yield f"{ADDED} {after}, a copy of {path}", {after: (folder / path).read_bytes()}


def _places(nbytes: int, num: int) -> list[int]:
    """Return the positions of a number of bytes, evenly over a file, which is not cut at its ends."""
    return sorted({(2 * each + 1) * nbytes // (2 * num) for each in range(num)}) if nbytes else []


def _siblings(paths: list[str]) -> set[tuple[str, str]]:
    """Return pairs of files of one kind: names that differ in numbers, or one name in sibling folders."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(_NUMBERS.sub("#", path), []).append(path)
        parent = Path(path).parent
        if parent.name:
            groups.setdefault(f"{parent.parent}/*/{Path(path).name}", []).append(path)
    return {pair for group in groups.values() for pair in pairwise(sorted(group))}


def _next(path: str) -> str:
    """Return a path with the first number of its file name one higher, itself without a number."""
    folder, name = os.path.split(path)

    def raised(found: re.Match[str]) -> str:
        return str(int(found[0]) + 1).zfill(len(found[0]))

    return os.path.join(folder, re.sub(r"(?<![0-9a-zA-Z])[0-9]+(?![0-9a-zA-Z])", raised, name, count=1))


def wrong_in_silence(path: Path, whole: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names of values that a folder lacks, adds or has otherwise, without an error or a warning.

    `whole` is the result of `read_all` on the undamaged folder.  Values are compared byte by byte.  Entries
    that reknit names as unreadable do not count.
    """
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            with reknit.open(path) as checkpoint:
                found, other = checkpoint.read_all(), checkpoint.manifest.other
        except reknit.ReknitError:
            return []
    if seen:
        return []
    before, after = _by_name(whole), _by_name(found)
    changed = {name for name in before.keys() & after.keys() if not _same(before[name], after[name])}
    said = other.unread if other is not None else ()
    wrong = (before.keys() ^ after.keys()) | changed
    return sorted(name for name in wrong if not any(entry.covers(name) for entry in said))


def _by_name(values: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{item}/{name}": value for item, inner in values.items() for name, value in inner.items()}


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in type, shape and every byte."""
    if type(one) is not type(other):
        return False
    if hasattr(one, "dtype"):
        if one.dtype != other.dtype or tuple(one.shape) != tuple(other.shape):
            return False
        return _bytes(one) == _bytes(other)
    return bool(repr(one) == repr(other))


def _bytes(tensor: Any) -> bytes:
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
