"""The save story, in numbered steps: what a rank holds becomes part of a committed checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from reknit.comm import base as comm
from reknit.engine import messages
from reknit.engine.commit import decide_assignment, decide_commit, is_committed
from reknit.engine.report import SaveReport
from reknit.engine.staging import bits, contiguous_bytes, stage
from reknit.engine.write import Image, Written, discard, write_bytes, write_images
from reknit.errors import CommError, ReknitError
from reknit.format import paths
from reknit.format.blob_codec import encode_blobs
from reknit.format.checksum import digest
from reknit.format.data_file import HeaderEntry, encode_header, file_metadata
from reknit.planner.resolve import OWN, shard_key
from reknit.planner.save import plan_save
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.engine.commit import Destination
    from reknit.monitor.phase import Recorder
    from reknit.options import SaveOptions
    from reknit.types.plan import FilePlan
    from reknit.types.shard import Holdings, Shard


FIRST_ROUND = "assign"
"""The round in which a save begins."""

_BEFORE_RECEIPT = frozenset({"plan", "stage", "digest", "write"})
"""Phases of a rank's own writing; an error signed with one of them is no lost answer."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """What one rank is given to save."""

    collect: Callable[[], Holdings]
    group: comm.Group
    to: Destination
    options: SaveOptions
    recorder: Recorder


class _Assigned(NamedTuple):
    """Holdings in which everything has an owner: `guessed` are the shards whose owner the root chose."""

    write_id: str
    holdings: Holdings
    guessed: frozenset[int]


class _Blobs(NamedTuple):
    """Values that go to one file."""

    item: str
    coordinate: dict[str, int] | None
    values: dict[str, Any]


def save(job: SaveJob) -> SaveReport:
    """Save, and return once the checkpoint is committed; every rank does, or all raise the same error."""
    # 1 what does this rank hold (local); one round for what no framework can know alone
    assigned = _assign(job)
    written: list[Written] = []
    sent: list[bytes] = []

    def receipt() -> bytes:
        sent.append(_write(job, assigned, written))
        return sent[0]

    try:
        # 2 plan, 3 stage and digest and write, 4 receipts up; the root commits; the outcome comes down
        with job.recorder.phase("commit"):
            answer = comm.round(
                job.group,
                "commit",
                receipt,
                lambda requests: decide_commit(job.to, assigned.write_id, requests),
                job.options.timeout_s,
            )
        outcome = messages.decode(answer, messages.Outcome)
    except BaseException as error:  # Ctrl-C too: what was written is part of a checkpoint, or litter
        committed = _clean_up(job, assigned, written, error, sent=bool(sent))
        if not committed or not isinstance(error, CommError):
            raise
        outcome = messages.Outcome(0, ["the checkpoint is committed, but the root's answer was lost"])
    return SaveReport(
        path=job.to.storage.url,
        step=job.to.step,
        write_id=assigned.write_id,
        nbytes=sum(file.nbytes for file in written),
        num_files=len(written),
        total_nbytes=outcome.total_nbytes,
        warnings=tuple(outcome.warnings),
        phases=tuple(job.recorder.records),
    )


def _clean_up(
    job: SaveJob, assigned: _Assigned, written: list[Written], error: BaseException, *, sent: bool
) -> bool | None:
    """After an error, delete what this rank wrote, unless it is, or may yet become, part of a checkpoint.

    Tells whether the checkpoint is committed all the same; None when nobody can know.
    """
    # The root decides only when it has the receipts of all ranks.
    committed: bool | None = False
    over = not sent or (isinstance(error, ReknitError) and error.phase in _BEFORE_RECEIPT)
    if not over:
        committed = is_committed(job.to.storage, assigned.write_id)
        # A rank that lost the answer, or was interrupted while it waited, cannot know how far the root is.
        told = isinstance(error, ReknitError) or job.group.rank == 0
        over = committed is False and told and not isinstance(error, CommError)
    if over:
        for file in written:
            discard(job.to.storage, file.path)
    return committed


