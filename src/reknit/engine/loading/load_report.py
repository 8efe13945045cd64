"""The report of one rank: what did a load restore?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.engine.call_reports import LoadReport, other_files, unchecked
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.engine.loading.collect import Collected
    from reknit.engine.loading.load_job import LoadJob, LoadPart
    from reknit.engine.round_messages import LoadDecision


def load_report(
    job: LoadJob,
    collected: Collected,
    parts: Sequence[LoadPart],
    decision: LoadDecision,
) -> LoadReport:
    """Return the report of a successful load."""
    _, wanted, fills, problems, *_ = collected
    checkpoint = parts[-1].reader.checkpoint
    index, manifest = checkpoint.index, checkpoint.manifest
    cut = {name for part in parts for name in _cut(part)}
    full = [fill.name for fill in fills if fill.name not in problems.resized]
    values = [full_name(*key) for key in wanted.blobs + wanted.own]
    return LoadReport(
        path=job.storage.url,
        step=manifest.step,
        metadata=manifest.metadata,
        restored=_unique(full + values),
        missing=tuple(name for name, _ in problems.missing),
        unexpected=tuple(decision.unexpected),
        mismatched=dict(problems.mismatched) | problems.resized,
        left=tuple(decision.left),
        cast=_unique([fill.name for fill in fills if fill.cast]),
        resharded=_unique([name for name in full if name in cut]),
        notes=other_files(manifest) | {full_name(item, fqn): what for item, fqn, what in wanted.notes},
        nbytes_wanted=sum(fill.box.numel * index.tensors[fill.tensor].spec.itemsize for fill in fills),
        nbytes_read=sum(part.reader.nbytes_read for part in parts),
        nbytes_received=sum(part.nbytes_received for part in parts),
        phases=tuple(job.recorder.records),
        unchecked=unchecked(manifest),
        saved_by=_number(manifest.origin.get("world_size")),
    )


def _number(value: object) -> int | None:
    """Return a number that a manifest has, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _cut(part: LoadPart) -> list[str]:
    """Return the names of the boxes that do not consist of exactly one chunk."""
    plan, lengths = part.reader.plan, part.reader.checkpoint.index.lengths
    rows = zip(plan.wanted.tolist(), lengths[plan.chunk].prod(axis=1).tolist(), strict=True)
    whole = {number for number, numel in rows if part.fills[number].box.numel == numel}
    return [fill.name for number, fill in enumerate(part.fills) if number not in whole and fill.box.numel]


def _unique(names: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
