"""The load story, in numbered steps: from a committed checkpoint to this rank's live objects."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from reknit.comm import base as comm
from reknit.engine import messages
from reknit.engine.exchange import StoppedError
from reknit.engine.joint import Joint, share_out
from reknit.engine.match import Fill, Problems, match, require_fit, terms, uncovered
from reknit.engine.metadata import Metadata, read_for_all
from reknit.engine.opening import opened
from reknit.engine.pipeline import start, within
from reknit.engine.read import Reader, granularity
from reknit.engine.renaming import Naming
from reknit.engine.report import LoadReport
from reknit.engine.verify import check_all, check_sizes
from reknit.errors import CommError, ReknitError
from reknit.monitor.progress import progress
from reknit.planner.load import plan_load
from reknit.types.shard import full_name
from reknit.types.wanted import matches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from reknit.engine.opening import OpenCheckpoint
    from reknit.engine.turns import Carrier
    from reknit.monitor.phase import Recorder
    from reknit.options import LoadOptions
    from reknit.storage.base import Storage
    from reknit.types.manifest import Catalog
    from reknit.types.plan import LoadPlan
    from reknit.types.wanted import Wanted


_PARTLY = "; the target is partly written"
_Result = TypeVar("_Result")

FIRST_ROUND = "open"
"""The round in which a load begins."""


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


class _Prepared(NamedTuple):
    """A load that only has to be carried out."""

    checkpoint: OpenCheckpoint
    wanted: Wanted
    fills: list[Fill]
    problems: Problems
    plan: LoadPlan
    reader: Reader
    joint: Joint | None


def load(job: LoadJob) -> LoadReport:
    """Load into the live objects.  Every rank returns, or every rank raises the same error."""
    with progress(job.recorder, start, wanted=job.options.progress), ExitStack() as last:
        # 1 the root reads manifest and index for everyone
        metadata = _open(job)
        # 2 what this rank wants, 3 which bytes that is, and 4 one round: whatever does not fit on any rank is
        # an error on all, before a byte of any target changes
        ready, agreed = _prepare_all(job, metadata, last)
        # 5 read, verify, scatter; 6 hand over what is no tensor
        received = _fill_all(job, ready, agreed)
    return _report(job, ready, agreed.unexpected, received)


def _open(job: LoadJob) -> Metadata | bytes:
    """Return what the root read for all ranks, on the root, and this rank's part of it elsewhere."""
    read: list[Metadata] = []

    def decide(requests: Sequence[bytes]) -> list[bytes]:
        wanted = [messages.decode(request, messages.Items) for request in requests]
        metadata = _within(
            job,
            "reading manifest and index of",
            lambda: read_for_all(
                job.storage,
                wanted,
                allow_pickle=job.options.allow_pickle,
                naming=Naming.of(job.options),
                whole_for_all=job.options.verify == "full",
            ),
        )
        read.append(metadata)
        return metadata.answers

    with job.recorder.phase("open"):
        part = comm.round(job.group, FIRST_ROUND, lambda: _items(job), decide, job.options.timeout_s)
    return read[0] if read else part


def _prepare_all(
    job: LoadJob, metadata: Metadata | bytes, last: ExitStack
) -> tuple[_Prepared, messages.Agreed]:
    """Prepare this rank's load, and return when all ranks' loads fit; raises what does not."""
    prepared: list[_Prepared] = []

    def prepare() -> bytes:
        prepared.append(_prepare(job, metadata))
        joint = prepared[0].joint
        if joint is not None:
            last.callback(joint.close)
        return _wish(job, prepared[0], None if joint is None else joint.offer())

    def decide(requests: Sequence[bytes]) -> list[bytes]:
        assert isinstance(metadata, Metadata)
        return _agree(job, metadata.checkpoint, requests)

    with job.recorder.phase("agree"):
        answer = comm.round(job.group, "agree", prepare, decide, job.options.timeout_s)
    return prepared[0], messages.decode(answer, messages.Agreed)


