"""The trainer's part of a save that it does not wait for, in numbered steps; the agent's is `agent_save`."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Literal

from reknit.engine import messages as round_messages
from reknit.engine.background import messages as say
from reknit.engine.background.session import Plan
from reknit.engine.background.snapshot import Deferred, Snapshot
from reknit.engine.background.trainer_save import SaveArena, log_failure
from reknit.engine.memory.devices import Staging
from reknit.engine.saving.part import RankPart
from reknit.engine.saving.root import check_manifest
from reknit.errors import typed
from reknit.events.phase import monotonic
from reknit.events.to_file import everywhere
from reknit.format import paths
from reknit.options.fields import names_in
from reknit.system import start_thread
from reknit.types.shard import Encoded

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.comm.group import Group
    from reknit.engine.background.session import AgentSession, AgentSupervisor
    from reknit.engine.background.trainer_save import TrainerSave
    from reknit.engine.memory.arena_pool import Arenas, Lease
    from reknit.engine.outcome import SaveOutcome
    from reknit.engine.saving.part import EncodedHoldings
    from reknit.engine.saving.task import SaveJob
    from reknit.events.phase import Recorder
    from reknit.options import SaveOptions
    from reknit.types.shard import Blob, SharedFile

    Until = Literal["collect", "arena", "copy"]
    """The last step to take while an agent starts."""

    Story = Callable[["PreparedSave", AgentSession, TrainerSave], None]


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
        session.link.send(say.ShareValues(save.number, file.nbytes, places), file.fd)


def _mapped(blob: Blob, encoded: round_messages.EncodedBlob) -> Encoded | None:
    """Return the value if the agent can map it instead of receiving a copy."""
    value = blob.value
    in_place = isinstance(value, Encoded) and value.file is not None and not isinstance(encoded.data, bytes)
    return value if in_place else None


def warm_up(prepared: PreparedSave, session: AgentSession, save: TrainerSave) -> None:
    """Make the plan and the arena of a layout, with all ranks, without copying or writing.

    Every rank makes a new plan, so that the plans of all ranks fit each other after any earlier saves.
    """
    job, part = prepared.job, prepared.part
    if job.options.stage == "lazy":
        for barrier in part.encoded.holdings.barriers:
            barrier.stands()  # so that training steps pass it until the first save
    begin = begin_message(part, session, save, claimed=False)
    begin.claims.blobs, begin.claims.witnesses = [], round_messages.NO_WITNESSES  # assigned with each save
    begin.warm_up = True
    begin.promote_to = []
    save.begin(begin, job.recorder)
    if part.needs_assignment:
        plan = session.agree(part, save)
    else:
        plan = session.keep(part.layout, prepared.plan_alone())
    plan.assigned = True  # or all plans are dropped
    Staging(part.sources.on_devices)  # the stream of each device that will be copied from
    with job.recorder.phase("back_pressure"):
        arenas = prepared.arena.arenas
        lease = prepared.arena.lease or (arenas.acquire(plan.nbytes, 0.0) if plan.nbytes else None)
        if lease is not None:  # else saves under way hold all arenas
            try:
                lease.pin(part.sources.on_devices)
                session.share_arena(lease)
            finally:
                arenas.release(lease)
    save.staged()
    session.link.send(say.Ready(save.number))


_MOST_NBYTES = 2 << 30
"""Limit of the bytes copied while an agent starts, which takes about as long."""


def begin_at_agent(
    story: Story,
    until: Until,
    pending: SaveOutcome,
    *,
    prepared: PreparedSave,
    supervisor: AgentSupervisor,
    wait_for_others: Callable[[AgentSession], None],
    group: Group,
    make: Callable[[], SaveJob],
    options: SaveOptions,
) -> None:
    """Find the agents of a save or warm-up, and run its `story` with them; `pending` receives an error.

    Every rank takes the next number, and ends it at its agent after every error, so that no other rank waits
    for this one.  Only Ctrl-C and exits of the process are raised.
    """
    save: TrainerSave | None = None
    wrong: BaseException | None = None
    number = supervisor.next_number(options)
    try:
        # An agent that is not there yet starts while this rank prepares as much of the save as it can alone.
        starting = supervisor.start(group)
        wrong = prepared.prepare(make, "collect" if starting is None else until)
        session = supervisor.session_for(number, group, starting)
        save = session.new_save(number, pending)
        save.begun, save.unrecorded = prepared.begun, prepared.recorder
        save.group = group
        prepared.arena.hand_over(save)
        supervisor.begun(number)
        wait_for_others(session)
        pending.place = pending.path, session
        if wrong is not None:
            raise wrong
        story(prepared, session, save)
    except BaseException as caught:  # also a bug: the other ranks must receive it
        # The first error counts, except that Ctrl-C always does, since it concerns the whole process.
        first = caught if wrong is None or not isinstance(caught, Exception) else wrong
        error = typed(first) if isinstance(first, Exception) else first
        if save is not None:
            save.abandon(error, options.timeout_s)
        else:
            prepared.arena.release()
            supervisor.give_up(number)
        pending.end(error, partial(log_failure, pending, error))
        if not isinstance(error, Exception):
            pending.asked = True  # it is raised here, so the next save need not raise it
            raise error from (None if error is caught else caught)


def stage_for_agent(prepared: PreparedSave, session: AgentSession, save: TrainerSave) -> None:
    """Stage a save; after it the state may change, with ``stage="lazy"`` except memory behind barriers."""
    job, part = prepared.job, prepared.part
    recorder, check = job.recorder, job.options.check_replicas
    # 1 collect is done; the plan is known, or this rank makes it alone, or together with all ranks
    if job.group.rank == 0:
        check_manifest(job)
    plan = session.plan(save, part.layout)
    claimed = plan is not None and plan.assigned
    if plan is None and not part.needs_assignment:
        plan = session.keep(part.layout, prepared.plan_alone())
    chosen = part.compare(None if plan is None else plan.chosen.get(check))
    lend_values(session, save, part.encoded)
    save.begin(begin_message(part, session, save, claimed=claimed), recorder)
    # 2 plan; ranks wait for each other only for a new layout with shards that several ranks may hold
    plan = plan or session.agree(part, save)
    plan.chosen[check] = chosen
    with recorder.phase("plan"):
        images = plan.outline.images(save.write_id, part.sources)
    # 3 stage; the agent writes each span as soon as it is filled
    lease = prepared.arena.acquire(plan.nbytes, job)
    prepared.arena.hand_over(save)
    session.share_arena(lease)
    session.link.send(planned_message(part, save, plan, lease))
    snapshot = Snapshot(images, lease, save, job.options)
    save.streamed = snapshot.streamed
    lazy = job.options.stage == "lazy" and not snapshot.streamed
    deferred = None
    if prepared.copied:
        snapshot.report_taken()
    else:
        with recorder.phase("stage", nbytes=sum(image.nbytes for image in images)):
            deferred = Deferred(part.encoded.holdings, images) if lazy else None
            if deferred:
                staging = snapshot.begin(deferred)
            else:
                snapshot.take()
    # 4 training goes on; `save` receives the outcome, which the user has as a `PendingSave`
    save.blocked_s = monotonic() - prepared.begun
    if deferred:
        start_thread("reknit-stages", lambda: _settle(job, save, lambda: snapshot.settle(deferred, staging)))
    else:
        save.staged()


class PreparedSave:
    """A save up to its first message, which this rank prepares alone while the agent starts."""

    job: SaveJob
    part: RankPart

    def __init__(self, arenas: Arenas) -> None:
        """Use `prepare`."""
        self.arena = SaveArena(arenas)
        self.begun = monotonic()
        self.plan: Plan | None = None
        self.copied = False
        """Whether the arena has all files of the plan, with headers of another write id."""
        self.recorder: Recorder | None = None

    def prepare(self, make: Callable[[], SaveJob], until: Until) -> BaseException | None:
        """Collect the holdings of the job of `make`, plan them, and copy them to an arena; return an error.

        This rank works alone, so holdings are only collected if a framework does not record the other
        holders of some shards.  A state that is staged lazily is not copied yet.  Neither is a state whose
        copy would take longer than the start of an agent, since its agent writes while it is staged.  An
        error is returned because the other ranks receive it through the agents, which may not run yet.
        """
        try:
            self.job = job = make()
            self.recorder = job.recorder
            job.storage.close()  # the agent opens its own
            self.part = RankPart(job)
            if until != "collect" and not self.part.needs_assignment:
                plan = self.plan_alone()
                lease = self.arena.acquire(plan.nbytes, job) if plan.nbytes else None
                if until == "copy" and lease is not None:
                    self._copy(plan, lease)
        except BaseException as error:  # Ctrl-C too
            return error
        return None

    def plan_alone(self) -> Plan:
        """Return the plan of holdings in which every shard lists its replicas."""
        if self.plan is None:
            with self.job.recorder.phase("plan"):
                self.plan = Plan(self.part.outline())
        return self.plan

    def _copy(self, plan: Plan, lease: Lease) -> None:
        images = plan.outline.images(paths.new_write_id(), self.part.sources)
        snapshot = Snapshot(images, lease, None, self.job.options)
        nbytes = sum(image.nbytes for image in images)
        if snapshot.streamed or self.job.options.stage == "lazy" or nbytes > _MOST_NBYTES:
            return
        with self.job.recorder.phase("stage", nbytes=nbytes):
            snapshot.take()
        self.copied = True


def _settle(job: SaveJob, save: TrainerSave, settle: Callable[[], None]) -> None:
    """Finish the copying of a lazily staged save."""
    try:
        settle()
    except BaseException as error:  # also a bug: all ranks must receive it
        save.abandon(error, job.options.timeout_s)
    else:
        save.staged()
