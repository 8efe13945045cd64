"""Pages of `reknit show`: the bytes that each rank wrote, and the reads of ranks in another layout."""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.cli.output import time_text
from reknit.errors import UsageError, shown
from reknit.format.paths import parse_path
from reknit.monitor.page import page_file, with_data
from reknit.plugins.events import amount, spelled
from reknit.plugins.format import Box, full_name, plan_reads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.plugins.format import Index, OpenCheckpoint


MOST_RANKS = 64
"""The ranks of a layout that are planned; of more ranks, these are spread evenly."""
_MOST_ROWS = 6_400_000
"""Chunks by ranks that are planned at most, so that a plan of very many chunks takes seconds."""


class RankReads(NamedTuple):
    """The reads of one rank: bytes that it wants and reads, its requests, and the bytes from each file."""

    rank: int
    wanted_nbytes: int
    read_nbytes: int
    num_reads: int
    by_file: NDArray[np.int64]
    """Bytes from each entry of `Index.files`."""


def layout_reads(checkpoint: OpenCheckpoint, layout: TargetLayout) -> list[RankReads]:
    """Return the reads of the ranks of a layout, each alone: a real load shares bytes of several ranks."""
    index = checkpoint.index
    found = []
    for rank in planned_ranks(layout, len(index.tensor)):
        wanted = boxes(index, layout, rank)
        plan = plan_reads(checkpoint, wanted)
        by_file = np.zeros(len(index.files), np.int64)
        np.add.at(by_file, plan.read_file, plan.read_nbytes)
        nbytes = sum(box.numel * index.tensors[number].spec.itemsize for number, box in wanted)
        found.append(RankReads(rank, nbytes, plan.nbytes, len(plan.read_file), by_file))
    return found


