"""The writer that copies a save to memory of the agent, which writes and commits it (`agent_save`)."""

from __future__ import annotations

import json
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from reknit.engine import messages as round_messages
from reknit.engine.background import messages
from reknit.engine.background.session import Plan
from reknit.engine.background.snapshot import Deferred, Snapshot
from reknit.engine.background.trainer_save import SaveArena, log_failure
from reknit.engine.memory.devices import Staging
from reknit.engine.saving.layout import LiveFiles, Owners
from reknit.engine.saving.part import encode, lay_out
from reknit.errors import typed
from reknit.events.phase import monotonic
from reknit.events.to_file import everywhere
from reknit.format import paths
from reknit.options.fields import names_in
from reknit.system import start_thread
from reknit.types.shard import Encoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.engine.background.background import Background
    from reknit.engine.background.session import AgentSession, AgentStart
    from reknit.engine.background.trainer_save import TrainerSave
    from reknit.engine.memory.arena_pool import Lease
    from reknit.engine.outcome import SaveOutcome
    from reknit.engine.saving.part import Chosen, EncodedHoldings, Part
    from reknit.engine.saving.task import SaveTask
    from reknit.types.shard import Blob, SharedFile

_COPY_AHEAD_NBYTES = 2 << 30
"""Limit of the bytes copied while an agent starts, which takes about as long."""


