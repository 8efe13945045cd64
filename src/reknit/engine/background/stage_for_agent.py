"""The save story of a trainer that does not wait, in numbered steps, and its warm_up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from reknit.engine import messages
from reknit.engine.background import messages as say
from reknit.engine.background.agents import Plan
from reknit.engine.background.ahead import plan_nbytes
from reknit.engine.background.deferred import Deferred
from reknit.engine.background.snapshot import Snapshot
from reknit.engine.columns import unpacked
from reknit.engine.memory.staging import Staging
from reknit.engine.saving.commit import check_manifest
from reknit.engine.saving.copies import choose
from reknit.engine.saving.file_layout import outline
from reknit.monitor.phase import monotonic
from reknit.monitor.sinks.choosing import everywhere
from reknit.options.fields import names_in
from reknit.system import start_thread
from reknit.types.shard import Encoded

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.engine.background.agents import Agents
    from reknit.engine.background.ahead import Ahead
    from reknit.engine.background.trainer_save import TrainerSave
    from reknit.engine.memory.arena_pool import Lease
    from reknit.engine.saving.claims import EncodedHoldings
    from reknit.engine.saving.job import SaveJob
    from reknit.types.shard import Blob, SharedFile


def stage_for_agent(ahead: Ahead, agents: Agents, save: TrainerSave) -> None:
    """Return when the state may be changed, with ``stage="lazy"`` but for what barriers stand before."""
    job, encoded, rank = ahead.job, ahead.encoded, agents.link.rank
    recorder, check = job.recorder, job.options.check_replicas
    # 1 what this rank holds is collected; its plan is there, or it can make one alone, or asks all ranks
    if rank == 0:
        check_manifest(job)
    plan = agents.plan(save, ahead.key)
    claimed = plan is not None and plan.assigned
    if plan is None and not encoded.guessed:
        plan = agents.keep(ahead.key, ahead.plan_alone(rank))
    with recorder.phase("digest"):
        chosen = (plan and plan.chosen.get(check)) or choose(encoded, check, rank, agents.size)
        copies = chosen.copies(ahead.sources)
    _lend(agents, save, encoded)
    save.begin(_begin(ahead, agents, save, copies, claimed=claimed), recorder)
    # 2 plan; but for a new layout with shards that others may hold too, no rank waits for another
    plan = plan or _agreed(ahead, agents, save)
    plan.chosen[check] = chosen
    with recorder.phase("plan"):
        images = plan.outline.images(save.write_id, ahead.sources)
    # 3 stage
    lease = ahead.acquire(plan_nbytes(plan))
    ahead.hand_over(save)
    _share(agents, lease)
    # What will be in the arena
    files = [(file.plan.item, file.plan.part, file.nbytes) for file in plan.outline.files]
    columns = None if plan.committed else plan.outline.columns
    items = list(encoded.holdings.items)
    frozen = plan.outline.frozen
    agents.link.send(say.Planned(save.number, items, files, frozen, columns, lease.number, lease.nbytes))
    snapshot = Snapshot(images, lease, save, job.options)
    save.streamed = snapshot.streamed
    lazy = job.options.stage == "lazy" and not snapshot.streamed
    deferred = None
    if ahead.copied:
        snapshot.tell_taken()
    else:
        with recorder.phase("stage", nbytes=sum(image.nbytes for image in images)):
            deferred = Deferred(encoded.holdings, images) if lazy else None
            if deferred:
                staging = snapshot.begin(deferred)
            else:
                snapshot.take()
    save.blocked_s = monotonic() - ahead.begun
    if deferred:
        start_thread("reknit-stages", lambda: _settle(job, save, lambda: snapshot.settle(deferred, staging)))
    else:
        save.staged()


def warm_up(ahead: Ahead, agents: Agents, save: TrainerSave) -> None:
    """Do ahead of a save, with all ranks together, what its layout will need; nothing is copied or written.

    Every rank makes its plan anew, so that all ranks' plans fit each other whatever was saved before.
    """
    job, alone = ahead.job, not ahead.encoded.guessed
    if job.options.stage == "lazy":
        for barrier in ahead.encoded.holdings.barriers:
            barrier.stands()  # so that the steps until the first save come by
    begin = _begin(ahead, agents, save, messages.NO_COPIES, claimed=False)
    begin.claims.blobs, begin.claims.witnesses = [], messages.NO_WITNESSES  # assigned with each save
    begin.warm_up = True
    begin.promote_to = []
    save.begin(begin, job.recorder)
    plan = (
        agents.keep(ahead.key, ahead.plan_alone(agents.link.rank)) if alone else _agreed(ahead, agents, save)
    )
    plan.assigned = True  # or all plans are dropped
    Staging(ahead.sources.on_devices)  # the stream of each device that will be copied from
    with job.recorder.phase("back_pressure"):
        nbytes = plan_nbytes(plan)
        lease = ahead.lease or (ahead.arenas.acquire(nbytes, 0.0) if nbytes else None)
        if lease is not None:  # else saves under way have them all
            try:
                lease.pin(ahead.sources.on_devices)
                _share(agents, lease)
            finally:
                ahead.arenas.release(lease)
    save.staged()
    agents.link.send(say.Ready(save.number))


def _begin(
    ahead: Ahead, agents: Agents, save: TrainerSave, copies: messages.Copies, *, claimed: bool
) -> say.Begin:
    """Return what the agent is told first; only the root's needs what goes to the manifest alone.

    With `claimed` the root knows already what this rank claims under its layout.
    """
    job, encoded = ahead.job, ahead.encoded
    root = agents.link.rank == 0
    blobs = [
        messages.EncodedBlob(blob.item, blob.key, blob.coordinate, b"") if _lent(saved, blob) else blob
        for saved, blob in zip(encoded.holdings.blobs, encoded.blobs, strict=True)
    ]
    extra = {"origin": job.origin if root else {}, "metadata": job.metadata if root else {}}
    return say.Begin(
        number=save.number,
        url=job.url,
        factory=job.factory,
        overwrite=job.overwrite,
        options={name: getattr(job.options, name) for name in names_in(job.options, "agent")}
        | {"events": everywhere(job.options.events)},
        extra=json.dumps(extra, default=dict).encode(),
        claims=messages.RankClaims(
            save.write_id,
            job.step,
            ahead.key,
            None if claimed else encoded.shard_claims(),
            blobs,
            copies,
            encoded.witnesses,
            len(job.promote_to),
        ),
        promote_to=list(job.promote_to),
        coordinate=job.recorder.coordinate,
        record=None if job.run is None else job.run.record,
        tell_events=not all(sink.everywhere for sink in job.recorder.sinks),
        circumstances=agents.new_circumstances(save, job.options.timeout_s),
    )


def _lent(blob: Blob, encoded: messages.EncodedBlob) -> Encoded | None:
    """Return the value if the agent can map it instead of getting a copy."""
    value = blob.value
    in_place = isinstance(value, Encoded) and value.file is not None and not isinstance(encoded.data, bytes)
    return value if in_place else None


def _lend(agents: Agents, save: TrainerSave, encoded: EncodedHoldings) -> None:
    """Let the agent map values that lie, encoded, in shared memory."""
    files: dict[SharedFile, list[tuple[int, int, int]]] = {}
    for number, (blob, one) in enumerate(zip(encoded.holdings.blobs, encoded.blobs, strict=True)):
        value = _lent(blob, one)
        if value is not None and value.file is not None:
            end = value.at + len(value.memory)
            files.setdefault(value.file, []).append((number, end - len(one.data), end))
    for file, places in files.items():
        agents.link.send(say.Lend(save.number, file.nbytes, places), file.fd)


def _agreed(ahead: Ahead, agents: Agents, save: TrainerSave) -> Plan:
    """Make a plan for a layout that is new; all ranks have to come to this save before it is known."""
    job = ahead.job
    with job.recorder.phase("assign"):
        owners = save.owners(job.options.timeout_s)
    with job.recorder.phase("plan"):
        holdings = ahead.encoded.resolved(unpacked(owners, "i8"))
        plan = Plan(outline(holdings, agents.link.rank, job.options.max_file_nbytes), assigned=True)
    return agents.keep(ahead.key, plan)


def _share(agents: Agents, lease: Lease) -> None:
    """Let the agent use an arena, too."""
    if dropped := tuple(number for number in lease.dropped if number in agents.arenas):
        agents.link.send(say.DropArenas(dropped))
        agents.arenas.difference_update(dropped)
    if lease.number not in agents.arenas:
        agents.link.send(say.GiveArena(lease.number, lease.arena.nbytes), lease.arena.fd)
        agents.arenas.add(lease.number)


def _settle(job: SaveJob, save: TrainerSave, settle: Callable[[], None]) -> None:
    """Finish the copying of a lazily staged save."""
    try:
        settle()
    except BaseException as error:  # whatever it is, all ranks must hear of it
        save.abandon(error, job.options.timeout_s)
    else:
        save.staged()
