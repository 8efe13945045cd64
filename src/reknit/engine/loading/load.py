"""The load story, in numbered steps: from a committed checkpoint to this rank's live objects."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from reknit.comm import base as comm
from reknit.engine import messages
from reknit.engine.loading.locate import FIRST_ROUND as FIRST_ROUND
from reknit.engine.loading.locate import Located, locate, open_for_all, within_deadline
from reknit.engine.loading.match import Fill, Problems, require_fit, terms
from reknit.engine.loading.metadata import Metadata
from reknit.engine.loading.read import RangeReader, granularity
from reknit.engine.loading.ties import unequal
from reknit.engine.memory.workers import start
from reknit.engine.report import LoadReport
from reknit.engine.sharing.exchange import StoppedError
from reknit.engine.sharing.shared_read import SharedRead, share_out
from reknit.engine.stored.opening import REPLACED, REPLACED_TRIES, is_replaced
from reknit.engine.stored.verify import check_all, check_sizes
from reknit.errors import CommError, ReknitError
from reknit.monitor.progress import progress
from reknit.planner.load import plan_load
from reknit.types.shard import full_name
from reknit.types.wanted import matches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.engine.loading.metadata import Handout
    from reknit.engine.sharing.host_exchange import Carrier
    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.monitor.phase import Recorder
    from reknit.options import LoadOptions
    from reknit.storage.base import Storage
    from reknit.types.manifest import Catalog
    from reknit.types.plan import LoadPlan
    from reknit.types.wanted import Wanted


logger = logging.getLogger("reknit")

_PARTLY = "; the target is partly written"


@dataclass(frozen=True, slots=True)
class LoadJob:
    """What one rank is given to load."""

    want: Callable[[Catalog], Wanted]
    group: comm.Group
    storage: Storage
    items: tuple[str, ...]
    options: LoadOptions
    recorder: Recorder
    carrier: Callable[[], Carrier] | None = None
    """Makes what brings bytes to other hosts, where there is something."""
    replicas: Sequence[Storage] = ()
    """Other copies of the checkpoint."""

    @property
    def substitutes(self) -> Sequence[Storage]:
        """Those of the copies that may take the place of what is damaged."""
        return self.replicas if self.options.on_corrupt == "replica" else ()


class _Prepared(NamedTuple):
    """A load that only has to be carried out."""

    checkpoint: OpenCheckpoint
    wanted: Wanted
    fills: list[Fill]
    problems: Problems
    plan: LoadPlan
    reader: RangeReader
    joint: SharedRead | None


def load(job: LoadJob) -> LoadReport:
    """Load into the live objects.  Every rank returns, or every rank raises the same error.

    Where another checkpoint takes the place of the one that is read, whose files vanish then, all ranks load
    that one instead.
    """
    for _ in range(REPLACED_TRIES - 1):
        opened: list[Metadata] = []
        try:
            return _load(job, opened)
        except REPLACED as error:
            if not _replaced(job, opened):
                raise
            logger.info("%s was replaced while it was read; loading anew: %s", job.storage.url, error)
    return _load(job, [])


def _replaced(job: LoadJob, opened: Sequence[Metadata]) -> bool:
    """Let the root look for all ranks whether the checkpoint that they opened is still there."""

    def look(requests: Sequence[bytes]) -> list[bytes]:
        write_ids = [metadata.checkpoint.manifest.write_id for metadata in opened]
        found = any(is_replaced(job.storage, write_id) for write_id in write_ids)
        return [b"replaced" if found else b""] * len(requests)

    return comm.round(job.group, "look_again", bytes, look, job.options.timeout_s) != b""


def _load(job: LoadJob, opened: list[Metadata]) -> LoadReport:
    """Load once; on the root, `opened` gets what it has read for all."""
    with progress(job.recorder, start, wanted=job.options.progress), ExitStack() as last:
        # 1 the root reads manifest and index for everyone, 2 what this rank wants, and where that lies
        metadata = open_for_all(job)
        if isinstance(metadata, Metadata):
            opened.append(metadata)
        located = locate(job, metadata)
        # 3 which bytes that is, and 4 one round: whatever does not fit on any rank is an error on all, before
        # a byte of any target changes
        ready, agreed = _prepare_all(job, located, last)
        # 5 read, verify, scatter; 6 hand over what is no tensor
        received = _fill_all(job, ready, agreed)
    return _report(job, ready, agreed, received)


def _prepare_all(job: LoadJob, located: Located, last: ExitStack) -> tuple[_Prepared, messages.LoadDecision]:
    """Prepare this rank's load, and return when all ranks' loads fit; raises what does not."""
    prepared: list[_Prepared] = []

    def prepare() -> bytes:
        prepared.append(_prepare(job, located))
        joint = prepared[0].joint
        if joint is not None:
            last.callback(joint.close)
        return _wish(job, prepared[0], None if joint is None else joint.offer())

    def decide(requests: Sequence[bytes]) -> list[bytes]:
        assert located.handout is not None
        return _agree(job, located.handout, requests)

    with job.recorder.phase("agree"):
        answer = comm.round(job.group, "agree", prepare, decide, job.options.timeout_s)
    return prepared[0], messages.decode(answer, messages.LoadDecision)


def _fill_all(job: LoadJob, ready: _Prepared, agreed: messages.LoadDecision) -> int:
    """Change the live objects of all ranks; return the bytes that came to this rank from others."""
    received = [0]
    job.recorder.expect(ready.plan.nbytes)

    def fill() -> bytes:
        try:
            received[0] = _fill(job, ready, agreed.share)
        except StoppedError as error:
            return messages.encode(messages.Stopped(job.group.rank, error.message))
        return b""

    comm.round(job.group, "load", fill, _none_stopped, job.options.timeout_s)
    return received[0]


def _prepare(job: LoadJob, located: Located) -> _Prepared:
    """Find out 3 which bytes this rank takes (pure), and whether the files are there."""
    wanted, fills, problems = located.sought[2:5]
    with job.recorder.phase("plan"):
        checkpoint, alike = located.found(job.group.rank)
        plan = _plan(checkpoint, fills, job.options)
    problems.damaged.extend(_damaged(job, checkpoint, plan, alike))
    if wanted.aliases and not problems.damaged:
        problems.mismatched.extend(
            unequal(checkpoint, wanted, fills, job.options, job.replicas, job.recorder)
        )
    cast = frozenset(n for n, f in enumerate(fills) if f.cast)
    targets, tensors = [f.target for f in fills], [f.tensor for f in fills]
    reader = RangeReader(
        checkpoint,
        plan,
        targets,
        tensors,
        cast,
        job.options,
        replicas=job.replicas,
        moved=job.recorder.advance,
    )
    joint = None
    if job.group.size > 1 and job.options.share != "never":
        joint = SharedRead.begin(job.group, job.carrier, reader, checkpoint.index.files, job.options)
    return _Prepared(checkpoint, wanted, fills, problems, plan, reader, joint)


def _fill(job: LoadJob, ready: _Prepared, share: messages.SharePlan | None) -> int:
    """Change this rank's live objects; return the bytes that came from other ranks."""
    received = 0
    try:
        if ready.joint is not None and share is not None:
            received = ready.joint.run(share, job.recorder, job.options.timeout_s)
        else:
            ready.reader.run(job.recorder, job.options.timeout_s)
        with job.recorder.phase("deliver"):
            ready.wanted.deliver()
    except ReknitError as error:
        error.message += _PARTLY
        raise
    except BaseException as error:  # an interrupt, or a `load_state_dict` that fails, is raised as it is
        told = "the load of %s was ended by %s" + _PARTLY
        logger.warning(told, job.storage.url, type(error).__name__)
        raise
    return received