def _assign(job: SaveJob) -> _Assigned:
    """Collect, and let the root decide who writes what no framework could vouch for."""
    collected: list[tuple[Holdings, list[int], list[int]]] = []

    def claims() -> bytes:
        with job.recorder.phase("collect"):
            holdings = job.collect()
            _check_names(holdings)
            guessed = [n for n, shard in enumerate(holdings.shards) if shard.replicas is None]
            shared = [n for n, blob in enumerate(holdings.blobs) if blob.coordinate is None]
            encoded = [
                encode_blobs({blob.fqn: blob.value}, allow_pickle=job.options.allow_pickle, item=blob.item)
                for blob in (holdings.blobs[n] for n in shared)
            ]
        collected.append((holdings, guessed, shared))
        shards = [holdings.shards[n] for n in guessed]
        names = (f"{holdings.blobs[n].item}\0{holdings.blobs[n].fqn}" for n in shared)
        return messages.encode(
            messages.Claims(
                messages.packed([shard_key(s) for s in shards], "u8"),
                messages.packed([s.nbytes for s in shards], "i8"),
                messages.packed([xxhash.xxh3_64_intdigest(name.encode()) for name in names], "u8"),
                messages.packed([digest(data) for data in encoded], "u8"),
            )
        )

    with job.recorder.phase("assign"):
        answer = comm.round(
            job.group,
            FIRST_ROUND,
            claims,
            lambda requests: decide_assignment(job.to, requests),
            job.options.timeout_s,
        )
    assignment = messages.decode(answer, messages.Assignment)
    holdings, guessed, shared = collected[0]
    shards, blobs = list(holdings.shards), list(holdings.blobs)
    for number, owner in zip(guessed, messages.unpacked(assignment.shard_owners, "i8").tolist(), strict=True):
        shards[number] = replace(shards[number], replicas=(owner,))
    kept = [blob for blob in blobs if blob.coordinate is not None]
    for number, owner in zip(shared, messages.unpacked(assignment.blob_owners, "i8").tolist(), strict=True):
        if owner == OWN:
            kept.append(replace(blobs[number], coordinate={"rank": job.group.rank}))
        elif owner == job.group.rank:
            kept.append(blobs[number])
    return _Assigned(
        assignment.write_id, replace(holdings, shards=tuple(shards), blobs=tuple(kept)), frozenset(guessed)
    )


def _check_names(holdings: Holdings) -> None:
    """Raise `StateError` for a name that no file can hold."""
    for item in holdings.items:
        paths.escape_item(item)
    for entries in (holdings.shards, holdings.blobs, holdings.aliases):
        for entry in entries:
            paths.checked_name(entry.fqn, "name")


def _write(job: SaveJob, assigned: _Assigned, written: list[Written]) -> bytes:
    """Plan and write this rank's files; return its receipt."""
    shards = assigned.holdings.shards
    with job.recorder.phase("plan"):
        plan = plan_save(shards, job.group.rank, job.options.max_file_nbytes)
        sources = [bits(shard.data) for shard in shards]
        images = [_image(job, assigned, file, sources) for file in plan.files]
    blobs = _write_blobs(job, assigned, written)
    written += write_images(job.to.storage, images, job.options, job.recorder)
    copies = _copies(job, assigned)
    with job.recorder.phase("digest"):
        digests = [_shard_digest(shards[n], sources[n]) for n in copies]
    receipt = messages.Receipt(
        rank=job.group.rank,
        url=job.to.storage.url,
        items=list(assigned.holdings.items),
        files=[messages.FileReceipt(w.path, w.nbytes, messages.packed(w.digests, "u8")) for w in written],
        columns=_columns(assigned.holdings, plan.files, images),
        blobs=blobs,
        copies=messages.packed([shard_key(shards[n]) for n in copies], "u8"),
        copy_digests=messages.packed(digests, "u8"),
        copy_names=[full_name(shards[n].item, shards[n].fqn) for n in copies],
    )
    return messages.encode(receipt)


