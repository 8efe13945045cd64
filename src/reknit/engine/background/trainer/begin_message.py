"""The messages with which a trainer begins a save at its agent, and the values that both map."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from reknit.engine import round_messages
from reknit.engine.background import agent_messages as say
from reknit.monitor.sinks.choosing import everywhere
from reknit.options.fields import names_in
from reknit.types.shard import Encoded

if TYPE_CHECKING:
    from reknit.engine.background.trainer.agent_session import AgentSession, Plan
    from reknit.engine.background.trainer.trainer_save import TrainerSave
    from reknit.engine.memory.arena_pool import Lease
    from reknit.engine.saving.claims import EncodedHoldings
    from reknit.engine.saving.rank_part import RankPart
    from reknit.types.shard import Blob, SharedFile


def begin_message(part: RankPart, session: AgentSession, save: TrainerSave, *, claimed: bool) -> say.Begin:
    """Return the first message about a save, which on the root has the values for the manifest.

    With `claimed` the root has the claims of this rank under its layout from an earlier save.
    """
    job, encoded = part.job, part.encoded
    claims = part.claims(save.write_id, part.layout, shards=not claimed)
    claims.blobs = [
        round_messages.EncodedBlob(blob.item, blob.key, blob.coordinate, b"")
        if _mapped(saved, blob)
        else blob
        for saved, blob in zip(encoded.holdings.blobs, encoded.blobs, strict=True)
    ]
    root = job.group.rank == 0
    extra = {"origin": job.origin if root else {}, "metadata": job.metadata if root else {}}
    return say.Begin(
        number=save.number,
        url=job.url,
        factory=job.factory,
        overwrite=job.overwrite,
        options={name: getattr(job.options, name) for name in names_in(job.options, "agent")}
        | {"events": everywhere(job.options.events)},
        extra=json.dumps(extra, default=dict).encode(),
        claims=claims,
        promote_to=list(job.promote_to),
        coordinate=job.recorder.coordinate,
        record=None if job.run is None else job.run.record,
        sends_events=not all(sink.everywhere for sink in job.recorder.sinks),
        circumstances=session.new_circumstances(save, job.options.timeout_s),
    )


def planned_message(part: RankPart, save: TrainerSave, plan: Plan, lease: Lease) -> say.Planned:
    """Return the message about the files of a save, and the arena that has their bytes."""
    return say.Planned(
        number=save.number,
        items=list(part.encoded.holdings.items),
        files=plan.outline.listed,
        columns=None if plan.committed else plan.outline.columns,
        arena=lease.number,
        ring=lease.nbytes,
    )


def lend_values(session: AgentSession, save: TrainerSave, encoded: EncodedHoldings) -> None:
    """Send the agent the encoded values in shared memory, for it to map."""
    files: dict[SharedFile, list[tuple[int, int, int]]] = {}
    for number, (blob, one) in enumerate(zip(encoded.holdings.blobs, encoded.blobs, strict=True)):
        value = _mapped(blob, one)
        if value is not None and value.file is not None:
            end = value.at + len(value.memory)
            files.setdefault(value.file, []).append((number, end - len(one.data), end))
    for file, places in files.items():
        session.link.send(say.Lend(save.number, file.nbytes, places), file.fd)


def _mapped(blob: Blob, encoded: round_messages.EncodedBlob) -> Encoded | None:
    """Return the value if the agent can map it instead of receiving a copy."""
    value = blob.value
    in_place = isinstance(value, Encoded) and value.file is not None and not isinstance(encoded.data, bytes)
    return value if in_place else None
