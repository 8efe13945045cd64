"""From what all ranks wrote to the index of the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.errors import CommitError
from reknit.planner.tiling import untiled
from reknit.types.manifest import Index, TensorEntry
from reknit.types.shard import TensorSpec, full_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SHOWN = 20
"""How many problems an error lists before it only counts them."""


class Written(NamedTuple):
    """The chunks that one rank wrote, as columns: `tensor`, `file` are row numbers of `tensors`, `files`.

    `aliases` are (item, alias fqn, fqn) of tied tensors.
    """

    tensors: list[tuple[str, str, str, tuple[int, ...]]]
    files: list[str]
    tensor: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    file: NDArray[np.int64]
    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    aliases: list[tuple[str, str, str]]


def assemble(written: Sequence[Written]) -> tuple[Index, list[str]]:
    """Merge all ranks' chunks into the index, and return it with warnings.

    Equal boxes written twice are dropped but for one, with a warning.  Raises `CommitError` when two ranks
    disagree about a tensor's shape or dtype, or when the chunks of a tensor leave a hole or overlap.
    """
    specs, numbers = _merged_specs(written)
    order_of = {key: place for place, key in enumerate(sorted(specs))}
    rank_of = np.array([order_of[key] for key in numbers], np.int64)
    width = max([w.offsets.shape[1] for w in written], default=1)
    files = [path for w in written for path in w.files]
    file_base = np.cumsum([0] + [len(w.files) for w in written])
    tensor_base = np.cumsum([0] + [len(w.tensors) for w in written])
    tensor = np.concatenate([rank_of[w.tensor + tensor_base[r]] for r, w in enumerate(written)])
    offsets = np.concatenate([_padded(w.offsets, width, 0) for w in written])
    lengths = np.concatenate([_padded(w.lengths, width, 1) for w in written])
    file = np.concatenate([w.file + file_base[r] for r, w in enumerate(written)])
    start = np.concatenate([w.start for w in written])
    nbytes = np.concatenate([w.nbytes for w in written])
    order = np.lexsort((*offsets.T[::-1], tensor))
    tensor, offsets, lengths = tensor[order], offsets[order], lengths[order]
    file, start, nbytes = file[order], start[order], nbytes[order]
    warnings: list[str] = []
    entries = [TensorEntry(item, fqn, specs[item, fqn]) for item, fqn in sorted(specs)]
    same = (
        (tensor[1:] == tensor[:-1])
        & (offsets[1:] == offsets[:-1]).all(1)
        & (lengths[1:] == lengths[:-1]).all(1)
    )
    if same.any():
        twice = sorted({full_name(*entries[t][:2]) for t in tensor[1:][same].tolist()})
        warnings.append(f"written by more than one rank, kept once: {_some(twice)}")
        keep = np.concatenate(([True], ~same))
        tensor, offsets, lengths = tensor[keep], offsets[keep], lengths[keep]
        file, start, nbytes = file[keep], start[keep], nbytes[keep]
    _check_tiling(entries, tensor, offsets, lengths)
    index = Index(tuple(entries), tuple(files), tensor, offsets, lengths, file, start, nbytes)
    return _with_aliases(index, sorted({alias for w in written for alias in w.aliases})), warnings


def _merged_specs(
    written: Sequence[Written],
) -> tuple[dict[tuple[str, str], TensorSpec], list[tuple[str, str]]]:
    """Return the spec of every tensor, and the (item, fqn) of every row of every rank's tensor table."""
    specs: dict[tuple[str, str], TensorSpec] = {}
    keys: list[tuple[str, str]] = []
    for rank, w in enumerate(written):
        for item, fqn, dtype, shape in w.tensors:
            key = (item, fqn)
            keys.append(key)
            known = specs.get(key)
            if known is None:
                specs[key] = TensorSpec(tuple(shape), dtype)
            elif known.shape != tuple(shape) or known.dtype != dtype:
                raise CommitError(
                    f"ranks disagree about {full_name(*key)}: {known}, on rank {rank} {dtype}{list(shape)}",
                    remedy="give tensors that differ different names, or wrap them in reknit.PerRank",
                )
    return specs, keys


def _padded(columns: NDArray[np.int64], width: int, fill: int) -> NDArray[np.int64]:
    """Return the columns widened to `width` dimensions."""
    extra = width - columns.shape[1]
    return np.pad(columns, ((0, 0), (0, extra)), constant_values=fill) if extra else columns


def _check_tiling(
    entries: Sequence[TensorEntry],
    tensor: NDArray[np.int64],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> None:
    """Raise `CommitError` naming the tensors that are not tiled exactly."""
    gaps = untiled([entry.spec.shape for entry in entries], tensor, offsets, lengths)
    if not gaps:
        return
    told = []
    for gap in gaps:
        entry = entries[gap.tensor]
        kind = "a hole" if gap.held < gap.numel else "an overlap"
        told.append(
            f"{full_name(*entry[:2])} {entry.spec}: {kind}, {gap.held} of {gap.numel} elements written"
        )
    raise CommitError(
        f"{len(gaps)} tensors are not covered exactly: {_some(told)}",
        remedy="a framework's claim about who holds what was wrong, or ranks saved different states; "
        "nothing was committed",
    )


def _with_aliases(index: Index, aliases: list[tuple[str, str, str]]) -> Index:
    """Return the index with a second set of rows for every tied name, on the same extents."""
    fresh = [(item, fqn, of) for item, fqn, of in aliases if (item, fqn) not in index.ids]
    if not fresh:
        return index
    if lost := [f"{full_name(item, fqn)} = {of}" for item, fqn, of in fresh if (item, of) not in index.ids]:
        raise CommitError(f"tied names point to tensors that nobody wrote: {_some(lost)}")
    sources = [index.ids[item, of] for item, _, of in fresh]
    entries = list(index.tensors) + [
        TensorEntry(item, fqn, index.tensors[source].spec)
        for (item, fqn, _), source in zip(fresh, sources, strict=True)
    ]
    rows = [np.arange(len(index.tensor))] + [np.arange(index.first[s], index.first[s + 1]) for s in sources]
    numbers = [0, *range(len(index.tensors), len(entries))]
    owner = np.concatenate([np.full(len(r), n) for n, r in zip(numbers, rows, strict=True)])
    owner[: len(index.tensor)] = index.tensor
    row = np.concatenate(rows)
    order_of = {
        number: place
        for place, number in enumerate(sorted(range(len(entries)), key=lambda n: entries[n][:2]))
    }
    tensor = np.array([order_of[n] for n in range(len(entries))], np.int64)[owner]
    order = np.argsort(tensor, kind="stable")
    row = row[order]
    return Index(
        tuple(sorted(entries, key=lambda e: e[:2])),
        index.files,
        tensor[order],
        index.offsets[row],
        index.lengths[row],
        index.file[row],
        index.start[row],
        index.nbytes[row],
    )


def _some(names: Sequence[str]) -> str:
    """Return the first names and how many more there are."""
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
