"""Rebuild a lost index from the headers of the data files."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.errors import CorruptError, FormatError
from reknit.format.data_file import ALIASES_KEY, ALIGNMENT, FORMAT_KEY, ITEM_KEY, decode_texts
from reknit.format.index.checks import check_index
from reknit.format.paths import parse_entry_key, parse_path
from reknit.format.versions import check_version
from reknit.types.box import Box
from reknit.types.manifest import Extent, Index, TensorEntry
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from reknit.format.data_file import Header


class _Parts(NamedTuple):
    """The boxes of a tensor in the data files: in one piece or not, and the extent of each."""

    dtype: str
    whole: bool
    extents: dict[Box, Extent]


def rebuild_index(headers: Mapping[str, Header]) -> Index:
    """Return the index that the headers of all data files of one checkpoint describe, by path.

    The shape of a tensor that is in parts is where its parts end, so that a missing last part goes unseen
    here; of equal boxes that several files hold, the first path's counts.  Raises `CorruptError` or
    `FormatError`, also when the files are of several writes by their names.  The write id in a header may be
    older, since a save takes over files that did not change.
    """
    if len({name.write_id8 for name in map(parse_path, headers) if name is not None}) > 1:
        raise FormatError("the data files are of several writes", remedy="choose the files of one write id")
    tensors: dict[tuple[str, str], _Parts] = {}
    for path in sorted(headers):
        item = _item_of(headers[path], path)
        for entry in headers[path].entries:
            fqn, box = parse_entry_key(entry.key)
            parts = tensors.setdefault((item, fqn), _Parts(entry.dtype, box is None, {}))
            if parts != (entry.dtype, box is None, parts.extents) or (box and box.lengths != entry.lengths):
                raise CorruptError(f"{path}: {entry.key[:200]!r} does not fit the other parts of its tensor")
            extent = Extent(path, headers[path].data_start + entry.start, entry.nbytes)
            parts.extents.setdefault(box or Box.whole(entry.lengths), extent)
    tied: dict[tuple[str, str], _Parts] = {}
    for path, header in headers.items():
        item = header.metadata[ITEM_KEY]
        for alias, fqn in decode_texts(header.metadata, ALIASES_KEY).items():
            if (item, fqn) not in tensors or (item, alias) in tensors:
                raise CorruptError(f"{path}: {alias[:200]!r} is not a second name of {fqn[:200]!r}")
            tied[item, alias] = tensors[item, fqn]
    return _index({**tensors, **tied})


def _item_of(header: Header, path: str) -> str:
    """Return the item of a data file, after a check that reknit wrote the file."""
    version = header.metadata.get(FORMAT_KEY, "")
    if not version.isascii() or not version.isdigit() or len(version) > 9 or ITEM_KEY not in header.metadata:
        raise FormatError(f"{path} is not a data file of a checkpoint: its header does not say so")
    check_version(int(version))
    if header.data_start % ALIGNMENT:
        raise CorruptError(
            f"{path}: tensor bytes begin at {header.data_start}, not at a multiple of {ALIGNMENT}"
        )
    return header.metadata[ITEM_KEY]


def _index(tensors: Mapping[tuple[str, str], _Parts]) -> Index:
    names = sorted(tensors)
    entries, rows = [], []
    for number, name in enumerate(names):
        parts = tensors[name]
        shape = tuple(map(max, zip(*(box.ends for box in parts.extents), strict=True)))
        entries.append(TensorEntry(*name, TensorSpec(shape, parts.dtype)))
        boxes = sorted(parts.extents, key=lambda box: box.offsets)
        rows += [(number, box, parts.extents[box]) for box in boxes]
    files = sorted({extent.file for _, _, extent in rows})
    numbers = {path: number for number, path in enumerate(files)}
    width = max((max(box.ndim, 1) for _, box, _ in rows), default=1)
    index = Index(
        tensors=tuple(entries),
        files=tuple(files),
        tensor=_column([number for number, _, _ in rows]),
        offsets=_column([box.offsets + (0,) * (width - box.ndim) for _, box, _ in rows], width),
        lengths=_column([box.lengths + (1,) * (width - box.ndim) for _, box, _ in rows], width),
        file=_column([numbers[extent.file] for _, _, extent in rows]),
        start=_column([extent.start for _, _, extent in rows]),
        nbytes=_column([extent.nbytes for _, _, extent in rows]),
    )
    check_index(index)
    return index


def _column(values: Sequence[object], *width: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64).reshape(len(values), *width)
