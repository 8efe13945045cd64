"""Which entries of a checkpoint does the target of this rank take?  Its names and shapes decide."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from reknit.engine import round_messages
from reknit.engine.loading.index_part import Reach
from reknit.engine.loading.match import Fill, Problems, match, strict_patterns, terms
from reknit.engine.packed_columns import Name, bitmaps, left_over
from reknit.engine.stored.renaming import split_transforms
from reknit.format.checksum import digest
from reknit.types.shard import full_name
from reknit.types.wanted import matches, selects

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from reknit.engine.loading.load_job import LoadJob
    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.transforms.apply import Transformed
    from reknit.transforms.quantized import Quantized
    from reknit.types.foreign.other_format import Unread
    from reknit.types.manifest import Catalog, Manifest
    from reknit.types.wanted import Wanted


class Collected(NamedTuple):
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

    def request(self) -> round_messages.Asked:
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
        return round_messages.Asked(
            tensors=bitmaps(index.ids, taken),
            blobs=bitmaps(self.checkpoint.blob_names(), values),
            refused=refused,
            boxes=digest(round_messages.encode(boxes)),
            made=self.made,
        )


def request_items(job: LoadJob) -> round_messages.Items:
    """Return the message with the items that this rank loads; other ranks may load other items."""
    # With `only`, each missing name is reported by itself.  Otherwise a lenient pattern that matches any name
    # in the item also permits a missing item.
    lenient, each_name = job.lenient, bool(job.options.only)
    optional = [item for item in job.items if each_name or selects(f"{item}/", lenient)]
    return round_messages.Items(list(job.items), optional)


def collect(job: LoadJob, checkpoint: OpenCheckpoint) -> Collected:
    """Return the entries that this rank takes, by the names and shapes in the checkpoint."""
    options, part = job.options, checkpoint.of_items(job.items)
    with job.recorder.phase("collect"):
        catalog = part.catalog(terms(options, strict_patterns(job.lenient)))
        catalog = replace(
            catalog, own=partial(_own, job, catalog), read_ahead=partial(_read_ahead, job, catalog)
        )
        _, rules = split_transforms(options)
        if not rules and job.rules is not None and (program := _program(part.manifest)):
            rules = job.rules(program)
        if rules:
            from reknit.transforms.apply import Transformed

            transformed = Transformed.of(rules, catalog)
            wanted = job.want(transformed.catalog)
            made = bitmaps(transformed.made, _known(wanted))
            wanted = transformed.back(wanted)
        else:
            wanted, transformed, made = job.want(catalog), None, {}
        job.recorder.coordinate = dict(wanted.coordinate)
        fills, problems = match(part.index, wanted, options, part.stored)
        if wanted.unlike:
            problems.refuse(_quantized(part, wanted, transformed))
        if part.manifest.unread:
            _name_unread(problems, part.manifest.unread, job)
    return Collected(
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


def left_of_made(root: Collected, asked: Sequence[round_messages.Asked], left: Sequence[Name]) -> list[Name]:
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


def _name_unread(problems: Problems, unread: Sequence[Unread], job: LoadJob) -> None:
    """Add the entries of the rank's items that reknit cannot read, unless an option leaves them out."""
    only = job.options.only

    def permitted(name: str) -> bool:
        return (bool(only) and not matches(name, only)) or selects(name, job.lenient)

    problems.name_unread([entry for entry in unread if entry.item in job.items], permitted)


def _own(job: LoadJob, catalog: Catalog, item: str, coordinate: Mapping[str, int]) -> Mapping[str, Any]:
    """Return the values that the rank with a coordinate saved for itself."""
    return job.within_deadline(f"reading values of {item!r} of", lambda: catalog.own(item, coordinate))


def _read_ahead(job: LoadJob, catalog: Catalog, item: str, coordinates: Sequence[Mapping[str, int]]) -> None:
    """Read the values that several ranks saved for themselves."""
    job.within_deadline(f"reading values of {item!r} of", lambda: catalog.read_ahead(item, coordinates))
