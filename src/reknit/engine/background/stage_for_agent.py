"""The save story of a trainer that does not wait, in numbered steps, and its warm_up."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

from reknit.engine import messages
from reknit.engine.background import messages as say
from reknit.engine.background.agents import Plan
from reknit.engine.background.deferred import Deferred
from reknit.engine.background.snapshot import Snapshot
from reknit.engine.memory.arena import image_nbytes
from reknit.engine.memory.arena_pool import MAX_ARENAS
from reknit.engine.memory.elements import all_bits
from reknit.engine.memory.staging import Staging, pin
from reknit.engine.saving.claims import encode_holdings
from reknit.engine.saving.commit import check_manifest
from reknit.engine.saving.copies import choose
from reknit.engine.saving.file_layout import layout_digest, outline
from reknit.errors import DeadlineError, ShortageError, SkippedError
from reknit.monitor.phase import Stopwatch
from reknit.system import start_thread
from reknit.types.shard import Encoded

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.engine.background.agents import Agents
    from reknit.engine.background.trainer_save import TrainerSave
    from reknit.engine.memory.arena_pool import Arenas, Lease
    from reknit.engine.memory.file_image import Image
    from reknit.engine.saving.claims import EncodedHoldings
    from reknit.engine.saving.job import SaveJob
    from reknit.types.shard import Blob, SharedFile

_FOR_AGENT = (
    "allow_pickle",
    "check_replicas",
    "durability",
    "events",
    "piece_nbytes",
    "threads",
    "timeout_s",
)


def stage_for_agent(job: SaveJob, agents: Agents, save: TrainerSave, arenas: Arenas) -> None:
    """Return when the state may be changed, with ``stage="lazy"`` but for what barriers stand before."""
    clock, recorder = Stopwatch(), job.recorder
    with clock.lap():
        # 1 what does this rank hold (local)
        encoded, key = _encoded(job)
        if agents.link.rank == 0:
            check_manifest(job)
        known = agents.plan(save, key)
        with recorder.phase("digest"):
            sources = all_bits(encoded.holdings.shards)
            check = job.options.check_replicas
            chosen = (known and known.chosen.get(check)) or choose(
                encoded, check, agents.link.rank, agents.size
            )
            copies = chosen.copies(sources)
        _lend(agents, save, encoded)
        save.begin(_begin(job, agents, save, key, encoded, known, copies), recorder)
        # 2 plan; where the layout was saved, or prepared, before, no rank waits for another
        plan = known or _planned(job, agents, save, key, encoded)
        plan.chosen[check] = chosen
        with recorder.phase("plan"):
            images = plan.outline.images(save.write_id, sources)
        # 3 stage
        lease = _leased(job, save, arenas, images)
        _share(agents, lease)
        # What will be in the arena
        files = [(file.plan.item, file.plan.part, file.nbytes) for file in plan.outline.files]
        columns = None if plan.committed else plan.outline.columns
        items = list(encoded.holdings.items)
        agents.link.send(say.Planned(save.number, items, files, columns, lease.number, lease.nbytes))
        snapshot = Snapshot(images, lease, save, job.options)
        save.streamed = snapshot.streamed
        lazy = job.options.stage == "lazy" and not snapshot.streamed
        with recorder.phase("stage", nbytes=sum(image.nbytes for image in images)):
            deferred = Deferred(encoded.holdings, images) if lazy else None
            if deferred:
                staging = snapshot.begin(deferred)
            else:
                snapshot.take()
    save.blocked_s = clock.seconds
    if deferred:
        start_thread("reknit-stages", lambda: _settle(job, save, lambda: snapshot.settle(deferred, staging)))
    else:
        save.staged()


def warm_up(job: SaveJob, agents: Agents, save: TrainerSave, arenas: Arenas) -> None:
    """Do ahead of a save, with all ranks together, what its layout will need; nothing is copied or written.

    Every rank makes its plan anew, so that all ranks' plans fit each other whatever was saved before.
    """
    encoded, key = _encoded(job)
    if job.options.stage == "lazy":
        for barrier in encoded.holdings.barriers:
            barrier.stands()  # so that the steps until the first save come by
    begin = _begin(job, agents, save, key, encoded, None, messages.NO_COPIES)
    begin.claims.blobs, begin.claims.witnesses = [], messages.NO_WITNESSES  # assigned with each save
    begin.warm_up = True
    begin.promote_to = None
    save.begin(begin, job.recorder)
    plan = _planned(job, agents, save, key, encoded)
    with job.recorder.phase("plan"):
        sources = all_bits(encoded.holdings.shards)
        images = plan.outline.images(save.write_id, sources)
        Staging(sources)  # the stream of each device that will be copied from
    with job.recorder.phase("back_pressure"):
        _make_arenas(agents, arenas, images)
    save.staged()
    agents.link.send(say.Ready(save.number))


def _encoded(job: SaveJob) -> tuple[EncodedHoldings, bytes]:
    """Return what this rank holds, and what stands for the layout of it."""
    with job.recorder.phase("collect"):
        encoded = encode_holdings(job.collect(), job.options)
        return encoded, layout_digest(encoded.holdings, job.options.max_file_nbytes)


def _begin(
    job: SaveJob,
    agents: Agents,
    save: TrainerSave,
    key: bytes,
    encoded: EncodedHoldings,
    known: Plan | None,
    copies: messages.Copies,
) -> say.Begin:
    """Return what the agent is told first; only the root's needs what goes to the manifest alone."""
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
        options={name: getattr(job.options, name) for name in _FOR_AGENT},
        extra=json.dumps(extra, default=dict).encode(),
        claims=messages.RankClaims(
            save.write_id,
            job.step,
            key,
            encoded.shard_claims() if known is None else None,
            blobs,
            copies,
            encoded.witnesses,
        ),
        promote_to=job.promote_to,
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


