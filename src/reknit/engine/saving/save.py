"""The save story, in numbered steps: the holdings of a rank become part of a committed checkpoint."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from xxhash import xxh3_128_digest

from reknit.engine.memory.devices import Transfer
from reknit.engine.memory.images import live, staged
from reknit.engine.memory.write import PIECE_NBYTES, Tuner, write_files
from reknit.engine.reports import SaveReport
from reknit.engine.saving.coordinator import PLANS_KEPT, Coordinator, keep_latest
from reknit.engine.saving.here import assign, assign_turn, commit_turn
from reknit.engine.saving.part import RankPart
from reknit.engine.saving.reuse import Committed, Reuse
from reknit.environment import num_threads
from reknit.events.phase import Stopwatch
from reknit.events.progress import progress
from reknit.format.checksum import BLOCK_NBYTES
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.engine.memory.write import Outgoing, Written
    from reknit.engine.reports import SaveTotals
    from reknit.engine.saving.layout import Outline
    from reknit.engine.saving.part import Chosen
    from reknit.engine.saving.task import SaveJob
    from reknit.options import SaveOptions


class EarlierSaves:
    """The results of earlier saves of this rank in one group, on the root also the plans of all ranks.

    The files of `committed` may be taken over.  The root has the claims of this rank under each layout in
    `claimed`, and its chunks under each plan in `planned`.
    """

    def __init__(self) -> None:
        self.committed = Committed()
        self.coordinator = Coordinator(plans_follow=True)
        self.claimed: dict[bytes, dict[str, Chosen]] = {}
        self.planned: dict[bytes, Outline] = {}

    def keep_plans(self, layout: bytes, chosen: dict[str, Chosen], plan: bytes, outlined: Outline) -> None:
        """Keep the claims of this rank under a layout, and its chunks under a plan."""
        keep_latest(self.claimed, layout, chosen, PLANS_KEPT)
        keep_latest(self.planned, plan, outlined, PLANS_KEPT)

    def forget_plans(self) -> None:
        """Drop the plans of this rank after an error, as they may be wrong or unknown to the root."""
        self.claimed.clear()
        self.planned.clear()


def save(job: SaveJob, earlier: EarlierSaves | None = None) -> tuple[SaveReport, list[Written]]:
    """Save, and return the report and this rank's files once the checkpoint is committed.

    All ranks return, or all raise the same error.
    """
    options, recorder, alone = job.options, job.recorder, job.group.size == 1
    earlier, clock = earlier or EarlierSaves(), Stopwatch()
    # The index of a rank alone is encoded while it writes, and its plans are kept with its holdings.
    coordinator = Coordinator() if alone else earlier.coordinator
    with clock.lap(), progress(recorder, start_thread, wanted=options.progress):
        try:
            with recorder.phase("assign"), assign_turn(job) as turn:
                # 1 collect the holdings of this rank, and digest copies of them (local)
                part = RankPart(job)
                layout = b"" if alone else part.layout
                chosen = earlier.claimed.get(layout)
                compared = part.compare(None if chosen is None else chosen.get(options.check_replicas))
                # 2 assign: owners for data whose holders no framework records (one round)
                claimed = part.claims(plan=layout, shards=chosen is None)
                assigned = assign(turn, coordinator, job, claimed, earlier.committed)
            with commit_turn(job, coordinator, claimed, assigned) as commit:
                # 3 plan (local)
                with recorder.phase("plan"):
                    owners = assigned.shard_owners
                    # 16 bytes stand for the files of a layout under these owners of guessed shards.
                    commit.plan = plan = xxh3_128_digest(layout + owners) if layout and owners else layout
                    known = earlier.planned.get(plan)
                    outlined = known or part.outline(owners)
                    images = outlined.images(assigned.write_id, part.sources)
                # 4 stage, digest and write, except files that the last checkpoint has
                reuse = Reuse(job, earlier.committed, assigned.write_id, outlined.listed)
                with Transfer(part.sources.on_devices, "what is saved", options.timeout_s) as transfer:
                    commit.written += write_files(
                        job.storage,
                        reuse.files,
                        staged(images, transfer),
                        tuner=_tuner(options, reuse.files),
                        recorder=recorder,
                        phase="stage",
                        budget_nbytes=options.inflight_nbytes,
                        arenas=transfer.arenas,
                        meanwhile=_meanwhile(job, coordinator, outlined),
                        earlier=reuse,
                        look=live(images, transfer),
                    )
                # 5 write values; receipts up; the root commits; the outcome comes down (one round)
                commit.commit(part.encoded.holdings.items, None if alone or known else outlined.columns)
        except BaseException:
            coordinator.give_up()  # or the marker of the root would stay until the next save
            earlier.forget_plans()
            raise
    if not alone:
        by_check = {**(chosen or {}), options.check_replicas: compared}
        earlier.keep_plans(layout, by_check, plan, outlined)
    reuse.remember(commit.written)
    totals = commit.totals(reuse.nbytes)
    return _report(job, assigned.write_id, clock.seconds, totals), commit.written


def _report(job: SaveJob, write_id: str, blocked_s: float, totals: SaveTotals) -> SaveReport:
    return SaveReport(
        path=job.storage.url,
        step=job.step,
        write_id=write_id,
        phases=tuple(job.recorder.records),
        blocked_s=blocked_s,
        **totals._asdict(),
    )


def _tuner(options: SaveOptions, files: Sequence[Outgoing]) -> Tuner:
    """Return the settings of the write; pieces of a small save are smaller, so that writing begins early."""
    is_small = sum([file.nbytes for file in files]) <= 2 * PIECE_NBYTES
    return Tuner(
        threads=num_threads(options.threads), piece_nbytes=BLOCK_NBYTES if is_small else PIECE_NBYTES
    )


def _meanwhile(job: SaveJob, coordinator: Coordinator, outlined: Outline) -> Callable[[], None] | None:
    """Return the work for the index that the root can do while its files are written."""
    if job.group.size == 1:
        return partial(coordinator.encode_ahead, outlined.columns)
    return coordinator.import_ahead if job.group.rank == 0 else None
