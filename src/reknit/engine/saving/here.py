"""The two rounds of a save on every rank: assign and commit."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reknit.comm import group as comm
from reknit.engine import messages
from reknit.engine.memory.write import Written, discard
from reknit.engine.reports import SaveTotals
from reknit.engine.saving.coordinator import receipt, write_blobs
from reknit.engine.saving.packing import merge_claims, merge_receipts
from reknit.engine.saving.part import EQUAL, blob_files, claims, split
from reknit.engine.stored.commit import UNSENT, clear_own_host, fate_of
from reknit.errors import ReknitError
from reknit.format import paths

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.engine.saving.coordinator import Coordinator
    from reknit.engine.saving.reuse import Committed
    from reknit.engine.saving.task import SaveJob
    from reknit.engine.stored.commit import Fate

ASSIGN = "assign"
"""The round in which a save begins."""

COMMIT = "commit"
"""The round in which a save ends."""


def assign_turn(job: SaveJob, *, subject: str = "") -> comm.Turn:
    """Return the `with` block in which a rank makes its `claims` and passes them to `assign`."""
    return comm.turn(
        job.group, ASSIGN, job.options.timeout_s, merge=merge_claims, subject=subject, opens=True
    )


def assign(
    turn: comm.Turn,
    coordinator: Coordinator,
    job: SaveJob,
    claimed: messages.RankClaims,
    committed: Committed | None = None,
) -> messages.Assignment:
    """Send the claims of this rank to the root, and return its answer; see `Coordinator.assign`.

    Without `committed`, only the assignment is made, and no save begins.
    """
    mine, answers = claims(job.group.rank, claimed), None
    first = committed is not None and committed.beside(job.storage) is None
    requests = turn.gather(mine)
    if requests is not None:
        answers = coordinator.assign(None if committed is None else job, requests, first=first)
    assigned = turn.give(answers, messages.Assignment)
    if committed is not None:
        committed.keep_found(job.storage, assigned.earlier)
    return assigned


class CommitTurn:
    """The files that this rank wrote, and its part in the round to commit; see `commit_turn`.

    The writer of data files adds each to `written` as soon as storage has it; values are written last.
    """

    def __init__(
        self,
        job: SaveJob,
        coordinator: Coordinator,
        claimed: messages.RankClaims,
        assigned: messages.Assignment,
    ) -> None:
        self.job, self.write_id = job, assigned.write_id
        self._claimed, self._assigned, self._copies = claimed, assigned, EQUAL
        self.plan = claimed.plan
        """The plan of the files, which the root keeps their chunks under."""
        self.written: list[Written] = []
        self.outcome = messages.CommitOutcome(0, [])
        self.sent = False
        """Whether the receipt may be on its way to the root."""
        self.turn = comm.turn(
            job.group, COMMIT, job.options.timeout_s, merge=merge_receipts, subject=self.write_id
        )
        self._coordinator = coordinator

    def split_copies(self) -> None:
        """Decide about differing copies.  Raises `StateError` for a copy that this rank cannot keep."""
        differing, check = self._assigned.differing, self.job.options.check_replicas
        if differing:
            with self.job.recorder.phase("plan"):
                self._copies = split(self._claimed.copies, differing, self.job.group.rank, check)

    def commit(self, items: Sequence[str], columns: messages.ArrayColumns | None) -> None:
        """Write the values of this rank, send the `receipt` for all `written`, and keep the outcome."""
        claimed, copies = self._claimed, self._copies
        blobs = blob_files([*claimed.blobs, *copies.blobs], self._assigned.blob_owners, self.job.group.rank)
        places = write_blobs(self.job, blobs, self.write_id, self.written)
        mine = receipt(
            self.job,
            items,
            self.written,
            plan=self.plan,
            columns=columns,
            places=places,
            copies=copies,
        )
        self.sent = True
        requests = self.turn.gather(mine)
        outcome = None if requests is None else self._coordinator.commit(self.job, requests)
        self.outcome = self.turn.give_all(outcome, messages.CommitOutcome)

    def totals(self, reused_nbytes: int) -> SaveTotals:
        """Return the figures of a committed save."""
        return SaveTotals(
            nbytes=sum(file.nbytes for file in self.written),
            num_files=len(self.written),
            total_nbytes=self.outcome.total_nbytes,
            reused_nbytes=reused_nbytes,
            warnings=tuple(self.outcome.warnings),
        )

    def clean_up(self, error: BaseException) -> Fate:
        """Delete the files of this rank, unless they are part of a checkpoint, or may become so."""
        storage, is_root = self.job.storage, self.job.group.rank == 0
        # An error of another phase is from a rank that sent no receipt, so it is not a lost answer.
        sent = self.sent and (not isinstance(error, ReknitError) or error.phase in (None, COMMIT))
        # The root commits only after it has the receipts of all ranks.
        fate = fate_of(storage, self.write_id, error, sent=True, is_root=is_root) if sent else UNSENT
        if fate.litter:
            index = [paths.index_path(self.write_id)] if is_root else []
            for path in [*(file.path for file in self.written), *index]:
                discard(storage, path)
        return fate


@contextmanager
def commit_turn(
    job: SaveJob,
    coordinator: Coordinator,
    claimed: messages.RankClaims,
    assigned: messages.Assignment,
) -> Iterator[CommitTurn]:
    """Return the `with` block in which a rank writes its files, and that ends with `CommitTurn.commit`.

    After an error none of its files is left, unless they may still become part of a checkpoint.
    """
    mine = CommitTurn(job, coordinator, claimed, assigned)
    try:
        with job.recorder.phase(COMMIT), mine.turn:
            mine.split_copies()
            yield mine
    except BaseException as error:  # Ctrl-C too: the files are part of a checkpoint, or litter
        coordinator.give_up()  # before the manifest is read, which is final from then on
        if not mine.clean_up(error).committed:
            raise
        mine.outcome = messages.CommitOutcome(
            0, [f"the checkpoint is committed, but the root's answer was lost: {error}"]
        )
    with suppress(ReknitError):  # files that cannot be deleted take space until the next save to this path
        clear_own_host(job.storage, job.group, mine.write_id)
