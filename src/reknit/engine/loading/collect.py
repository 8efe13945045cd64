"""The entries that this rank's target takes, chosen by names and shapes, with checks of shared ones."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from reknit import plugins
from reknit.engine import messages
from reknit.engine.loading.contents import Reach
from reknit.engine.loading.match import Fill, Problems, match, strict_patterns, terms
from reknit.engine.loading.read import RangeReader
from reknit.engine.stored.renaming import split_transforms
from reknit.format.checksum import digest
from reknit.planner.columns import Name, bitmaps, left_over
from reknit.types.box import Box, flat_range_boxes
from reknit.types.dtype import numpy_dtype
from reknit.types.shard import full_name
from reknit.types.wanted import matches, selects

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from reknit.engine.loading.task import LoadTask
    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.transforms.apply import Transformed
    from reknit.transforms.quantized import Quantized
    from reknit.types.manifest import Catalog, Index, Manifest
    from reknit.types.small import Unread
    from reknit.types.wanted import Wanted


BATCH_NBYTES = 64 << 20
"""Bytes of each of two tensors that are compared at a time."""


class _TiedPair(Struct, frozen=True):
    """A wanted part of a tensor, and the tensor that is tied to it, by their numbers."""

    alias: int
    tied: int
    box: Box


def unequal(
    task: LoadTask, checkpoint: OpenCheckpoint, wanted: Wanted, fills: Sequence[Fill]
) -> list[tuple[str, str]]:
    """Return (name, reason) of tensors that are tied in the target and differ in the checkpoint.

    It reads only the wanted parts of tensors that are stored twice.
    """
    index, options = checkpoint.index, task.options
    found: dict[str, str] = {}
    for batch in _batches(index, _pairs(index, wanted, fills)):
        boxes = [(tensor, pair.box) for pair in batch for tensor in (pair.alias, pair.tied)]
        dtypes = [numpy_dtype(index.tensors[tensor].spec.dtype) for tensor, _ in boxes]
        arrays = [np.empty(box.lengths, dtype) for (_, box), dtype in zip(boxes, dtypes, strict=True)]
        targets = [(*box, array) for box, array in zip(boxes, arrays, strict=True)]
        RangeReader(checkpoint, targets, options).run(task.recorder, options.timeout_s)
        for pair, alias, tied in zip(batch, arrays[::2], arrays[1::2], strict=True):
            if alias.tobytes() != tied.tobytes():
                name, of = (full_name(*index.tensors[t][:2]) for t in (pair.alias, pair.tied))
                values = f" ({alias.item()} and {tied.item()})" if alias.size == 1 else ""
                found[name] = (
                    f"it differs from {of} in the checkpoint{values}, and is one with it in the target"
                )
    return list(found.items())


def _batches(index: Index, pairs: Iterator[_TiedPair]) -> Iterator[list[_TiedPair]]:
    """Yield pairs in lists of about `BATCH_NBYTES` of each of the two tensors."""
    batch: list[_TiedPair] = []
    nbytes = 0
    for pair in pairs:
        batch.append(pair)
        nbytes += pair.box.numel * index.tensors[pair.alias].spec.itemsize
        if nbytes >= BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _pairs(index: Index, wanted: Wanted, fills: Sequence[Fill]) -> Iterator[_TiedPair]:
    """Yield the tensors to be compared, in parts that fit in memory."""
    apart: dict[int, list[int]] = {}
    for item, fqn, of_item, of in wanted.aliases:
        alias, tied = index.ids[item, fqn], index.ids.get((of_item, of))
        if tied is not None and not _is_one(index, alias, tied):
            apart.setdefault(tied, []).append(alias)
    for fill in fills if apart else ():
        for alias in apart.get(fill.tensor, ()):
            step = max(BATCH_NBYTES // index.tensors[alias].spec.itemsize, 1)
            for first in range(0, fill.box.numel, step):
                numel = min(step, fill.box.numel - first)
                for part in flat_range_boxes(fill.box.lengths, first, numel):
                    yield _TiedPair(alias, fill.tensor, part.shifted(fill.box.offsets))


def _is_one(index: Index, alias: int, tied: int) -> bool:
    """Return whether two tensors share the same bytes of the same files."""
    ours, theirs = (
        np.stack((index.file[rows], index.start[rows]))
        for rows in (slice(*index.first[t : t + 2]) for t in (alias, tied))
    )
    return np.array_equal(ours, theirs)


class Sought(Struct, frozen=True):
    """The entries that a rank takes of a checkpoint.

    `checkpoint` has the items of the rank; except on the root, its index has no rows yet.  With transforms,
    `made` has `bitmaps` of the tensors that transforms make and the rank uses.
    """

    checkpoint: OpenCheckpoint
    wanted: Wanted
    fills: list[Fill]
    problems: Problems
    reach: Reach
    transformed: Transformed | None
    made: dict[str, bytes]

    def request(self) -> messages.Asked:
        """Return the message that asks the root for the rows of the index."""
        index, wanted, problems = self.checkpoint.index, self.wanted, self.problems
        taken = {index.tensors[fill.tensor][:2] for fill in self.fills}
        taken |= {alias[:2] for alias in wanted.aliases} | set(wanted.superseded)
        mentioned = {name for name, *_ in (*problems.mismatched, *problems.refused)}
        mentioned |= problems.resized.keys()
        if self.transformed is not None:
            for entry in wanted.mismatched:
                for tensors in (True, False):
                    origins = self.transformed.origins(entry[:2], tensors=tensors)
                    mentioned.update(full_name(*origin) for origin in origins)
        values = frozenset((*wanted.blobs, *wanted.superseded))
        refused = [
            key
            for key in (*index.ids, *self.checkpoint.blob_names())
            if mentioned and full_name(*key) in mentioned and key not in taken and key not in values
        ]
        boxes = [(fill.tensor, fill.box.offsets, fill.box.lengths) for fill in self.fills]
        return messages.Asked(
            tensors=bitmaps(index.ids, taken),
            blobs=bitmaps(self.checkpoint.blob_names(), values),
            refused=refused,
            boxes=digest(messages.encode(boxes)),
            made=self.made,
        )


def request_items(task: LoadTask) -> messages.Items:
    """Return the message with the items that this rank loads; other ranks may load other items."""
    # With `only`, each missing name is reported by itself.  Otherwise a lenient pattern that matches any name
    # in the item also permits a missing item.
    lenient, each_name = task.lenient, bool(task.options.only)
    optional = [item for item in task.items if each_name or selects(f"{item}/", lenient)]
    return messages.Items(list(task.items), optional)


def seek(task: LoadTask, checkpoint: OpenCheckpoint) -> Sought:
    """Return the entries that this rank takes, by the names and shapes in the checkpoint."""
    options, part = task.options, checkpoint.of_items(task.items)
    with task.recorder.phase("collect"):
        catalog = part.catalog(terms(options, strict_patterns(task.lenient)))
        catalog = replace(
            catalog, own=partial(_own, task, catalog), read_ahead=partial(_read_ahead, task, catalog)
        )
        _, rules = split_transforms(options)
        if not rules and (program := _program(part.manifest)):
            rules = plugins.find("reknit.formats", "any-rules")(program, task.targets.values())
        if rules:
            from reknit.transforms.apply import Transformed

            transformed = Transformed.of(rules, catalog)
            wanted = task.wanted(transformed.catalog)
            made = bitmaps(transformed.made, _known(wanted))
            wanted = transformed.back(wanted)
        else:
            wanted, transformed, made = task.wanted(catalog), None, {}
        task.recorder.coordinate = dict(wanted.coordinate)
        fills, problems = match(part.index, wanted, options, part.stored)
        if wanted.unlike:
            problems.refuse(_quantized(part, wanted, transformed))
        if part.manifest.unread:
            _name_unread(problems, part.manifest.unread, task)
    return Sought(
        checkpoint=part,
        wanted=wanted,
        fills=fills,
        problems=problems,
        reach=Reach.of(part.index, fills, wanted),
        transformed=transformed,
        made=made,
    )


def _program(manifest: Manifest) -> str:
    """Return the program that saved the files of a checkpoint, or an import took them from; else nothing."""
    if manifest.other is not None:
        return manifest.other.kind
    return str(manifest.origin.get("imported", ""))


def unused_made_names(root: Sought, asked: Sequence[messages.Asked], left: Sequence[Name]) -> list[Name]:
    """Return the names that transforms make and no rank takes, without names whose sources are in `left`."""
    if root.transformed is None:
        return []
    kinds = [dict(kind) for kind in {tuple(rank.made.items()) for rank in asked}]
    # Ranks may load different items, and rules may make more names on a rank that loads more items.
    sizes = {item: {len(kind[item]) for kind in kinds if item in kind} for item in root.made}
    names = [name for name in root.transformed.made if len(sizes[name[0]]) == 1]
    known = set(left)
    return [name for name in left_over(names, kinds) if known.isdisjoint(root.transformed.origins(name))]


def _known(wanted: Wanted) -> set[Name]:
    """Return the names that a target uses."""
    known = {(shard.item, shard.fqn) for shard in wanted.shards} | set(wanted.superseded)
    known.update(alias[:2] for alias in wanted.aliases)
    known.update(entry[:2] for entry in wanted.mismatched)
    return known


def _quantized(part: OpenCheckpoint, wanted: Wanted, transformed: Transformed | None) -> dict[str, Quantized]:
    """Return the wanted tensors, by name, whose values the checkpoint has in quantized form.

    Their names before and after each rule count, so that no rule hides a scale.
    """
    from reknit.transforms.quantized import quantized  # most loads convert nothing

    entries = [(full_name(*entry[:2]), entry.spec.dtype) for entry in part.index.tensors]
    saved = dict(entries) | {part.stored[name]: dtype for name, dtype in entries if name in part.stored}
    if transformed is not None:
        for item, tensors in transformed.catalog.tensors.items():
            saved.update((full_name(item, fqn), spec.dtype) for fqn, spec in tensors.items())
    labels: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    for item, fqn, dtype in wanted.unlike:
        sources = [] if transformed is None else transformed.origins((item, fqn))
        names = [full_name(*source) for source in ((item, fqn), *sources)]
        for name in (*names, *(part.stored[name] for name in names if name in part.stored)):
            labels.setdefault(name, names[0])
            dtypes.setdefault(name, dtype)
    known = dict.fromkeys((*saved, *(full_name(*name) for name in part.blob_names()), *part.offered))
    return {labels[name]: found for name, found in quantized(dtypes, saved, known)}


def _name_unread(problems: Problems, unread: Sequence[Unread], task: LoadTask) -> None:
    """Add the entries of the rank's items that reknit cannot read, unless an option leaves them out."""
    only = task.options.only

    def permitted(name: str) -> bool:
        return (bool(only) and not matches(name, only)) or selects(name, task.lenient)

    problems.name_unread([entry for entry in unread if entry.item in task.items], permitted)


def _own(task: LoadTask, catalog: Catalog, item: str, coordinate: Mapping[str, int]) -> Mapping[str, Any]:
    """Return the values that the rank with a coordinate saved for itself."""
    return task.within_deadline(f"reading values of {item!r} of", lambda: catalog.own(item, coordinate))


def _read_ahead(
    task: LoadTask, catalog: Catalog, item: str, coordinates: Sequence[Mapping[str, int]]
) -> None:
    """Read the values that several ranks saved for themselves."""
    task.within_deadline(f"reading values of {item!r} of", lambda: catalog.read_ahead(item, coordinates))
