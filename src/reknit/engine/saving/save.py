"""The save story, in numbered steps: what a rank holds becomes part of a committed checkpoint."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from reknit.engine import messages
from reknit.engine.columns import unpacked
from reknit.engine.memory.sources import Sources
from reknit.engine.memory.transfer import Transfer
from reknit.engine.memory.tuning import Tuner
from reknit.engine.report import SaveReport
from reknit.engine.saving.claims import claims, encode_holdings
from reknit.engine.saving.coordinator import Coordinator
from reknit.engine.saving.copies import choose, split
from reknit.engine.saving.file_layout import outline
from reknit.engine.saving.reuse import Committed, Reuse
from reknit.engine.saving.rounds import assign, assign_turn, commit_turn
from reknit.engine.saving.write import PIECE_NBYTES, Outgoing, live, staged, write_files
from reknit.environment import num_threads
from reknit.format.checksum import BLOCK_NBYTES
from reknit.monitor.phase import Stopwatch
from reknit.monitor.progress import progress
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.engine.saving.job import SaveJob
    from reknit.engine.small_files import Written


def save(job: SaveJob, committed: Committed | None = None) -> tuple[SaveReport, list[Written]]:
    """Save, and return once the checkpoint is committed; every rank does, or all raise the same error.

    `committed` is what this rank saved before, of which files may be taken over.  Returns the report, and the
    files that this rank wrote.
    """
    rank, options, recorder = job.group.rank, job.options, job.recorder
    coordinator, clock = Coordinator(), Stopwatch()
    with clock.lap(), progress(recorder, start_thread, wanted=options.progress):
        try:
            with recorder.phase("assign"), assign_turn(job) as turn:
                # 1 what does this rank hold (local)
                with recorder.phase("collect"):
                    encoded = encode_holdings(job.holdings(), options)
                    sources = Sources(shard.memory for shard in encoded.holdings.shards)
                with recorder.phase("digest"):
                    compared = choose(encoded, options.check_replicas, rank, job.group.size)
                    copies = compared.copies(sources)
                # 2 who writes what no framework can know alone (one round)
                mine = messages.RankClaims(
                    "",
                    job.step,
                    b"",
                    encoded.shard_claims(),
                    encoded.blobs,
                    copies,
                    encoded.witnesses,
                    len(options.promotions),
                )
                assigned = assign(turn, coordinator, job, claims(rank, mine))
            with commit_turn(job, coordinator, assigned.write_id) as commit:
                # 3 plan (local)
                with recorder.phase("plan"):
                    differing = split(copies, assigned.differing, rank, options.check_replicas)
                    holdings = encoded.resolved(unpacked(assigned.shard_owners, "i8"))
                    outlined = outline(holdings, rank, options.max_file_nbytes)
                    images = outlined.images(assigned.write_id, sources)
                # 4 stage, digest and write, but for what the last checkpoint has
                files = [Outgoing(image.path, image.nbytes) for image in images]
                reuse = Reuse(job, committed or Committed(), assigned.write_id, files, outlined.frozen)
                alone = job.group.size == 1
                with Transfer(sources.on_devices, "what is saved", options.timeout_s) as transfer:
                    fetch = live(images, transfer)
                    left = reuse.take_over(fetch, "stage", commit.written, arenas=transfer.arenas)
                    outgoing = [files[n] for n in left]
                    threads, piece_nbytes = num_threads(options.threads), _piece_nbytes(outgoing)
                    commit.written += write_files(
                        job.storage,
                        outgoing,
                        staged([images[n] for n in left], transfer),
                        tuner=Tuner(threads=threads, piece_nbytes=piece_nbytes),
                        recorder=recorder,
                        phase="stage",
                        budget_nbytes=options.inflight_nbytes,
                        arenas=transfer.arenas,
                        meanwhile=partial(coordinator.encode_ahead, outlined.columns) if alone else None,
                    )
                # 5 write values; receipts up; the root commits; the outcome comes down (one round)
                chunks = None if alone else outlined.columns
                commit.commit(mine, assigned, differing, holdings.items, chunks)
        except BaseException:
            coordinator.give_up()  # or the root's marker would be there until the next save
            raise
    reuse.remember(commit.written)
    report = SaveReport(
        path=job.storage.url,
        step=job.step,
        write_id=assigned.write_id,
        nbytes=sum(file.nbytes for file in commit.written),
        num_files=len(commit.written),
        reused_nbytes=reuse.nbytes,
        total_nbytes=commit.outcome.total_nbytes,
        warnings=tuple(commit.outcome.warnings),
        phases=tuple(recorder.records),
        blocked_s=clock.seconds,
    )
    return report, commit.written


def _piece_nbytes(files: Sequence[Outgoing]) -> int:
    """Return what a worker copies and writes at once: of little less, so that the disk soon has something."""
    return PIECE_NBYTES if sum(file.nbytes for file in files) > 2 * PIECE_NBYTES else BLOCK_NBYTES