def _planned(job: SaveJob, agents: Agents, save: TrainerSave, key: bytes, encoded: EncodedHoldings) -> Plan:
    """Make a plan for a layout that is new; all ranks have to come to this save before it is known."""
    with job.recorder.phase("assign"):
        owners = save.owners(job.options.timeout_s)
    with job.recorder.phase("plan"):
        holdings = encoded.resolved(messages.unpacked(owners, "i8"))
        plan = Plan(outline(holdings, agents.link.rank, job.options.max_file_nbytes))
    agents.keep(key, plan)
    return plan


def _leased(job: SaveJob, save: TrainerSave, arenas: Arenas, images: list[Image]) -> Lease:
    """Return an arena for the images, waiting for one as the options say."""
    clock, skip = Stopwatch(), job.options.when_busy == "skip"
    with job.recorder.phase("back_pressure"), clock.lap():
        lease = arenas.acquire(
            image_nbytes([image.nbytes for image in images]), 0.0 if skip else job.options.timeout_s
        )
        if lease is None and skip:
            raise SkippedError(
                "earlier saves are still being written, and this one was skipped",
                remedy="save less often, or wait for them with when_busy='wait'",
            )
        if lease is None:
            raise DeadlineError(f"earlier saves gave no host memory free within {job.options.timeout_s:g} s")
    save.waited_s = clock.seconds
    save.take(arenas, lease)
    if lease.fresh:
        with suppress(ShortageError):  # the next save makes its arena itself, and blocks for that
            start_thread("reknit-warms", arenas.warm)
    return lease


def _make_arenas(agents: Agents, arenas: Arenas, images: list[Image]) -> None:
    """Make as many arenas for the images as there may be, but for those that saves under way still have."""
    nbytes = image_nbytes([image.nbytes for image in images])
    leases: list[Lease] = []
    try:
        while nbytes and len(leases) < MAX_ARENAS and (lease := arenas.acquire(nbytes, 0.0)) is not None:
            leases.append(lease)
            _share(agents, lease)
    finally:
        for lease in leases:
            arenas.release(lease)


def _share(agents: Agents, lease: Lease) -> None:
    """Let the devices and the agent use an arena, too."""
    if lease.fresh:
        lease.arena.hold(pin(lease.arena.bytes))
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