class AtAgent:
    """Saves, or warms up, through the agent of this rank.  It is a writer of `saving.save`.

    Every rank takes the next number, and ends it at its agent after every error, so that no other rank waits
    for this one.  An agent that is not there yet starts while this rank does as much of the save as it can
    alone: it lays out its files, takes memory, and copies.  The write id comes with the agents, so it is put
    into the headers last.
    """

    part: Part
    plan: Plan
    session: AgentSession
    save: TrainerSave

    def __init__(self, task: SaveTask, background: Background, outcome: SaveOutcome) -> None:
        """Save through the agents of `background`; the `outcome` receives the end, also an error."""
        self.task, self.outcome = task, outcome
        self._background = background
        self._begun_at = monotonic()
        self._starting: AgentStart | None = None
        self._must_join = False
        self._owners: bytes | None = None
        """The owners of the claimed shards, if the trainers found them while the agents start."""
        self._chosen: Chosen | None = None
        """The copies to compare, once the save has begun."""
        self._settle: Callable[[], None] | None = None

    @contextmanager
    def rounds(self) -> Iterator[None]:
        """Return the block in which a rank saves: an error in it is raised on all ranks, by their outcomes.

        Only Ctrl-C and exits of the process are raised here.
        """
        task, background = self.task, self._background
        supervisor = background.supervisor
        with background.entered(self.outcome, task.options) as arenas:
            self._arena = SaveArena(arenas)
            self._number = supervisor.next_number(task.options)
            try:
                yield
            except BaseException as error:  # also a bug: the other ranks must receive it
                self._give_up(error)

    def open(self) -> bool:
        """Start the agent, which opens the store; return whether the store takes over files.

        Raises the error of the arguments.
        """
        task = self.task
        self._starting, self._must_join = self._background.supervisor.start(task.group), True
        if task.wrong is not None:
            raise task.wrong
        return task.options.reuse and task.place.copies_files(task.options.durability)

    def assign(self, part: Part) -> Owners:
        """Return the owners of claimed shards; ranks wait for each other only for those of a new layout."""
        self.part, known = part, None
        if self._starting is None:
            self._join()
            known = self.session.plan(self.save, part.layout)
        if known is not None:
            return Owners(part.layout, b"", {part.layout: known.outline})
        if not part.needs_assignment:
            return Owners(part.layout, b"", {})
        self._join()
        if self._owners is None:
            self._chosen = self._begin(claimed=False)
        with self.task.recorder.phase("assign"):
            owners = self._owners or self.save.owners(self.task.options.timeout_s)
        return Owners(part.layout, owners, {})

    def write(self, files: LiveFiles) -> None:
        """Copy the files to an arena; the agent writes each span as soon as it is filled."""
        task, nbytes, is_copied = self.task, files.nbytes, False
        if self._must_join and nbytes:
            is_copied = self._copy_ahead(files, self._arena.acquire(nbytes, task))
        self._begin_with(files)
        save, session = self.save, self.session
        lease = self._arena.acquire(nbytes, task)
        self._arena.hand_over(save)
        session.share_arena(lease)
        planned = messages.Planned(
            number=save.number,
            items=list(files.items),
            files=files.listed,
            columns=None if self.plan.committed else files.outline.columns,
            arena=lease.number,
            ring=lease.nbytes,
        )
        session.link.send(planned)
        images = files.images(save.write_id)
        snapshot = Snapshot(images, lease, save, task.options)
        save.streamed = snapshot.streamed
        if is_copied:
            snapshot.report_taken()
            return
        with task.recorder.phase("stage", nbytes=sum(image.nbytes for image in images)):
            lazy = task.options.stage == "lazy" and not snapshot.streamed
            deferred = Deferred(self.part.encoded.holdings, images) if lazy else None
            if deferred:
                self._settle = partial(snapshot.settle, deferred, snapshot.begin(deferred))
            else:
                snapshot.take()

    def commit(self, files: LiveFiles) -> None:
        """Let training go on; the agent commits.  The outcome receives the end of the save."""
        save = self.save
        save.blocked_s = monotonic() - self._begun_at
        if self._settle is None:
            save.staged()
        else:
            start_thread("reknit-stages", partial(_settled, self._settle, save, self.task.options.timeout_s))

    def prepare(self) -> None:
        """Prepare for saves of the state of the task, with all ranks, in the place of `saving.save`."""
        with self.rounds():
            takes_over = self.open()
            if self._starting is not None:
                self._starting.begin()  # beside the preparation, for which no step of training waits
            with self.task.recorder.phase("collect"):
                part = encode(self.task.holdings(), self.task, takes_over=takes_over)
            self._warm_up(part)

    def _warm_up(self, part: Part) -> None:
        """Make the plan and the arena of a layout, without copying or writing.

        Every rank makes a new plan, so that the plans of all ranks fit each other after any earlier saves.
        """
        task, self.part, sources = self.task, part, part.sources.on_devices
        if task.options.stage == "lazy":
            for barrier in part.encoded.holdings.barriers:
                barrier.stands()  # so that training steps pass it until the first save
        files, owners = None, b""
        if not part.needs_assignment:
            files = lay_out(part, Owners(part.layout, b"", {}))
            if self._must_join and files.nbytes:
                self._arena.acquire(files.nbytes, task)
        self._join()
        begin = self._first_message(claimed=False)
        begin.claims.blobs, begin.claims.witnesses = [], round_messages.NO_WITNESSES  # of each save
        begin.warm_up, begin.promote_to = True, []
        self.save.begin(begin, task.recorder)
        if part.needs_assignment:
            with task.recorder.phase("assign"):
                owners = self._owners or self.save.owners(task.options.timeout_s)
        files = files or lay_out(part, Owners(part.layout, owners, {}))
        self.session.keep(part.layout, Plan(files.outline, assigned=True))  # or all plans are dropped
        Staging(sources)  # the stream of each device that will be copied from
        with task.recorder.phase("back_pressure"):
            arenas = self._arena.arenas
            lease = self._arena.lease or (arenas.acquire(files.nbytes, 0.0) if files.nbytes else None)
            if lease is not None:  # else saves under way hold all arenas
                try:
                    lease.pin(sources)
                    self.session.share_arena(lease)
                finally:
                    arenas.release(lease)
        self.save.staged()
        self.session.link.send(messages.Ready(self.save.number))

    def _join(self) -> None:
        """Find the agents of this save, and take part in it; agents that start join each other first."""
        if not self._must_join:
            return
        task, background, outcome = self.task, self._background, self.outcome
        starting, self._starting, self._must_join = self._starting, None, False
        if starting is not None:
            starting.begin()
        supervisor, number = background.supervisor, self._number
        self.session = session = supervisor.session_for(number, task.group, starting, self._first_claims)
        self._owners = None if starting is None else session.owners
        self.save = save = session.new_save(self._number, outcome)
        save.begun, save.group = self._begun_at, task.group
        save.unrecorded = None if task.wrong else task.recorder
        self._arena.hand_over(save)
        supervisor.begun(number)
        background.wait_for(outcome.path, task.options.timeout_s, exclude=session)
        outcome.place = outcome.path, session

    def _first_claims(self) -> round_messages.FirstClaims:
        """Return the claims of this rank for the round in which agents start."""
        # On several hosts the requests of all ranks would be too many, so their agents find the owners.
        has_claims = hasattr(self, "part") and self.task.group.topology.num_hosts == 1
        return round_messages.FirstClaims(self.part.encoded.shard_claims() if has_claims else None)

    def _begin_with(self, files: LiveFiles) -> None:
        """Begin the save at the agent, unless it has begun, with the plan of these files."""
        layout = self.part.layout
        self._join()
        known = self.session.plan(self.save, layout)
        has_begun = self._chosen is not None
        self.plan = known or self.session.keep(layout, Plan(files.outline, assigned=has_begun))
        chosen = self._chosen or self._begin(claimed=known is not None and known.assigned)
        self.plan.chosen[self.task.options.check_replicas] = chosen

    def _begin(self, *, claimed: bool) -> Chosen:
        """Send the agent the first message about a save, and return the copies that the root compares.

        With `claimed` the root has the claims of this rank under its layout from an earlier save.
        """
        task, part = self.task, self.part
        self._join()
        session, save = self.session, self.save
        if task.group.rank == 0 and task.metadata:
            from reknit.engine.saving.root import check_manifest  # other trainers need none of it

            check_manifest(task)
        plan, check = session.plan(save, part.layout), task.options.check_replicas
        chosen = part.compare(None if plan is None else plan.chosen.get(check))
        _share_values(session, save, part.encoded)
        save.begin(self._first_message(claimed=claimed), task.recorder)
        return chosen

    def _first_message(self, *, claimed: bool) -> messages.Begin:
        """Return the first message about a save, which on the root has the values for the manifest."""
        task, part, save = self.task, self.part, self.save
        claims = part.claims(save.write_id, part.layout, shards=not claimed)
        claims.blobs = [
            round_messages.EncodedBlob(blob.item, blob.key, blob.coordinate, b"")
            if _mapped(saved, blob)
            else blob
            for saved, blob in zip(part.encoded.holdings.blobs, part.encoded.blobs, strict=True)
        ]
        root = task.group.rank == 0
        extra = {"origin": task.origin if root else {}, "metadata": task.metadata if root else {}}
        return messages.Begin(
            number=save.number,
            url=task.place.url,
            factory=task.place.factory,
            overwrite=task.overwrite,
            options={name: getattr(task.options, name) for name in names_in(task.options, "agent")}
            | {"events": everywhere(task.options.events)},
            extra=json.dumps(extra, default=dict).encode(),
            claims=claims,
            promote_to=list(task.promote_to),
            coordinate=task.recorder.coordinate,
            record=None if task.run is None else task.run.record,
            sends_events=not all(sink.everywhere for sink in task.recorder.sinks),
            context=self.session.new_context(save, task.options.timeout_s),
        )

    def _copy_ahead(self, files: LiveFiles, lease: Lease) -> bool:
        """Copy the files, with headers of another write id; return whether that is done.

        A state that is staged lazily is not copied yet.  Neither is a state whose copy would take longer than
        the start of an agent, since its agent writes while it is staged.
        """
        images = files.images(paths.new_write_id())
        snapshot = Snapshot(images, lease, None, self.task.options)
        nbytes = sum(image.nbytes for image in images)
        if snapshot.streamed or self.task.options.stage == "lazy" or nbytes > _COPY_AHEAD_NBYTES:
            return False
        with self.task.recorder.phase("stage", nbytes=nbytes):
            snapshot.take()
        return True

    def _give_up(self, error: BaseException) -> None:
        """End the save with an error, on all ranks.  Raises Ctrl-C and exits of the process."""
        first: BaseException = error
        if self._must_join:  # the agents of all ranks wait for this save
            try:
                self._join()
            except BaseException as failed:
                # The first error counts, except that Ctrl-C always does, since it concerns the whole process.
                first = error if isinstance(failed, Exception) else failed
        ended = typed(first) if isinstance(first, Exception) else first
        if hasattr(self, "save"):
            self.save.abandon(ended, self.task.options.timeout_s)
        else:
            self._arena.release()
            self._background.supervisor.give_up(self._number)
        self.outcome.end(ended, partial(log_failure, self.outcome, ended))
        if not isinstance(ended, Exception):
            self.outcome.is_read = True  # it is raised here, so the next save need not raise it
            raise ended from (None if ended is error else error)


def _share_values(session: AgentSession, save: TrainerSave, encoded: EncodedHoldings) -> None:
    """Send the agent the encoded values in shared memory, for it to map."""
    files: dict[SharedFile, list[tuple[int, int, int]]] = {}
    for number, (blob, one) in enumerate(zip(encoded.holdings.blobs, encoded.blobs, strict=True)):
        value = _mapped(blob, one)
        if value is not None and value.file is not None:
            end = value.at + len(value.memory)
            files.setdefault(value.file, []).append((number, end - len(one.data), end))
    for file, places in files.items():
        session.link.send(messages.ShareValues(save.number, file.nbytes, places), file.fd)


def _mapped(blob: Blob, encoded: round_messages.EncodedBlob) -> Encoded | None:
    """Return the value if the agent can map it instead of receiving a copy."""
    value = blob.value
    in_place = isinstance(value, Encoded) and value.file is not None and not isinstance(encoded.data, bytes)
    return value if in_place else None


def _settled(settle: Callable[[], None], save: TrainerSave, timeout_s: float) -> None:
    """Finish the copying of a lazily staged save."""
    try:
        settle()
    except BaseException as error:  # also a bug: all ranks must receive it
        save.abandon(error, timeout_s)
    else:
        save.staged()
