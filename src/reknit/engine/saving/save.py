"""The save story, in numbered steps: what a rank holds becomes part of a committed checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.comm import base as comm
from reknit.engine import messages
from reknit.engine.memory.elements import all_bits
from reknit.engine.memory.workers import start
from reknit.engine.report import SaveReport
from reknit.engine.saving.claims import blob_files, bring, claims
from reknit.engine.saving.coordinator import Coordinator
from reknit.engine.saving.copies import choose, split
from reknit.engine.saving.file_layout import outline
from reknit.engine.saving.packing import merge_claims
from reknit.engine.saving.receipt import Setting, commit_round, receipt, write_blobs
from reknit.engine.saving.write import write_images
from reknit.monitor.phase import Stopwatch
from reknit.monitor.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.engine.saving.claims import Brought
    from reknit.engine.saving.commit import Destination
    from reknit.engine.saving.write import Written
    from reknit.monitor.phase import Recorder
    from reknit.options import SaveOptions
    from reknit.types.shard import Holdings


FIRST_ROUND = "assign"
"""The round in which a save begins."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """What one rank is given to save."""

    collect: Callable[[], Holdings]
    group: comm.Group
    to: Destination
    options: SaveOptions
    recorder: Recorder

    @property
    def where(self) -> Setting:
        """Where it takes place."""
        return Setting(self.group, self.to, self.options, self.recorder)


class _Assigned(NamedTuple):
    """What a rank brought to this save, and who writes what."""

    answer: messages.Assignment
    brought: Brought
    holdings: Holdings
    sources: list[Any]
    copies: messages.Copies


def save(job: SaveJob, told: list[Written] | None = None) -> SaveReport:
    """Save, and return once the checkpoint is committed; every rank does, or all raise the same error.

    `told` gets the files that this rank wrote.
    """
    coordinator, clock = Coordinator(), Stopwatch()
    with clock.lap(), progress(job.recorder, start, wanted=job.options.progress):
        try:
            # 1 what does this rank hold (local); one round for what no framework can know alone
            assigned = _assign(job, coordinator)
            # 2 plan, 3 stage and digest and write, 4 receipts up; the root commits; the outcome comes down
            outcome, written = commit_round(
                job.where,
                coordinator,
                assigned.answer.write_id,
                lambda written: _write(job, assigned, written),
            )
        except BaseException:
            coordinator.give_up()  # or the root's marker would be there until the next save
            raise
    if told is not None:
        told += written
    return SaveReport(
        path=job.to.storage.url,
        step=job.to.step,
        write_id=assigned.answer.write_id,
        nbytes=sum(file.nbytes for file in written),
        num_files=len(written),
        total_nbytes=outcome.total_nbytes,
        warnings=tuple(outcome.warnings),
        phases=tuple(job.recorder.records),
        blocked_s=clock.seconds,
    )


def _assign(job: SaveJob, coordinator: Coordinator) -> _Assigned:
    """Collect, and let the root decide who writes what no framework could vouch for."""
    collected: list[tuple[Brought, list[Any], messages.Copies]] = []

    def request() -> bytes:
        with job.recorder.phase("collect"):
            brought = bring(job.collect(), job.options)
            sources = all_bits(brought.holdings.shards)
        with job.recorder.phase("digest"):
            copies = choose(brought, job.options.check_replicas, job.group.rank, job.group.size).copies(
                sources
            )
        collected.append((brought, sources, copies))
        return claims(job.group.rank, "", job.to.step, b"", brought.shard_claims(), brought.blobs, copies)

    with job.recorder.phase("assign"):
        answer = comm.round(
            job.group,
            FIRST_ROUND,
            request,
            lambda requests: coordinator.assign(job.to, requests),
            job.options.timeout_s,
            merge=merge_claims,
        )
    assignment = messages.decode(answer, messages.Assignment)
    brought, sources, copies = collected[0]
    holdings = brought.resolved(messages.unpacked(assignment.shard_owners, "i8"))
    return _Assigned(assignment, brought, holdings, sources, copies)


def _write(job: SaveJob, assigned: _Assigned, written: list[Written]) -> bytes:
    """Plan and write this rank's files; return its receipt."""
    rank, answer = job.group.rank, assigned.answer
    with job.recorder.phase("plan"):
        copies = split(assigned.copies, answer.differing, rank, job.options.check_replicas)
        outlined = outline(assigned.holdings, rank, job.options.max_file_nbytes)
        images = outlined.images(answer.write_id, assigned.sources)
    files = blob_files([*assigned.brought.blobs, *copies.blobs], answer.blob_owners, rank)
    places = write_blobs(
        job.to.storage,
        files,
        rank,
        answer.write_id,
        job.recorder,
        written,
        threads=job.options.threads,
    )
    written += write_images(job.to.storage, images, job.options, job.recorder)
    return receipt(job.where, assigned.holdings.items, written, b"", outlined.columns, places, copies)