def _none_stopped(requests: Sequence[bytes]) -> list[bytes]:
    """Raise an error when ranks were stopped by others and no rank says why; answer all otherwise."""
    stopped = [messages.decode(request, messages.Stopped) for request in requests if request]
    if stopped:
        ranks = ", ".join(str(one.rank) for one in stopped[:8])
        raise CommError(f"rank {ranks} could not go on: {stopped[0].why}", rank=stopped[0].rank, phase="load")
    return [b""] * len(requests)


def _damaged(job: LoadJob, checkpoint: OpenCheckpoint, plan: LoadPlan, alike: Sequence[int]) -> list[str]:
    """Say what is wrong with the files that this rank reads or, on request, with its share of all bytes.

    Ranks that read the same files look at some of them each.
    """
    if job.options.verify == "full":
        with job.recorder.phase("verify"):
            check = partial(check_all, checkpoint, job.group.rank, job.group.size, job.options)
            return within_deadline(job, "checking all files of", check)
    paths = [checkpoint.index.files[file] for file in plan.files]
    files = [checkpoint.files[path] for path in sorted(paths)[alike.index(job.group.rank) :: len(alike)]]
    check = partial(check_sizes, checkpoint.storage, files, job.replicas)
    return within_deadline(job, "looking for files of", check)


