"""The load story, in numbered steps: from a committed checkpoint to this rank's live objects."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.comm import base as comm
from reknit.engine import messages
from reknit.engine.opening import check_size, opened, read_for_all
from reknit.engine.read import Reader, granularity
from reknit.engine.report import LoadReport
from reknit.errors import MismatchError, ReknitError
from reknit.planner.assemble import SHOWN
from reknit.planner.load import plan_load
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reknit.engine.opening import OpenCheckpoint
    from reknit.monitor.phase import Recorder
    from reknit.options import LoadOptions
    from reknit.storage.base import Storage
    from reknit.types.box import Box
    from reknit.types.manifest import Catalog
    from reknit.types.plan import LoadPlan
    from reknit.types.wanted import Wanted


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


class _Fill(NamedTuple):
    """A wanted box that will be filled: its name, its tensor in the index, where it goes."""

    name: str
    tensor: int
    box: Box
    target: Any
    cast: bool


class _Problems(NamedTuple):
    """What does not fit, as (item/fqn, reason)."""

    missing: list[tuple[str, str]]
    mismatched: list[tuple[str, str]]


class _Prepared(NamedTuple):
    """A load that only has to be carried out."""

    checkpoint: OpenCheckpoint
    wanted: Wanted
    fills: list[_Fill]
    problems: _Problems
    plan: LoadPlan


def load(job: LoadJob) -> LoadReport:
    """Load into the live objects.  Every rank returns, or every rank raises the same error."""
    # 1 the root reads manifest and index for everyone
    with job.recorder.phase("open"):
        metadata = comm.round(
            job.group,
            FIRST_ROUND,
            lambda: _items(job),
            lambda requests: _read_metadata(job, requests),
            job.options.timeout_s,
        )
    ready: list[_Prepared] = []

    def prepare() -> bytes:
        ready.append(_prepare(job, messages.decode(metadata, messages.Opened)))
        return _wish(job, ready[0])

    # 4 one round: whatever does not fit on any rank is an error on all, before a byte of any target changes
    with job.recorder.phase("agree"):
        answer = comm.round(
            job.group, "agree", prepare, lambda r: _agree(job, ready[0].checkpoint, r), job.options.timeout_s
        )
    unexpected = messages.decode(answer, messages.Agreed).unexpected
    # 5 read, verify, scatter; 6 hand over what is no tensor
    comm.round(
        job.group, "load", lambda: _fill(job, ready[0]), lambda r: [b""] * len(r), job.options.timeout_s
    )
    return _report(job, ready[0], unexpected)


def _items(job: LoadJob) -> bytes:
    """Return which items this rank wants; ranks may want different ones."""
    # A lenient pattern that matches a name in the item, whatever it is, covers the absence of them all.
    optional = [item for item in job.items if _is_lenient(f"{item}/", job.options.lenient)]
    return messages.encode(messages.Items(list(job.items), optional))


def _read_metadata(job: LoadJob, requests: Sequence[bytes]) -> list[bytes]:
    """Read manifest, index and shared values for all ranks, on the root."""
    wanted = [messages.decode(request, messages.Items) for request in requests]
    return [messages.encode(read_for_all(job.storage, wanted))] * len(requests)


def _prepare(job: LoadJob, metadata: messages.Opened) -> _Prepared:
    """Find out 2 what this rank wants (local), and 3 which bytes that is (pure)."""
    checkpoint = opened(job.storage, metadata, metadata.items, allow_pickle=job.options.allow_pickle)
    with job.recorder.phase("collect"):
        wanted = job.want(checkpoint.catalog())
    with job.recorder.phase("plan"):
        fills, problems = _fills(checkpoint, wanted, job.options)
        plan = _plan(checkpoint, fills, job.options)
        for file in sorted(set(plan.read_file.tolist())):
            check_size(checkpoint.storage, checkpoint.files[checkpoint.index.files[file]])
    return _Prepared(checkpoint, wanted, fills, problems, plan)


def _fill(job: LoadJob, ready: _Prepared) -> bytes:
    """Change the live objects."""
    fills = ready.fills
    cast = frozenset(n for n, f in enumerate(fills) if f.cast)
    targets, tensors = [f.target for f in fills], [f.tensor for f in fills]
    try:
        Reader(ready.checkpoint, ready.plan, targets, tensors, cast, job.options).run(job.recorder)
        with job.recorder.phase("deliver"):
            ready.wanted.deliver()
    except ReknitError as error:
        error.message += "; the target is partly written"
        raise
    return b""


def _fills(checkpoint: OpenCheckpoint, wanted: Wanted, options: LoadOptions) -> tuple[list[_Fill], _Problems]:
    """Match wanted shards with saved tensors by name, shape and dtype."""
    problems = _Problems(
        [(full_name(item, fqn), why) for item, fqn, why in wanted.missing],
        [(full_name(item, fqn), why) for item, fqn, why in wanted.mismatched],
    )
    fills = []
    for shard in wanted.shards:
        name = full_name(shard.item, shard.fqn)
        tensor = checkpoint.index.ids.get((shard.item, shard.fqn))
        if tensor is None:
            problems.missing.append((name, "not in the checkpoint"))
            continue
        saved = checkpoint.index.tensors[tensor].spec
        if saved.shape != shard.spec.shape:
            why = f"saved shape {list(saved.shape)}, wanted {list(shard.spec.shape)}"
            problems.mismatched.append((name, why))
        elif saved.dtype != shard.spec.dtype and not options.cast:
            why = f"saved dtype {saved.dtype}, wanted {shard.spec.dtype}"
            problems.mismatched.append((name, f"{why} (LoadOptions(cast=True) converts)"))
        else:
            fills.append(_Fill(name, tensor, shard.box, shard.data, saved.dtype != shard.spec.dtype))
    return fills, problems


def _plan(checkpoint: OpenCheckpoint, fills: Sequence[_Fill], options: LoadOptions) -> LoadPlan:
    """Plan the reads of all fills."""
    index = checkpoint.index
    sizes = [checkpoint.files[path].nbytes for path in index.files]
    cut = granularity(options, checkpoint.manifest.block_nbytes)
    return plan_load(index, [(f.tensor, f.box) for f in fills], sizes, cut)


def _blob_names(checkpoint: OpenCheckpoint) -> list[tuple[str, str]]:
    """Return (item, fqn) of all shared values of the loaded items, in an order that all ranks share."""
    return [(item, fqn) for item in checkpoint.items for fqn in checkpoint.blobs[item]]


def _wish(job: LoadJob, ready: _Prepared) -> bytes:
    """Return what this rank takes and what does not fit, less what a lenient load puts up with."""
    checkpoint, wanted, fills, problems, _ = ready
    index, names = checkpoint.index, _blob_names(checkpoint)
    mentioned = {name for name, _ in problems.mismatched}
    taken = {f.tensor for f in fills} | {index.ids[i, n] for i, n, _ in wanted.aliases if (i, n) in index.ids}
    taken |= {t for (item, fqn), t in index.ids.items() if full_name(item, fqn) in mentioned}
    place = {key: number for number, key in enumerate(names)}
    lenient = job.options.lenient
    return messages.encode(
        messages.Wish(
            rank=job.group.rank,
            tensors=messages.bitmap(sorted(taken), len(index.tensors)),
            blobs=messages.bitmap(sorted(place[key] for key in wanted.blobs if key in place), len(names)),
            missing=[p for p in problems.missing if not _is_lenient(p[0], lenient)],
            mismatched=[p for p in problems.mismatched if not _is_lenient(p[0], lenient)],
        )
    )


def _is_lenient(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a lenient load puts up with a problem of this name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _agree(job: LoadJob, checkpoint: OpenCheckpoint, requests: Sequence[bytes]) -> list[bytes]:
    """Raise one `MismatchError` that lists what does not fit on any rank, or answer what no rank takes."""
    wishes = [messages.decode(request, messages.Wish) for request in requests]
    index, names = checkpoint.index, _blob_names(checkpoint)
    loaded = set(checkpoint.items)
    left = [index.tensors[t][:2] for t in messages.unset([w.tensors for w in wishes], len(index.tensors))]
    left = [key for key in left if key[0] in loaded]
    left += [names[n] for n in messages.unset([w.blobs for w in wishes], len(names))]
    unexpected = [full_name(item, fqn) for item, fqn in left]
    lines: dict[str, set[int]] = {}
    for wish in wishes:
        for kind, problems in (("missing", wish.missing), ("mismatched", wish.mismatched)):
            for name, why in problems:
                lines.setdefault(f"{kind}: {name}: {why}", set()).add(wish.rank)
    told = [f"{line}{_on(ranks, len(wishes))}" for line, ranks in lines.items()]
    told += [
        f"unexpected: {name}: saved, but no rank wants it"
        for name in unexpected
        if not _is_lenient(name, job.options.lenient)
    ]
    if told:
        more = f"\n  ... and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
        raise MismatchError(
            f"the checkpoint does not fit the target in {len(told)} places; nothing was changed:\n  "
            + "\n  ".join(told[:SHOWN])
            + more,
            path=job.storage.url,
            remedy="mend the names or shapes, load fewer items, or pass strict=False (or patterns in "
            "LoadOptions.lenient) to accept and report them",
        )
    return [messages.encode(messages.Agreed(unexpected))] * len(wishes)


def _on(ranks: set[int], size: int) -> str:
    """Say which ranks have a problem, unless all have it."""
    if len(ranks) == size:
        return ""
    return f" (rank {', '.join(map(str, sorted(ranks)[:8]))}{' and more' if len(ranks) > 8 else ''})"


def _report(job: LoadJob, ready: _Prepared, unexpected: list[str]) -> LoadReport:
    """Tell what was restored, and how."""
    checkpoint, wanted, fills, problems, plan = ready
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
            dict.fromkeys([f.name for f in fills] + [full_name(*key) for key in wanted.blobs + wanted.own])
        ),
        missing=tuple(name for name, _ in problems.missing),
        unexpected=tuple(unexpected),
        mismatched=dict(problems.mismatched),
        cast=tuple(dict.fromkeys(f.name for f in fills if f.cast)),
        resharded=tuple(dict.fromkeys(f.name for n, f in enumerate(fills) if n not in whole and f.box.numel)),
        notes={full_name(item, fqn): what for item, fqn, what in (*wanted.notes, *_stored_apart(ready))},
        nbytes_wanted=sum(f.box.numel * index.tensors[f.tensor].spec.itemsize for f in fills),
        nbytes_read=plan.nbytes,
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
