"""The load story, in numbered steps: from a committed checkpoint to this rank's live objects."""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from reknit.comm import group as comm
from reknit.engine import messages
from reknit.engine.loading.collect import collect, request_items, unequal
from reknit.engine.loading.contents import ReceivedMetadata
from reknit.engine.loading.root import MOST_LACKING, LoadCoordinator
from reknit.engine.loading.task import LoadPart
from reknit.engine.reports import LoadReport, other_files, unchecked
from reknit.engine.sharing.tracker import StoppedError
from reknit.engine.stored.places import retry_if_changed as again
from reknit.engine.stored.verify import check_all, check_sizes
from reknit.errors import ReknitError
from reknit.events.progress import progress
from reknit.planner.columns import unpacked
from reknit.system import start_thread
from reknit.types.shard import full_name
from reknit.types.wanted import selects

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.engine.loading.collect import Collected
    from reknit.engine.loading.contents import RootMetadata
    from reknit.engine.loading.read import RangeReader
    from reknit.engine.loading.task import LoadJob
    from reknit.engine.messages import LoadDecision
    from reknit.engine.stored.opening import OpenCheckpoint


def load_report(
    job: LoadJob,
    collected: Collected,
    parts: Sequence[LoadPart],
    decision: LoadDecision,
) -> LoadReport:
    """Return the report of a successful load."""
    _, wanted, fills, problems, *_ = collected
    checkpoint = parts[-1].reader.checkpoint
    index, manifest = checkpoint.index, checkpoint.manifest
    cut = {name for part in parts for name in _cut(part)}
    full = [fill.name for fill in fills if fill.name not in problems.resized]
    values = [full_name(*key) for key in wanted.blobs + wanted.own]
    return LoadReport(
        path=job.storage.url,
        step=manifest.step,
        metadata=manifest.metadata,
        restored=_unique(full + values),
        missing=tuple(name for name, _ in problems.missing),
        unexpected=tuple(decision.unexpected),
        mismatched=dict(problems.mismatched) | problems.resized,
        left=tuple(decision.left),
        cast=_unique([fill.name for fill in fills if fill.cast]),
        resharded=_unique([name for name in full if name in cut]),
        notes=other_files(manifest) | {full_name(item, fqn): what for item, fqn, what in wanted.notes},
        nbytes_wanted=sum(fill.box.numel * index.tensors[fill.tensor].spec.itemsize for fill in fills),
        nbytes_read=sum(part.reader.nbytes_read for part in parts),
        nbytes_received=sum(part.nbytes_received for part in parts),
        phases=tuple(job.recorder.records),
        unchecked=unchecked(manifest),
        saved_by=_number(manifest.origin.get("world_size")),
    )