def planned_ranks(layout: TargetLayout, num_chunks: int) -> list[int]:
    """Return the ranks that are planned: all, or some that are spread evenly."""
    most = max(4, min(MOST_RANKS, _MOST_ROWS // max(num_chunks, 1)))
    if layout.num_ranks <= most:
        return list(range(layout.num_ranks))
    return [k * (layout.num_ranks - 1) // (most - 1) for k in range(most)]


def boxes(index: Index, layout: TargetLayout, rank: int) -> list[tuple[int, Box]]:
    """Return the number of each tensor, with the part that a rank wants of it."""
    parts = ((number, layout.box(entry.spec.shape, rank)) for number, entry in enumerate(index.tensors))
    return [(number, box) for number, box in parts if box is not None]


def writers_of(index: Index) -> NDArray[np.int64]:
    """Return the rank that wrote each file of an index, -1 for a file without a rank in its name."""
    names = (parse_path(path) for path in index.files)
    return np.array([-1 if name is None or name.rank is None else name.rank for name in names], np.int64)


_AXIS = re.compile(r"([A-Za-z_]\w{0,30})=(\d{1,9})(?::(\d|replicate))?", re.ASCII)
_COPYING = ("replicate", "ddp", "dp_replicate", "hsdp", "cp")
_MOST_RANKS = 1_000_000
_SAY = (
    "write the number of ranks, as in --layout 4, or axes, as in --layout tp=2,dp=2 or tp=2:0,rep=2:replicate"
)


class LayoutAxis(NamedTuple):
    """An axis of the ranks; it cuts dimension `dim` of each tensor, or copies the tensor if that is None."""

    name: str
    size: int
    dim: int | None


class TargetLayout(NamedTuple):
    """The axes of a layout, the slowest first."""

    axes: tuple[LayoutAxis, ...]

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return prod(axis.size for axis in self.axes)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the place of a rank along each axis."""
        place = []
        for axis in reversed(self.axes):
            rank, at = divmod(rank, axis.size)
            place.append(at)
        return tuple(reversed(place))

    def name(self, rank: int) -> str:
        """Return a rank with its place, such as ``rank 3 (tp 1, dp 1)``."""
        place = ", ".join(
            f"{axis.name} {at}" for axis, at in zip(self.axes, self.coordinate(rank), strict=True)
        )
        return f"rank {rank} ({place})" if len(self.axes) > 1 else f"rank {rank}"

    def box(self, shape: Sequence[int], rank: int) -> Box | None:
        """Return the part of a tensor that a rank loads, None for a rank without elements.

        Each axis cuts into parts of equal size, of which the last may be smaller or empty, as torch does.
        """
        offsets, lengths = [0] * len(shape), list(shape)
        for axis, at in zip(self.axes, self.coordinate(rank), strict=True):
            if axis.dim is None or axis.dim >= len(shape):
                continue
            part = -(-lengths[axis.dim] // axis.size)
            begin = min(at * part, lengths[axis.dim])
            offsets[axis.dim] += begin
            lengths[axis.dim] = min(part, lengths[axis.dim] - begin)
        return Box(tuple(offsets), tuple(lengths)) if all(lengths) else None

    def __str__(self) -> str:
        """Return the layout as words."""
        return ", ".join(
            f"{axis.name} {axis.size} ({'copies' if axis.dim is None else f'cuts dimension {axis.dim}'})"
            for axis in self.axes
        )


def target_layout(text: str) -> TargetLayout:
    """Return the layout that a text names.  Raises `UsageError` for another text.

    An axis ``tp`` cuts dimension 1, and tensors of one dimension are copied along it.  Axes called ``ddp``,
    ``replicate`` and the like copy, and all others cut dimension 0.  ``NAME=SIZE:DIM`` says otherwise.
    """
    axes = []
    for part in [f"fsdp={text}"] if re.fullmatch(r"\d{1,9}", text, re.ASCII) else text.split(","):
        match = _AXIS.fullmatch(part.strip())
        if match is None or int(match[2]) < 1:
            raise UsageError(f"{shown(text)} is not a layout", remedy=_SAY)
        name, size, dim = match[1], int(match[2]), match[3]
        if name == "pp" and dim is None:
            raise UsageError(
                "stages of a pipeline do not cut tensors",
                remedy="leave pp out: each stage reads its own tensors",
            )
        usual = None if name in _COPYING else 1 if name.startswith("tp") else 0
        axes.append(
            LayoutAxis(name, size, usual if dim is None else None if dim == "replicate" else int(dim))
        )
    layout = TargetLayout(tuple(axes))
    if layout.num_ranks > _MOST_RANKS:
        raise UsageError(
            f"{shown(text)} has {layout.num_ranks:,} ranks", remedy="name at most a million ranks"
        )
    return layout


_MOST_TENSORS = 300
_MOST_CHUNKS = 2_000
"""The boxes that are drawn of one tensor; of more chunks, neighbours are one box."""
_ALL_CHUNKS = 20_000
"""The boxes that are drawn of all tensors together."""
_MOST_BINS = 400
"""The bars of ranks, or groups of ranks."""
_MOST_ITEMS = 8
_MOST_FILES = 100
_FILE_PARTS = 200
_MOST_SOURCES = 64
_MOST_LETTERS = 200
_OTHER = "other items"


def map_page(checkpoint: OpenCheckpoint, layout: TargetLayout | None = None) -> str:
    """Return the page; with a layout, it also has the reads of the ranks of that layout."""
    return with_data(page_file("map.html", ("map_tensor.js", "map.js")), map_data(checkpoint, layout))


def map_data(checkpoint: OpenCheckpoint, layout: TargetLayout | None = None) -> dict[str, Any]:
    """Return the content of the page as plain data, bounded for checkpoints with any number of chunks."""
    index, writers = checkpoint.index, writers_of(checkpoint.index)
    reads = [] if layout is None else layout_reads(checkpoint, layout)
    tensors = _tensors(index, writers, layout, [each.rank for each in reads])
    return {
        "facts": _facts(checkpoint, writers),
        "path": _clip(checkpoint.storage.url),
        "writers": _writers(checkpoint),
        "files": _files(checkpoint, writers),
        "tensors": tensors,
        "num_tensors": len(index.tensors),
        "layout": None if layout is None else _reads(layout, reads, index, writers),
    }


def _facts(checkpoint: OpenCheckpoint, writers: NDArray[np.int64]) -> list[tuple[str, str]]:
    manifest, index = checkpoint.manifest, checkpoint.index
    of_rank = np.bincount(
        writers[index.file][writers[index.file] >= 0], index.nbytes[writers[index.file] >= 0]
    )
    of_rank = of_rank[of_rank > 0]
    facts = [
        ("size", amount(manifest.nbytes)),
        ("step", "-" if manifest.step is None else f"{manifest.step:,}"),
        ("saved (UTC)", time_text(manifest.created).rpartition(":")[0] or time_text(manifest.created)),
        ("tensors", f"{len(index.tensors):,}"),
        ("chunks", f"{len(index.tensor):,}"),
        ("files", f"{len(manifest.files):,}"),
        ("ranks that wrote tensors", f"{len(of_rank):,}"),
    ]
    if len(of_rank) > 1:
        facts.append(("largest rank, in medians", f"{of_rank.max() / np.median(of_rank):.2f}"))
    return facts


def _writers(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """Return the bytes of each rank (or group of ranks) by item, from the names of the files."""
    of_item: Counter[str] = Counter()
    pairs: list[tuple[int, str, int]] = []
    for file in checkpoint.manifest.files:
        name = parse_path(file.path)
        if name is not None and name.rank is not None and name.item is not None:
            of_item[name.item] += file.nbytes
            pairs.append((name.rank, name.item, file.nbytes))
    items = [item for item, _ in of_item.most_common(_MOST_ITEMS)]
    if len(of_item) > len(items):
        items = [*items[:-1], _OTHER]
    ranks = sorted({rank for rank, *_ in pairs})
    per = -(-len(ranks) // _MOST_BINS) or 1
    bin_of = {rank: n // per for n, rank in enumerate(ranks)}
    row = {item: n for n, item in enumerate(items)}
    nbytes = np.zeros((len(items), -(-len(ranks) // per)), np.int64)
    for rank, item, size in pairs:
        nbytes[row.get(item, len(items) - 1), bin_of[rank]] += size
    names = [spelled(ranks[n : n + per]) for n in range(0, len(ranks), per)]
    return {"items": [_clip(item) for item in items], "names": names, "per": per, "nbytes": nbytes.tolist()}


def _files(checkpoint: OpenCheckpoint, writers: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Return the largest files, each with the tensors in it in the order of their bytes."""
    index = checkpoint.index
    sizes = np.array([checkpoint.files[path].nbytes for path in index.files], np.int64)
    order = np.lexsort((index.start, index.file))
    first = np.searchsorted(index.file[order], np.arange(len(index.files) + 1))
    found = []
    for file in np.argsort(-sizes, kind="stable")[:_MOST_FILES].tolist():
        rows = order[first[file] : first[file + 1]]
        parts = []
        for some in np.array_split(rows, min(len(rows), _FILE_PARTS)) if len(rows) else ():
            names = [index.tensors[n] for n in dict.fromkeys(index.tensor[some].tolist())]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            start = int(index.start[some].min())
            stop = int((index.start[some] + index.nbytes[some]).max())
            parts.append([_clip(full_name(names[0].item, names[0].fqn)) + more, start, stop - start])
        found.append(
            {
                "path": _clip(index.files[file]),
                "nbytes": int(sizes[file]),
                "rank": int(writers[file]),
                "parts": parts,
            }
        )
    return found


def _tensors(
    index: Index, writers: NDArray[np.int64], layout: TargetLayout | None, ranks: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the largest tensors, each with its chunks and the parts that the ranks of a layout want."""
    size = [entry.spec.nbytes for entry in index.tensors]
    largest = sorted(range(len(size)), key=lambda number: -size[number])[:_MOST_TENSORS]
    left = _ALL_CHUNKS
    wanted: dict[int, dict[tuple[int, ...], list[int]]] = {}
    if layout is not None:
        kept = set(largest)
        for rank in ranks:
            for number, box in boxes(index, layout, rank):
                if number in kept:
                    wanted.setdefault(number, {}).setdefault((*box.offsets, *box.lengths), []).append(rank)
    found = []
    for number in largest:
        entry, ndim = index.tensors[number], len(index.tensors[number].spec.shape)
        rows = np.arange(index.first[number], index.first[number + 1])
        most = min(_MOST_CHUNKS, max(left, 1))
        groups = np.array_split(rows, min(len(rows), most))
        left -= len(groups)
        dims = _drawn(index, rows, ndim)
        parts = wanted.get(number, {})
        found.append(
            {
                "name": _clip(full_name(entry.item, entry.fqn)),
                "shape": list(entry.spec.shape),
                "dtype": entry.spec.dtype,
                "nbytes": entry.spec.nbytes,
                "num_chunks": len(rows),
                "dims": dims,
                "chunks": [_box(index, writers, some, dims) for some in groups if len(some)],
                "wanted": [
                    [*_drawn_box(box[:ndim], box[ndim:], dims), spelled(who, 4)] for box, who in parts.items()
                ],
            }
        )
    return found


def _drawn(index: Index, rows: NDArray[np.int64], ndim: int) -> list[int]:
    """Return the two dimensions that are drawn: the first dimensions with a cut, else the first ones."""
    cut = [d for d in range(ndim) if len(np.unique(index.offsets[rows, d])) > 1]
    both = sorted([*cut, *(d for d in range(ndim) if d not in cut)][:2])
    return [*both, *([-1] * (2 - len(both)))]


def _box(index: Index, writers: NDArray[np.int64], rows: NDArray[np.int64], dims: list[int]) -> list[Any]:
    """Return the rectangle around some chunks: its place, the first rank, the file, start, bytes, chunks."""
    offsets = index.offsets[rows].min(axis=0)
    lengths = (index.offsets[rows] + index.lengths[rows]).max(axis=0) - offsets
    file = int(index.file[rows[0]])
    return [
        *_drawn_box(offsets.tolist(), lengths.tolist(), dims),
        int(writers[file]),
        _clip(index.files[file]),
        int(index.start[rows[0]]),
        int(index.nbytes[rows].sum()),
        len(rows),
    ]


def _drawn_box(offsets: Sequence[int], lengths: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Return offset and length in the two drawn dimensions; a missing dimension has length 1."""
    pairs = [(offsets[d], lengths[d]) if d >= 0 else (0, 1) for d in dims]
    return [pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]]


def _reads(
    layout: TargetLayout, reads: Sequence[RankReads], index: Index, writers: NDArray[np.int64]
) -> dict[str, Any]:
    """Return the reads of each rank, by the ranks (or groups of ranks) that wrote the files."""
    known = np.unique(writers)
    per = -(-len(known) // _MOST_SOURCES) or 1
    group = np.searchsorted(known, writers) // per
    num = -(-len(known) // per)
    return {
        "words": str(layout),
        "num_ranks": layout.num_ranks,
        "sources": [
            spelled(known[n : n + per].tolist()) if known[n] >= 0 else "no rank"
            for n in range(0, len(known), per)
        ],
        "ranks": [
            {
                "name": layout.name(each.rank),
                "wanted": each.wanted_nbytes,
                "read": each.read_nbytes,
                "requests": each.num_reads,
                "files": int((each.by_file > 0).sum()),
                "from": np.bincount(group, each.by_file, num).astype(np.int64).tolist(),
            }
            for each in reads
        ],
    }


def _clip(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…"