def _fill_all(job: LoadJob, ready: _Prepared, agreed: messages.Agreed) -> int:
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


def _items(job: LoadJob) -> bytes:
    """Return which items this rank wants; ranks may want different ones."""
    # A lenient pattern that matches a name in the item, whatever it is, covers the absence of them all.
    some = bool(job.options.only)  # then each name that is missing is told by itself
    optional = [item for item in job.items if some or matches(f"{item}/", job.options.lenient)]
    return messages.encode(messages.Items(list(job.items), optional))


def _opened(job: LoadJob, metadata: Metadata | bytes) -> OpenCheckpoint:
    """Return the checkpoint as far as this rank asked for it."""
    if isinstance(metadata, Metadata):
        return metadata.checkpoint.of_items(job.items)
    message = messages.decode(metadata, messages.Opened)
    naming, trusted = Naming.of(job.options), job.options.allow_pickle
    whole = opened(job.storage, message, job.items, allow_pickle=trusted, naming=naming)
    return whole.of_items(job.items)


def _prepare(job: LoadJob, metadata: Metadata | bytes) -> _Prepared:
    """Find out 2 what this rank wants (local), and 3 which bytes that is (pure)."""
    checkpoint = _opened(job, metadata)
    with job.recorder.phase("collect"):
        catalog = checkpoint.catalog(terms(job.options))
        own = partial(_own, job, catalog)
        wanted = job.want(replace(catalog, own=own))
    with job.recorder.phase("plan"):
        fills, problems = match(checkpoint.index, wanted, job.options, checkpoint.stored)
        plan = _plan(checkpoint, fills, job.options)
        problems.damaged.extend(uncovered(checkpoint.index, fills))
    problems.damaged.extend(_damaged(job, checkpoint, plan))
    cast = frozenset(n for n, f in enumerate(fills) if f.cast)
    targets, tensors = [f.target for f in fills], [f.tensor for f in fills]
    reader = Reader(
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
        joint = Joint.begin(job.group, job.carrier, reader, checkpoint.index.files, job.options)
    return _Prepared(checkpoint, wanted, fills, problems, plan, reader, joint)


def _own(job: LoadJob, catalog: Catalog, item: str, coordinate: Mapping[str, int]) -> Mapping[str, Any]:
    """Return what the rank with a coordinate saved for itself."""
    return _within(job, f"reading values of {item!r} of", lambda: catalog.own(item, coordinate))


def _within(job: LoadJob, what: str, work: Callable[[], _Result]) -> _Result:
    """Ask the storage for something, and wait for it no longer than other ranks would wait for this one."""
    return within(job.options.timeout_s, lambda: f"{what} {job.storage.url}", work)


def _fill(job: LoadJob, ready: _Prepared, share: messages.Share | None) -> int:
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
    return received


def _none_stopped(requests: Sequence[bytes]) -> list[bytes]:
    """Raise an error when ranks were stopped by others and no rank says why; answer all otherwise."""
    stopped = [messages.decode(request, messages.Stopped) for request in requests if request]
    if stopped:
        ranks = ", ".join(str(one.rank) for one in stopped[:8])
        raise CommError(f"rank {ranks} could not go on: {stopped[0].why}", rank=stopped[0].rank, phase="load")
    return [b""] * len(requests)


def _damaged(job: LoadJob, checkpoint: OpenCheckpoint, plan: LoadPlan) -> list[str]:
    """Say what is wrong with the files that this rank reads or, on request, with its share of all bytes."""
    if job.options.verify == "full":
        with job.recorder.phase("verify"):
            check = partial(check_all, checkpoint, job.group.rank, job.group.size, job.options)
            return _within(job, "checking all files of", check)
    paths = [checkpoint.index.files[file] for file in plan.files]
    files = [checkpoint.files[path] for path in paths]
    check = partial(check_sizes, checkpoint.storage, files, job.replicas)
    return _within(job, "looking for files of", check)


def _plan(checkpoint: OpenCheckpoint, fills: Sequence[Fill], options: LoadOptions) -> LoadPlan:
    """Plan the reads of all fills."""
    index = checkpoint.index
    sizes = [checkpoint.files[path].nbytes for path in index.files]
    cut = granularity(options, checkpoint.manifest.block_nbytes, checkpoint.storage.reading)
    return plan_load(index, [(f.tensor, f.box) for f in fills], sizes, cut)


def _blob_names(checkpoint: OpenCheckpoint) -> list[tuple[str, str]]:
    """Return (item, fqn) of all shared values of the loaded items, in an order that all ranks share."""
    return [(item, fqn) for item in checkpoint.items for fqn in checkpoint.blobs[item]]


def _wish(job: LoadJob, ready: _Prepared, offer: messages.Offer | None) -> bytes:
    """Return what this rank takes and what does not fit, less what a lenient load puts up with."""
    checkpoint, wanted, fills, problems = ready[:4]
    index, names = checkpoint.index, _blob_names(checkpoint)
    mentioned = {name for name, _ in problems.mismatched} | problems.resized.keys()
    taken = {index.tensors[f.tensor][:2] for f in fills} | {alias[:2] for alias in wanted.aliases}
    taken |= {key for key in index.ids if full_name(*key) in mentioned}
    lenient = job.options.lenient
    return messages.encode(
        messages.Wish(
            rank=job.group.rank,
            tensors=messages.bitmaps(index.ids, taken),
            blobs=messages.bitmaps(names, frozenset(wanted.blobs)),
            missing=[p for p in problems.missing if not matches(p[0], lenient)],
            mismatched=[p for p in problems.mismatched if not matches(p[0], lenient)],
            idle=list(wanted.idle),
            damaged=problems.damaged,
            offer=offer,
        )
    )


def _agree(job: LoadJob, checkpoint: OpenCheckpoint, requests: Sequence[bytes]) -> list[bytes]:
    """Raise one error that lists what does not fit on any rank, or answer what no rank takes."""
    wishes = [messages.decode(request, messages.Wish) for request in requests]
    left = messages.left_over(checkpoint.index.ids, [w.tensors for w in wishes])
    left += messages.left_over(_blob_names(checkpoint), [w.blobs for w in wishes])
    taken = terms(job.options).takes
    unexpected = [name for item, fqn in left if taken(name := full_name(item, fqn))]
    require_fit(wishes, unexpected, job.options, job.storage.url)
    shares = share_out([wish.offer for wish in wishes], job.options)
    return [messages.encode(messages.Agreed(unexpected, share)) for share in shares]


def _report(job: LoadJob, ready: _Prepared, unexpected: list[str], received: int) -> LoadReport:
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
        unexpected=tuple(unexpected),
        mismatched=dict(problems.mismatched) | problems.resized,
        cast=tuple(dict.fromkeys(f.name for f in fills if f.cast)),
        resharded=tuple(
            dict.fromkeys(
                f.name
                for n, f in enumerate(fills)
                if n not in whole and f.box.numel and f.name not in problems.resized
            )
        ),
        notes={full_name(item, fqn): what for item, fqn, what in (*wanted.notes, *_stored_apart(ready))},
        nbytes_wanted=sum(f.box.numel * index.tensors[f.tensor].spec.itemsize for f in fills),
        nbytes_read=reader.nbytes_read,
        nbytes_received=received,
        phases=tuple(job.recorder.records),
    )


def _stored_apart(ready: _Prepared) -> Iterator[tuple[str, str, str]]:
    """Yield notes on tensors that the target ties together and the checkpoint does not."""
    index = ready.checkpoint.index
    for item, fqn, of in ready.wanted.aliases:
        ours, theirs = (
            np.stack((index.file[rows], index.start[rows]))
            for rows in (slice(*index.first[t : t + 2]) for t in (index.ids[item, fqn], index.ids[item, of]))
        )
        if not np.array_equal(ours, theirs):
            yield item, fqn, f"stored apart from {of}, to which the target ties it: that one was taken"
