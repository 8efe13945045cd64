"""What does this rank take of a checkpoint, and where does that lie?  The first two rounds of a load."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from reknit.comm import base as comm
from reknit.engine import messages
from reknit.engine.loading.index_part import Reach
from reknit.engine.loading.match import Fill, Problems, match, terms
from reknit.engine.loading.metadata import Handout, Metadata, ReceivedMetadata, hand_out, read_for_all
from reknit.engine.memory.workers import within
from reknit.engine.stored.renaming import Naming
from reknit.format.checksum import digest
from reknit.transforms.apply import Transformed
from reknit.types.shard import full_name
from reknit.types.wanted import matches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from reknit.engine.loading.load import LoadJob
    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.types.manifest import Catalog
    from reknit.types.wanted import Wanted

FIRST_ROUND = "open"
"""The round in which a load begins."""

_Result = TypeVar("_Result")


class Sought(NamedTuple):
    """What a rank takes of a checkpoint, of which it may not know yet where that lies."""

    source: Metadata | ReceivedMetadata
    checkpoint: OpenCheckpoint
    wanted: Wanted
    fills: list[Fill]
    problems: Problems
    reach: Reach
    transformed: Transformed | None
    made: dict[str, bytes]


class Located(NamedTuple):
    """The end of the two rounds: what a rank takes, the root's answer, and on the root what it handed out."""

    sought: Sought
    answer: bytes
    handout: Handout | None

    def found(self, rank: int) -> tuple[OpenCheckpoint, list[int]]:
        """Return the checkpoint with the rows that this rank needs, and all ranks that need the same."""
        answer = messages.decode(self.answer, messages.Answer)
        checkpoint = self.sought.source.with_rows(self.sought.checkpoint, self.sought.reach, answer)
        kinds = messages.unpacked(answer.alike, "i4")
        return checkpoint, np.flatnonzero(kinds == kinds[rank]).tolist()


def locate(job: LoadJob, metadata: Metadata | bytes) -> Located:
    """Look for what this rank wants in what was opened, and learn where that lies."""
    sought: list[Sought] = []
    handouts: list[Handout] = []

    def ask() -> bytes:
        sought.append(_look(job, metadata))
        return messages.encode(_asked(sought[0]))

    def decide(requests: Sequence[bytes]) -> list[bytes]:
        assert isinstance(metadata, Metadata)
        asked = [messages.decode(request, messages.Asked) for request in requests]
        handout = hand_out(metadata.checkpoint, asked)
        handouts.append(handout._replace(left=handout.left + _left_of_made(sought[0], asked, handout.left)))
        return handout.answers

    with job.recorder.phase("locate"):
        answer = comm.round(job.group, "locate", ask, decide, job.options.timeout_s)
    return Located(sought[0], answer, handouts[0] if handouts else None)


def within_deadline(job: LoadJob, what: str, work: Callable[[], _Result]) -> _Result:
    """Ask the storage for something, and wait for it no longer than other ranks would wait for this one."""
    return within(job.options.timeout_s, lambda: f"{what} {job.storage.url}", work)


def open_for_all(job: LoadJob) -> Metadata | bytes:
    """Return what the root read for all ranks, on the root, and this rank's part of it elsewhere."""
    read: list[Metadata] = []

    def decide(requests: Sequence[bytes]) -> list[bytes]:
        wanted = [messages.decode(request, messages.Items) for request in requests]
        metadata = within_deadline(
            job,
            "reading manifest and index of",
            lambda: read_for_all(
                job.storage,
                wanted,
                allow_pickle=job.options.allow_pickle,
                naming=Naming.of(job.options),
                whole_for_all=job.options.verify == "full",
                replicas=job.substitutes,
            ),
        )
        read.append(metadata)
        return metadata.answers

    with job.recorder.phase("open"):
        part = comm.round(job.group, FIRST_ROUND, lambda: _items(job), decide, job.options.timeout_s)
    return read[0] if read else part


def _items(job: LoadJob) -> bytes:
    """Return which items this rank wants; ranks may want different ones."""
    # A lenient pattern that matches a name in the item, whatever it is, covers the absence of them all.
    some = bool(job.options.only)  # then each name that is missing is told by itself
    optional = [item for item in job.items if some or matches(f"{item}/", job.options.lenient)]
    return messages.encode(messages.Items(list(job.items), optional))


