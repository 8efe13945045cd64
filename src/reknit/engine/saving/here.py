"""The writer in this process: it holds both rounds of a save, and writes the files of its rank."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from xxhash import xxh3_128_digest

from reknit.comm import group as comm
from reknit.engine import messages
from reknit.engine.memory.write import PIECE_NBYTES, Tuner, discard, write_files
from reknit.engine.reports import SaveReport, SaveTotals
from reknit.engine.saving.coordinator import Coordinator, receipt, write_blobs
from reknit.engine.saving.layout import PLANS_KEPT, LiveFiles, Owners, keep_latest
from reknit.engine.saving.packing import claims, merge_claims, merge_receipts
from reknit.engine.saving.part import EQUAL, blob_files, split
from reknit.engine.saving.reuse import Committed, Reuse
from reknit.engine.stored.commit import UNSENT, clear_own_host, fate_of
from reknit.environment import num_threads
from reknit.errors import ReknitError, typed
from reknit.events.phase import monotonic
from reknit.format import paths
from reknit.format.checksum import BLOCK_NBYTES
from reknit.storage.base import CopiesFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from reknit.engine.memory.write import ByteSource, Outgoing, Written
    from reknit.engine.saving.layout import Outline
    from reknit.engine.saving.part import Chosen, Part
    from reknit.engine.saving.task import SaveTask
    from reknit.engine.stored.commit import Fate

ASSIGN = "assign"
"""The round in which a save begins."""

COMMIT = "commit"
"""The round in which a save ends."""


class EarlierSaves:
    """The results of earlier saves of this rank in one group, on the root also the plans of all ranks.

    The files of `committed` may be taken over.  The root has the claims of this rank under each layout in
    `claimed`, and its chunks under each plan in `planned`.
    """

    def __init__(self, coordinator: Coordinator | None = None) -> None:
        self.committed = Committed()
        self.coordinator = coordinator or Coordinator(plans_follow=True)
        self.claimed: dict[bytes, dict[str, Chosen]] = {}
        self.planned: dict[bytes, Outline] = {}


class DataFiles(Protocol):
    """The data files of a rank: of live memory (`layout.LiveFiles`), or in the arena of an agent."""

    @property
    def plan(self) -> bytes:
        """The plan that the root keeps the chunks under."""

    @property
    def items(self) -> Sequence[str]:
        """The items of the rank, also without a file."""

    @property
    def listed(self) -> Sequence[tuple[str, int, int]]:
        """Item, part and size of each file."""

    @property
    def columns(self) -> messages.ArrayColumns | None:
        """The chunks in the files; None if the root has the chunks of this plan."""

    def source(self, write_id: str, timeout_s: float) -> AbstractContextManager[ByteSource]:
        """Return the bytes of the files under a write id, within a block."""


class Here:
    """Saves in this process.  It is a writer of `saving.save`, and an agent calls its steps one by one.

    An agent writes in another thread than that of the rounds, possibly before them.
    """

    def __init__(
        self,
        task: SaveTask,
        earlier: EarlierSaves | None = None,
        *,
        subject: str = "",
        tuner: Tuner | None = None,
    ) -> None:
        """Write with the `earlier` saves of the group; `subject` and `tuner` are those of an agent."""
        self.task = task
        self.earlier = earlier or EarlierSaves()
        self._in_agent = tuner is not None
        self._alone = task.group.size == 1 and not self._in_agent
        # The index of a rank alone is encoded while it writes, and its plans are kept with its holdings.
        self.coordinator = Coordinator() if self._alone else self.earlier.coordinator
        self.written: list[Written] = []
        """The files that storage has.  Data files are added once all are written, and values one by one."""
        self.totals = SaveTotals(0, 0, 0, 0, ())
        self.blocked_s = 0.0
        self.write_id = ""
        self._subject, self._tuner, self._in_round = subject, tuner, False
        self.sent = False
        """Whether the receipt may be on its way to the root."""
        self._copies = EQUAL
        self._kept: dict[str, Chosen] = {}
        self._writing = threading.Lock()

    @contextmanager
    def rounds(self) -> Iterator[None]:
        """Return the block in which a rank saves: an error in it is raised on all ranks.

        After an error none of the files is left, unless they may still become part of a checkpoint.
        """
        begun = monotonic()
        try:
            with ExitStack() as self._phase:
                if not self._alone:
                    self._enter(ASSIGN, merge_claims, self._subject, opens=True)
                try:
                    yield
                except BaseException:
                    with self._turn if self._in_round else nullcontext():  # the other ranks receive it
                        raise
        except BaseException as error:  # Ctrl-C too: the files are part of a checkpoint, or litter
            self.coordinator.give_up()  # before the manifest is read, which is final from then on
            if not self.clean_up(error).committed:
                self.earlier.claimed.clear()  # they may be wrong, or unknown to the root
                self.earlier.planned.clear()
                raise
            self._outcome = messages.CommitOutcome(
                0, [f"the checkpoint is committed, but the root's answer was lost: {error}"]
            )
        with suppress(ReknitError):  # files that stay take space until the next save to this path
            clear_own_host(self.task.storage, self.task.group, self.write_id)
        self._keep_results()
        self.blocked_s = monotonic() - begun

    def _keep_results(self) -> None:
        """Keep the figures of a save that is committed, and its plans and files for the next one."""
        files, reuse, written = self._files, self._reuse, self.written
        if isinstance(files, LiveFiles) and not self._alone:
            keep_latest(self.earlier.claimed, self._claimed.plan, self._kept, PLANS_KEPT)
            keep_latest(self.earlier.planned, files.plan, files.outline, PLANS_KEPT)
        reuse.remember(written)
        self.totals = SaveTotals(
            nbytes=sum(file.nbytes for file in written),
            num_files=len(written),
            total_nbytes=self._outcome.total_nbytes,
            reused_nbytes=reuse.nbytes,
            warnings=tuple(self._outcome.warnings),
        )

    def open(self) -> bool:
        """Open the store, after the saves before; return whether it takes over files that did not change.

        Raises the error of the arguments.  A rank alone begins its round after that, so that this error is
        about no rank.
        """
        task = self.task
        try:
            if task.wrong is not None:
                raise task.wrong
            if not hasattr(task, "storage"):
                task.storage = task.place.open(task.options.durability, task.recorder)
                task.recorder.path = task.storage.url
            for save in task.after:
                save.wait_over(task.options.timeout_s)
        except ReknitError:
            raise
        except Exception as error:  # the author of a store decides about its errors
            raise typed(error) from error
        if self._alone:
            self._enter(ASSIGN, merge_claims, self._subject, opens=True)
        return task.options.reuse and isinstance(task.storage, CopiesFiles)

    def assign(self, part: Part) -> Owners:
        """Claim the shards whose holders no framework records, and return the owners."""
        layout, check = b"" if self._alone else part.layout, self.task.options.check_replicas
        known = self.earlier.claimed.get(layout)
        chosen = part.compare(None if known is None else known.get(check))
        self._kept = {**(known or {}), check: chosen}
        owners = self.hold_assign(part.claims(plan=layout, shards=known is None)).shard_owners
        # 16 bytes stand for the files of a layout under these owners of guessed shards.
        plan = xxh3_128_digest(layout + owners) if layout and owners else layout
        return Owners(plan, owners, self.earlier.planned)

    def hold_assign(self, claimed: messages.RankClaims) -> messages.Assignment:
        """Hold the round in which the save begins, enter the one in which it ends, and return the answer."""
        task, committed = self.task, self.earlier.committed
        first = committed.beside(task.storage) is None
        requests, answers = self._turn.gather(claims(task.group.rank, claimed)), None
        if requests is not None:
            answers = self.coordinator.assign(task, requests, first=first)
        assigned = self._turn.give(answers, messages.Assignment)
        committed.keep_found(task.storage, assigned.earlier)
        self.write_id, self._claimed, self._assigned = assigned.write_id, claimed, assigned
        self._enter(COMMIT, merge_receipts, self.write_id)
        check = task.options.check_replicas
        if assigned.differing:
            with task.recorder.phase("plan"):
                self._copies = split(claimed.copies, assigned.differing, task.group.rank, check)
        return assigned

    def write(self, files: DataFiles, write_id: str = "") -> None:
        """Digest and write the data files; take over those of the last checkpoint that are the same.

        An agent passes the write id, as it writes before the round that assigns it.
        """
        task, write_id = self.task, write_id or self.write_id
        meanwhile: Callable[[], None] | None = None
        if self._alone and files.columns is not None:
            meanwhile = partial(self.coordinator.encode_ahead, files.columns)
        elif task.group.rank == 0 and not self._in_agent:
            meanwhile = self.coordinator.import_ahead
        with self._writing, files.source(write_id, task.options.timeout_s) as source:
            self._reuse = Reuse(task, self.earlier.committed, write_id, files.listed)
            self.written += write_files(
                task.storage,
                self._reuse.files,
                source,
                tuner=self._tuner or _tuner(task.options.threads, self._reuse.files),
                recorder=task.recorder,
                earlier=self._reuse if source.compares else None,
                meanwhile=meanwhile,
            )

    def commit(self, files: DataFiles) -> None:
        """Write the values of this rank, send the receipt for all files, and keep the outcome."""
        task, copies, self._files = self.task, self._copies, files
        blobs = [*self._claimed.blobs, *copies.blobs]
        own = blob_files(blobs, self._assigned.blob_owners, task.group.rank)
        places = write_blobs(task, own, self.write_id, self.written)
        mine = receipt(
            task,
            files.items,
            self.written,
            plan=files.plan,
            columns=None if self._alone else files.columns,
            places=places,
            copies=copies,
        )
        self.sent = True
        receipts = self._turn.gather(mine)
        outcome = None if receipts is None else self.coordinator.commit(task, receipts)
        self._outcome = self._turn.give_all(outcome, messages.CommitOutcome)

    def report(self) -> SaveReport:
        """Return the report of a save that is committed."""
        return SaveReport(
            path=self.task.storage.url,
            step=self.task.step,
            write_id=self.write_id,
            phases=tuple(self.task.recorder.records),
            blocked_s=self.blocked_s,
            **self.totals._asdict(),
        )

    def _enter(self, name: str, merge: comm.Merge, subject: str, *, opens: bool = False) -> None:
        """Enter a round of this save, after the one before."""
        group, seconds, self._in_round = self.task.group, self.task.options.timeout_s, True
        self._phase.close()
        if name == COMMIT or not self._in_agent:  # no trainer waits while an agent waits for other agents
            self._phase.enter_context(self.task.recorder.phase(name))
        self._turn = comm.turn(group, name, seconds, merge=merge, subject=subject, opens=opens)

    def clean_up(self, error: BaseException) -> Fate:
        """Delete the files of this rank, unless they are part of a checkpoint, or may become so."""
        is_root = self.task.group.rank == 0
        # An error of another phase is from a rank that sent no receipt, so it is not a lost answer.
        sent = self.sent and (not isinstance(error, ReknitError) or error.phase in (None, COMMIT))
        with self._writing:  # an agent may be writing still
            if not self.write_id and not self.written:
                return UNSENT  # perhaps without a store
            # The root commits only after it has the receipts of all ranks.
            storage = self.task.storage
            fate = fate_of(storage, self.write_id, error, sent=True, is_root=is_root) if sent else UNSENT
            if fate.litter:
                index = [paths.index_path(self.write_id)] if is_root and self.write_id else []
                for path in [*(file.path for file in self.written), *index]:
                    discard(storage, path)
        return fate


def _tuner(threads: int | None, files: Sequence[Outgoing]) -> Tuner:
    """Return the settings of the write; pieces of a small save are smaller, so that writing begins early."""
    is_small = sum([file.nbytes for file in files]) <= 2 * PIECE_NBYTES
    return Tuner(threads=num_threads(threads), piece_nbytes=BLOCK_NBYTES if is_small else PIECE_NBYTES)