def _image(job: SaveJob, assigned: _Assigned, file: FilePlan, sources: Sequence[Any]) -> Image:
    """Return a planned file with its name and its header."""
    shards, rank = assigned.holdings.shards, job.group.rank
    entries = []
    for entry in file.entries:
        shard = shards[entry.shard]
        key = paths.entry_key(shard.fqn, shard.spec, entry.box)
        entries.append(HeaderEntry(key, shard.spec.dtype, entry.box.lengths, entry.start, entry.nbytes))
    here = {shards[entry.shard].fqn for entry in file.entries}
    aliases = {a.fqn: a.of for a in assigned.holdings.aliases if a.item == file.item and a.of in here}
    header = encode_header(entries, file_metadata(assigned.write_id, rank, file.item, aliases))
    path = paths.data_path(file.item, rank, assigned.write_id, file.part)
    return Image(path, header, file.entries, len(header) + file.nbytes, sources)


def _write_blobs(job: SaveJob, assigned: _Assigned, written: list[Written]) -> list[messages.BlobReceipt]:
    """Write this rank's blobs, one file for each item and coordinate."""
    sets: dict[tuple[str, tuple[tuple[str, int], ...] | None], _Blobs] = {}
    for blob in assigned.holdings.blobs:
        place = None if blob.coordinate is None else dict(blob.coordinate)
        key = (blob.item, None if place is None else tuple(sorted(place.items())))
        sets.setdefault(key, _Blobs(blob.item, place, {})).values[blob.fqn] = blob.value
    receipts, own = [], 0
    for blobs in sets.values():
        data = encode_blobs(blobs.values, allow_pickle=job.options.allow_pickle)
        number = None
        if blobs.coordinate is not None:
            number, own = own, own + 1
        path = paths.blob_path(blobs.item, job.group.rank, assigned.write_id, own=number)
        with job.recorder.phase("write", path=f"{job.to.storage.url}/{path}", nbytes=len(data)):
            written.append(write_bytes(job.to.storage, path, data))
        receipts.append(messages.BlobReceipt(blobs.item, path, blobs.coordinate))
    return receipts


def _copies(job: SaveJob, assigned: _Assigned) -> list[int]:
    """Return the shards whose bytes should be compared with those of other ranks."""
    check = job.options.check_replicas
    if check == "off" or job.group.size == 1:
        return []
    shards = assigned.holdings.shards
    return [
        n
        for n, s in enumerate(shards)
        if n in assigned.guessed or (check == "all" and len(s.replicas or ()) > 1)
    ]


def _shard_digest(shard: Shard, source: Any) -> int:
    """Return the digest of a shard's bytes in row-major order."""
    flat = contiguous_bytes(source)
    if flat is None:
        flat = np.empty(shard.nbytes, np.uint8)
        stage(source, 0, shard.box.numel, flat)
    return digest(flat.data)


def _columns(holdings: Holdings, files: Sequence[FilePlan], images: Sequence[Image]) -> messages.Columns:
    """Return the chunks of this rank's files, as columns, and every tensor that it holds, written or not."""
    tensors: dict[tuple[str, str, str, tuple[int, ...]], int] = {}
    for shard in holdings.shards:
        tensors.setdefault((shard.item, shard.fqn, shard.spec.dtype, shard.spec.shape), len(tensors))
    rows: list[tuple[int, tuple[int, ...], tuple[int, ...], int, int, int]] = []
    for number, (file, image) in enumerate(zip(files, images, strict=True)):
        for entry in file.entries:
            shard = holdings.shards[entry.shard]
            tensor = tensors[shard.item, shard.fqn, shard.spec.dtype, shard.spec.shape]
            start = len(image.header) + entry.start
            rows.append((tensor, entry.box.offsets, entry.box.lengths, number, start, entry.nbytes))
    ndim = max([len(row[1]) for row in rows], default=1) or 1
    fill = [(0,) * (ndim - n) for n in range(ndim + 1)], [(1,) * (ndim - n) for n in range(ndim + 1)]
    return messages.Columns(
        tensors=list(tensors),
        files=[image.path for image in images],
        ndim=ndim,
        tensor=messages.packed([row[0] for row in rows], "i8"),
        offsets=messages.packed([row[1] + fill[0][len(row[1])] for row in rows], "i8"),
        lengths=messages.packed([row[2] + fill[1][len(row[2])] for row in rows], "i8"),
        file=messages.packed([row[3] for row in rows], "i8"),
        start=messages.packed([row[4] for row in rows], "i8"),
        nbytes=messages.packed([row[5] for row in rows], "i8"),
        aliases=[(a.item, a.fqn, a.of) for a in holdings.aliases],
    )