def _plan(checkpoint: OpenCheckpoint, fills: Sequence[Fill], options: LoadOptions) -> LoadPlan:
    """Plan the reads of all fills."""
    index = checkpoint.index
    sizes = [checkpoint.files[path].nbytes for path in index.files]
    cut = granularity(options, checkpoint.manifest.block_nbytes, checkpoint.storage.reading)
    return plan_load(index, [(f.tensor, f.box) for f in fills], sizes, cut)


def _wish(job: LoadJob, ready: _Prepared, offer: messages.Offer | None) -> bytes:
    """Return what does not fit, less what a lenient load puts up with, and what this rank would read."""
    wanted, problems, lenient = ready.wanted, ready.problems, job.options.lenient
    return messages.encode(
        messages.LoadRequest(
            rank=job.group.rank,
            missing=[p for p in problems.missing if not matches(p[0], lenient)],
            mismatched=[p for p in problems.mismatched if not matches(p[0], lenient)],
            idle=list(wanted.idle),
            damaged=problems.damaged,
            offer=offer,
        )
    )


def _agree(job: LoadJob, handout: Handout, requests: Sequence[bytes]) -> list[bytes]:
    """Raise one error that lists what does not fit on any rank, or answer what no rank takes."""
    wishes = [messages.decode(request, messages.LoadRequest) for request in requests]
    taken = terms(job.options).takes
    unexpected = [name for key in handout.left if taken(name := full_name(*key))]
    require_fit(wishes, unexpected, job.options, job.storage.url, handout.damaged)
    shares = share_out([wish.offer for wish in wishes], job.options)
    return [messages.encode(messages.LoadDecision(unexpected, handout.items, share)) for share in shares]


def _report(job: LoadJob, ready: _Prepared, agreed: messages.LoadDecision, received: int) -> LoadReport:
    """Tell what was restored, and how."""
    checkpoint, wanted, fills, problems, plan, reader, _ = ready
    index = checkpoint.index
    whole = {
        w
        for w, chunk in zip(plan.wanted.tolist(), plan.chunk.tolist(), strict=True)
        if fills[w].box.numel == index.lengths[chunk].prod()
    }
    return LoadReport(
        path=job.storage.url,
        step=checkpoint.manifest.step,
        metadata=checkpoint.manifest.metadata,
        restored=tuple(
            dict.fromkeys(
                [f.name for f in fills if f.name not in problems.resized]
                + [full_name(*key) for key in wanted.blobs + wanted.own]
            )
        ),
        missing=tuple(name for name, _ in problems.missing),
        unexpected=tuple(agreed.unexpected),
        mismatched=dict(problems.mismatched) | problems.resized,
        left=tuple(agreed.left),
        cast=tuple(dict.fromkeys(f.name for f in fills if f.cast)),
        resharded=tuple(
            dict.fromkeys(
                f.name
                for n, f in enumerate(fills)
                if n not in whole and f.box.numel and f.name not in problems.resized
            )
        ),
        notes={full_name(item, fqn): what for item, fqn, what in wanted.notes},
        nbytes_wanted=sum(f.box.numel * index.tensors[f.tensor].spec.itemsize for f in fills),
        nbytes_read=reader.nbytes_read,
        nbytes_received=received,
        phases=tuple(job.recorder.records),
    )