def _number(value: object) -> int | None:
    """Return a number that a manifest has, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _cut(part: LoadPart) -> list[str]:
    """Return the names of the boxes that do not consist of exactly one chunk."""
    plan, lengths = part.reader.plan, part.reader.checkpoint.index.lengths
    rows = zip(plan.wanted.tolist(), lengths[plan.chunk].prod(axis=1).tolist(), strict=True)
    whole = {number for number, numel in rows if part.fills[number].box.numel == numel}
    return [fill.name for number, fill in enumerate(part.fills) if number not in whole and fill.box.numel]


def _unique(names: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


logger = logging.getLogger("reknit")

FIRST_ROUND = "open"
"""The round in which a load begins."""

_UNCHANGED = "; reknit had changed no tensor of the target yet"
_OWN_UNCHANGED = "; no tensor of this rank had changed yet, but those of other ranks may be partly written"
_PARTLY = "; the target is partly written"


def load(job: LoadJob) -> LoadReport:
    """Load into the live objects.  Every rank returns, or every rank raises the same error.

    When the files move, or another checkpoint replaces the one that is read, all ranks load anew.  Raises
    `CheckpointNotFoundError` when it is deleted meanwhile.
    """
    return again(partial(LoadCoordinator, job), partial(_load, job), partial(_look_again, job))


def _load(job: LoadJob, root: LoadCoordinator) -> LoadReport:
    """Load once; `root` decides for all ranks, on rank 0."""
    group, options, recorder, timeout_s = job.group, job.options, job.recorder, job.options.timeout_s
    with progress(recorder, start_thread, wanted=options.progress), ExitStack() as last:
        # 1 Open: the root reads manifest, index and shared values for everyone.
        with recorder.phase("open"), comm.turn(group, FIRST_ROUND, timeout_s, opens=True) as turn:
            wanted = turn.gather(request_items(job))
            offers = None if wanted is None else root.open(wanted)
            contents = turn.give(offers, messages.ItemContents)

        # 2 Collect the entries that the target takes; the root answers with their places.
        with recorder.phase("locate"), comm.turn(group, "locate", timeout_s) as turn:
            metadata = root.metadata or ReceivedMetadata.of(contents, job)
            collected = collect(job, metadata.checkpoint)
            asked = turn.gather(collected.request())
            places = None if asked is None else root.locate(collected, asked)
            answer = turn.give(places, messages.Answer)

        # 3 Plan the reads.  4 Agree: a problem of any rank is an error on all ranks, before a byte of any
        # target changes.  Ranks that want the same bytes divide the reads.
        with recorder.phase("agree"), comm.turn(group, "agree", timeout_s) as turn:
            parts = _plan(job, metadata, collected, answer)
            early, late = parts
            if group.size > 1 and options.share != "never":
                for each in filter(None, parts):
                    each.share(job, last)
            loads = turn.gather(_request(job, collected, early, late))
            decisions = None if loads is None else root.agree(loads)
            decision = turn.give(decisions, messages.LoadDecision)

        # 5 Read, verify, deliver: first for objects, whose tensors are read into new memory.  When an object
        # refuses them, only its own code can have changed a live tensor.
        recorder.expect(sum(part.reader.plan.nbytes for part in parts if part is not None))
        for name, part, share, deliver in (
            ("objects", early, decision.early_share, collected.wanted.deliver_early),
            ("load", late, decision.share, collected.wanted.deliver),
        ):
            if name == "objects" and not decision.early:
                continue
            if share is not None and share.num_turns:
                # A rank without memory for the exchanges between hosts would block the other ranks in them.
                with comm.turn(group, "reserve", timeout_s) as turn:
                    if part is not None and part.shared is not None:
                        part.shared.reserve(share)
                    turn.arrive()
            stopped = messages.Stopped(group.rank)
            with comm.turn(group, name, timeout_s) as turn:
                try:
                    with _noting_target_state(
                        job, late, alone=group.size == 1 or name == "objects"
                    ) as target:
                        if part is not None and part.shared is not None and share is not None:
                            part.nbytes_received = part.shared.run(share, recorder, timeout_s)
                        elif part is not None:
                            part.reader.run(recorder, timeout_s)
                        target.is_delivered = part is late
                        with recorder.phase("deliver"):
                            deliver()
                except StoppedError as error:  # the rank that failed reports the cause, if one did
                    stopped.why = error.message
                ends = turn.gather(stopped)
                if ends is not None:
                    root.finish(ends)
                turn.arrive()
    return load_report(job, collected, [early, late] if early else [late], decision)


def _look_again(job: LoadJob, root: LoadCoordinator, error: ReknitError) -> bool:
    """Return, on all ranks, whether the checkpoint has changed since the read that failed with `error`."""
    with comm.turn(job.group, "look_again", job.options.timeout_s) as turn:
        changed = turn.gather(b"") is not None and root.look_again(error)
        has_changed = turn.give_all(changed, bool)
    if has_changed:
        logger.info("%s moved or was replaced while it was read; loading anew: %s", job.storage.url, error)
    return has_changed


def _plan(
    job: LoadJob,
    metadata: RootMetadata | ReceivedMetadata,
    collected: Collected,
    answer: messages.Answer,
) -> tuple[LoadPart | None, LoadPart]:
    """Plan the reads of this rank, first those for objects; add faults of files to its problems.

    The checkpoint of the readers has the rows of the index that they need.
    """
    _, wanted, fills, problems, *_ = collected
    with job.recorder.phase("plan"):
        checkpoint = metadata.with_rows(collected.checkpoint, collected.reach, answer)
        first = [fill for fill in fills if fill.name in wanted.early]
        early = LoadPart.of(job, checkpoint, first) if first else None
        others = [fill for fill in fills if fill.name not in wanted.early] if first else fills
        late = LoadPart.of(job, checkpoint, others)
    kinds = unpacked(answer.alike, "i4")
    alike = np.flatnonzero(kinds == kinds[job.group.rank]).tolist()
    problems.damaged.extend(_damaged(job, checkpoint, [early, late] if early else [late], alike))
    if wanted.aliases and not problems.damaged:
        problems.mismatched.extend(unequal(job, checkpoint, wanted, fills))
    return early, late


def _damaged(
    job: LoadJob, checkpoint: OpenCheckpoint, parts: Sequence[LoadPart], alike: list[int]
) -> list[str]:
    """Return the faults of the files that this rank reads; with ``verify="full"``, of a share of all files.

    The ranks `alike` read the same files, and divide the checks.
    """
    if job.options.verify == "full" and checkpoint.manifest.other is None:
        with job.recorder.phase("verify"):
            rank, size = job.group.rank, job.group.size
            check = partial(check_all, checkpoint, rank, size, job.options)
            return job.within_deadline("checking all files of", check)
    paths = {checkpoint.index.files[file] for part in parts for file in part.reader.plan.files}
    files = [checkpoint.files[path] for path in sorted(paths)[alike.index(job.group.rank) :: len(alike)]]
    check = partial(check_sizes, checkpoint.source, files, job.replicas)
    return job.within_deadline("looking for files of", check)


def _request(
    job: LoadJob, collected: Collected, early: LoadPart | None, late: LoadPart
) -> messages.LoadRequest:
    """Return the request of this rank: names that do not fit and are not accepted, and ranges to read."""
    wanted, problems, lenient = collected.wanted, collected.problems, job.lenient
    num_filled = len({fill.name for fill in collected.fills} | problems.resized.keys()) + wanted.num_kept
    most = MOST_LACKING if lenient and not num_filled else 0
    return messages.LoadRequest(
        rank=job.group.rank,
        missing=[p for p in problems.missing if not selects(p[0], lenient)],
        mismatched=[p for p in problems.mismatched if not selects(p[0], lenient)],
        idle=list(wanted.idle),
        damaged=problems.damaged,
        offer=late.offer(),
        idle_rules=[] if collected.transformed is None else list(collected.transformed.idle),
        num_tensors=wanted.num_tensors,
        num_filled=num_filled,
        num_values=len(wanted.blobs) + len(wanted.own) - wanted.num_kept,
        lacking=problems.missing[:most],
        unfit=problems.mismatched[:most],
        refused=problems.refused,
        early=wanted.has_early,
        early_offer=None if early is None else early.offer(),
    )


@dataclass
class _Target:
    """The target of a rank, and whether reknit has begun to deliver values into it."""

    reader: RangeReader
    alone: bool
    """Whether no other rank delivers at the same time."""
    is_delivered: bool = False

    def __str__(self) -> str:
        if self.is_delivered or self.reader.touched:
            return _PARTLY
        return _UNCHANGED if self.alone else _OWN_UNCHANGED


@contextmanager
def _noting_target_state(job: LoadJob, late: LoadPart, *, alone: bool) -> Iterator[_Target]:
    """Add the state of the target to errors that pass."""
    target = _Target(late.reader, alone)
    try:
        yield target
    except ReknitError as error:
        error.message += str(target)
        raise
    except BaseException as error:  # an interrupt is raised as it is
        logger.warning("the load of %s was ended by %s%s", job.storage.url, type(error).__name__, target)
        raise
