"""What did a load restore?  The report of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.engine.report import LoadReport
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from reknit.engine.loading.collect import Collected
    from reknit.engine.loading.job import LoadJob
    from reknit.engine.loading.read import RangeReader
    from reknit.engine.messages import LoadDecision


def load_report(
    job: LoadJob,
    collected: Collected,
    reader: RangeReader,
    decision: LoadDecision,
    nbytes_received: int,
) -> LoadReport:
    """Return the report of a load that ended well."""
    _, wanted, fills, problems, *_ = collected
    index, plan, manifest = reader.checkpoint.index, reader.plan, reader.checkpoint.manifest
    rows = zip(plan.wanted.tolist(), index.lengths[plan.chunk].prod(axis=1).tolist(), strict=True)
    whole = {number for number, numel in rows if fills[number].box.numel == numel}
    full = [(number, fill) for number, fill in enumerate(fills) if fill.name not in problems.resized]
    values = [full_name(*key) for key in wanted.blobs + wanted.own]
    return LoadReport(
        path=job.storage.url,
        step=manifest.step,
        metadata=manifest.metadata,
        restored=_unique([fill.name for _, fill in full] + values),
        missing=tuple(name for name, _ in problems.missing),
        unexpected=tuple(decision.unexpected),
        mismatched=dict(problems.mismatched) | problems.resized,
        left=tuple(decision.left),
        cast=_unique([fill.name for fill in fills if fill.cast]),
        resharded=_unique([fill.name for n, fill in full if n not in whole and fill.box.numel]),
        notes={full_name(item, fqn): what for item, fqn, what in wanted.notes},
        nbytes_wanted=sum(fill.box.numel * index.tensors[fill.tensor].spec.itemsize for fill in fills),
        nbytes_read=reader.nbytes_read,
        nbytes_received=nbytes_received,
        phases=tuple(job.recorder.records),
    )


def _unique(names: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