def _look(job: LoadJob, metadata: Metadata | bytes) -> Sought:
    """Find out what this rank wants, by the names and shapes that the checkpoint has."""
    options = job.options
    source = (
        metadata
        if isinstance(metadata, Metadata)
        else ReceivedMetadata.of(
            metadata,
            job.storage,
            job.items,
            allow_pickle=options.allow_pickle,
            naming=Naming.of(options),
            replicas=job.substitutes,
        )
    )
    checkpoint = source.checkpoint.of_items(job.items)
    with job.recorder.phase("collect"):
        catalog = checkpoint.catalog(terms(options))
        own, read_ahead = partial(_own, job, catalog), partial(_read_ahead, job, catalog)
        wanted, transformed, made = _wanted(job, replace(catalog, own=own, read_ahead=read_ahead))
        fills, problems = match(checkpoint.index, wanted, options, checkpoint.stored)
    reach = Reach.of(checkpoint.index, fills, wanted)
    return Sought(source, checkpoint, wanted, fills, problems, reach, transformed, made)


def _wanted(job: LoadJob, catalog: Catalog) -> tuple[Wanted, Transformed | None, dict[str, bytes]]:
    """Return what this rank wants, in terms of the checkpoint as it is, and what it has of transforms."""
    if not job.options.transforms:
        return job.want(catalog), None, {}
    transformed = Transformed.of(job.options.transforms, catalog)
    wanted = job.want(transformed.catalog)
    known = {(shard.item, shard.fqn) for shard in wanted.shards} | set(wanted.superseded)
    known.update(alias[:2] for alias in wanted.aliases)
    known.update(entry[:2] for entry in wanted.mismatched)
    return transformed.back(wanted), transformed, messages.bitmaps(transformed.made, known)


def _left_of_made(
    root: Sought, asked: Sequence[messages.Asked], left: Sequence[messages.Name]
) -> list[messages.Name]:
    """Return what transforms make and no rank takes, of tensors that are taken for something else."""
    if root.transformed is None:
        return []
    kinds = [dict(kind) for kind in {tuple(rank.made.items()) for rank in asked}]
    # Rules may make more of an item where they know of others too, and ranks may load different items.
    sizes = {item: {len(kind[item]) for kind in kinds if item in kind} for item in root.made}
    names = [name for name in root.transformed.made if len(sizes[name[0]]) == 1]
    known = set(left)  # and told there
    return [
        name for name in messages.left_over(names, kinds) if known.isdisjoint(root.transformed.origins(name))
    ]


def _own(job: LoadJob, catalog: Catalog, item: str, coordinate: Mapping[str, int]) -> Mapping[str, Any]:
    """Return what the rank with a coordinate saved for itself."""
    return within_deadline(job, f"reading values of {item!r} of", lambda: catalog.own(item, coordinate))


def _read_ahead(job: LoadJob, catalog: Catalog, item: str, coordinates: Sequence[Mapping[str, int]]) -> None:
    """Read what several ranks saved for themselves."""
    within_deadline(job, f"reading values of {item!r} of", lambda: catalog.read_ahead(item, coordinates))


def _asked(sought: Sought) -> messages.Asked:
    """Return what this rank takes, and what it has other names for than the root need tell it about."""
    checkpoint, wanted, fills, problems = sought[1:5]
    index = checkpoint.index
    taken = {index.tensors[fill.tensor][:2] for fill in fills} | {alias[:2] for alias in wanted.aliases}
    taken.update(wanted.superseded)
    mentioned = {name for name, _ in problems.mismatched} | problems.resized.keys()
    refused = [key for key in index.ids if mentioned and full_name(*key) in mentioned and key not in taken]
    boxes = [(fill.tensor, fill.box.offsets, fill.box.lengths) for fill in fills]
    return messages.Asked(
        tensors=messages.bitmaps(index.ids, taken),
        blobs=messages.bitmaps(checkpoint.blob_names(), frozenset((*wanted.blobs, *wanted.superseded))),
        refused=refused,
        boxes=digest(messages.encode(boxes)),
        made=sought.made,
    )
