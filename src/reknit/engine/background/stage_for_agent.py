"""The save story of a trainer that does not wait, in numbered steps, and its rehearsal."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reknit.engine import messages
from reknit.engine.background import messages as say
from reknit.engine.background.agents import Plan
from reknit.engine.background.snapshot import Snapshot
from reknit.engine.memory.arena import image_nbytes
from reknit.engine.memory.arena_pool import MAX_ARENAS
from reknit.engine.memory.elements import all_bits
from reknit.engine.memory.staging import Staging, pin
from reknit.engine.memory.workers import start
from reknit.engine.saving.claims import bring
from reknit.engine.saving.commit import check_manifest
from reknit.engine.saving.copies import choose
from reknit.engine.saving.file_layout import layout_digest, outline
from reknit.errors import DeadlineError, ShortageError, SkippedError
from reknit.monitor.phase import Stopwatch
from reknit.types.shard import Encoded

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.engine.background.agents import Agents
    from reknit.engine.background.trainer_save import TrainerSave
    from reknit.engine.memory.arena_pool import Arenas, Lease
    from reknit.engine.saving.claims import Brought
    from reknit.engine.saving.commit import Destination
    from reknit.engine.saving.write import Image
    from reknit.monitor.phase import Recorder
    from reknit.options import SaveOptions
    from reknit.types.shard import Blob, Holdings, SharedFile

_FOR_AGENT = (
    "allow_pickle",
    "check_replicas",
    "durability",
    "events",
    "piece_nbytes",
    "threads",
    "timeout_s",
)


@dataclass(frozen=True, slots=True)
class SendOff:
    """What one rank is given to save in the background.

    An agent opens the storage again, by its `url`, with the `factory` that only this process knows, if there
    is one (`storage.registry.recipe`).
    """

    collect: Callable[[], Holdings]
    to: Destination
    url: str
    factory: str | None
    options: SaveOptions
    recorder: Recorder
    promote_to: tuple[str, str | None] | None = None
    """URL and factory of the store that is to have the checkpoint too."""


def send_off(job: SendOff, crew: Agents, handover: TrainerSave, arenas: Arenas) -> None:
    """Return when the state may be changed or, with ``stage="lazy"``, when copying it has begun."""
    clock, recorder = Stopwatch(), job.recorder
    with clock.lap():
        # 1 what does this rank hold (local)
        brought, key = _brought(job)
        if crew.link.rank == 0:
            check_manifest(job.to)
        known = crew.plan(handover, key)
        with recorder.phase("digest"):
            sources = all_bits(brought.holdings.shards)
            check = job.options.check_replicas
            chosen = (known and known.chosen.get(check)) or choose(brought, check, crew.link.rank, crew.size)
            copies = chosen.copies(sources)
        _lend(crew, handover, brought)
        handover.begin(_begin(job, crew, handover, key, brought, known, copies), recorder)
        # 2 plan; where the layout was saved, or rehearsed, before, no rank waits for another
        plan = known or _planned(job, crew, handover, key, brought)
        plan.chosen[check] = chosen
        with recorder.phase("plan"):
            images = plan.outline.images(handover.write_id, sources)
        # 3 stage
        lease = _leased(job, handover, arenas, images)
        _share(crew, lease)
        _hand_over(job, crew, handover, lease, brought, plan)
        snapshot = Snapshot(brought.holdings.shards, sources, images, lease, handover, job.options)
        handover.streamed = snapshot.streamed
        lazy = job.options.stage == "lazy" and not snapshot.streamed
        with recorder.phase("stage", nbytes=sum(image.nbytes for image in images)):
            if lazy:
                snapshot.prepare()
            else:
                snapshot.take()
    handover.blocked_s = clock.seconds
    if lazy:
        start("reknit-stages", lambda: _settle(job, handover, snapshot))
    else:
        handover.staged()


def rehearse(job: SendOff, crew: Agents, handover: TrainerSave, arenas: Arenas) -> None:
    """Do ahead of a save, with all ranks together, what its layout will need; nothing is copied or written.

    Every rank makes its plan anew, so that all ranks' plans fit each other whatever was saved before.
    """
    brought, key = _brought(job)
    begin = _begin(job, crew, handover, key, brought, None, messages.NO_COPIES)
    begin.blobs, begin.rehearsal = [], True  # values are assigned with each save
    begin.promote_to = None
    handover.begin(begin, job.recorder)
    plan = _planned(job, crew, handover, key, brought)
    with job.recorder.phase("plan"):
        sources = all_bits(brought.holdings.shards)
        images = plan.outline.images(handover.write_id, sources)
        Staging(sources)  # the stream of each device that will be copied from
    with job.recorder.phase("back_pressure"):
        _make_arenas(crew, arenas, images)
    handover.staged()
    crew.link.send(say.Ready(handover.number))


def _brought(job: SendOff) -> tuple[Brought, bytes]:
    """Return what this rank holds, and what stands for the layout of it."""
    with job.recorder.phase("collect"):
        brought = bring(job.collect(), job.options)
        return brought, layout_digest(brought.holdings, job.options.max_file_nbytes)


def _begin(
    job: SendOff,
    crew: Agents,
    handover: TrainerSave,
    key: bytes,
    brought: Brought,
    known: Plan | None,
    copies: messages.Copies,
) -> say.Begin:
    """Return what the agent is told first; only the root's needs what goes to the manifest alone."""
    root = crew.link.rank == 0
    extra = {"origin": job.to.origin if root else {}, "metadata": job.to.metadata if root else {}}
    return say.Begin(
        number=handover.number,
        write_id=handover.write_id,
        url=job.url,
        factory=job.factory,
        step=job.to.step,
        overwrite=job.to.overwrite,
        options={name: getattr(job.options, name) for name in _FOR_AGENT},
        extra=json.dumps(extra, default=dict).encode(),
        plan=key,
        claims=brought.shard_claims() if known is None else None,
        blobs=[
            messages.EncodedBlob(blob.item, blob.key, blob.coordinate, b"") if _lent(saved, blob) else blob
            for saved, blob in zip(brought.holdings.blobs, brought.blobs, strict=True)
        ],
        promote_to=job.promote_to,
        copies=copies,
    )


def _lent(blob: Blob, encoded: messages.EncodedBlob) -> Encoded | None:
    """Return the value if the agent can map it instead of getting a copy."""
    value = blob.value
    in_place = isinstance(value, Encoded) and value.file is not None and not isinstance(encoded.data, bytes)
    return value if in_place else None


def _lend(crew: Agents, handover: TrainerSave, brought: Brought) -> None:
    """Let the agent map values that lie, encoded, in shared memory."""
    files: dict[SharedFile, list[tuple[int, int, int]]] = {}
    for number, (blob, encoded) in enumerate(zip(brought.holdings.blobs, brought.blobs, strict=True)):
        value = _lent(blob, encoded)
        if value is not None and value.file is not None:
            end = value.at + len(value.memory)
            files.setdefault(value.file, []).append((number, end - len(encoded.data), end))
    for file, places in files.items():
        crew.link.send(say.Lend(handover.number, file.nbytes, places), file.fd)


def _planned(job: SendOff, crew: Agents, handover: TrainerSave, key: bytes, brought: Brought) -> Plan:
    """Make a plan for a layout that is new; all ranks have to come to this save before it is known."""
    with job.recorder.phase("assign"):
        owners = handover.owners(job.options.timeout_s)
    with job.recorder.phase("plan"):
        holdings = brought.resolved(messages.unpacked(owners, "i8"))
        plan = Plan(outline(holdings, crew.link.rank, job.options.max_file_nbytes))
    crew.keep(key, plan)
    return plan


def _leased(job: SendOff, handover: TrainerSave, arenas: Arenas, images: list[Image]) -> Lease:
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
    handover.waited_s = clock.seconds
    handover.take(arenas, lease)
    if lease.fresh:
        with suppress(ShortageError):  # the next save makes its arena itself, and blocks for that
            start("reknit-warms", arenas.warm)
    return lease


def _make_arenas(crew: Agents, arenas: Arenas, images: list[Image]) -> None:
    """Make as many arenas for the images as there may be, but for those that saves under way still have."""
    nbytes = image_nbytes([image.nbytes for image in images])
    leases: list[Lease] = []
    try:
        while nbytes and len(leases) < MAX_ARENAS and (lease := arenas.acquire(nbytes, 0.0)) is not None:
            leases.append(lease)
            _share(crew, lease)
    finally:
        for lease in leases:
            arenas.release(lease)


def _share(crew: Agents, lease: Lease) -> None:
    """Let the devices and the agent use an arena, too."""
    if lease.fresh:
        lease.arena.hold(pin(lease.arena.bytes))
    if dropped := tuple(number for number in lease.dropped if number in crew.arenas):
        crew.link.send(say.DropArenas(dropped))
        crew.arenas.difference_update(dropped)
    if lease.number not in crew.arenas:
        crew.link.send(say.GiveArena(lease.number, lease.arena.nbytes), lease.arena.fd)
        crew.arenas.add(lease.number)


def _hand_over(
    job: SendOff, crew: Agents, handover: TrainerSave, lease: Lease, brought: Brought, plan: Plan
) -> None:
    """Tell the agent what will be in the arena."""
    files = [(f.plan.item, f.plan.part, f.nbytes) for f in plan.outline.files]
    columns = None if plan.committed else plan.outline.columns
    crew.link.send(
        say.Planned(
            handover.number,
            list(brought.holdings.items),
            files,
            columns,
            lease.number,
            lease.nbytes,
        )
    )


def _settle(job: SendOff, handover: TrainerSave, snapshot: Snapshot) -> None:
    """Finish the copying of a lazily staged save."""
    try:
        snapshot.settle()
    except BaseException as error:  # whatever it is, all ranks must hear of it
        handover.abandon(error, job.options.timeout_s)
    else:
        handover.staged()
