"""The boxes that a rank fills together: their reads are planned, checked, carried out, and reported."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from reknit.engine import messages
from reknit.engine.loading.collect import unequal
from reknit.engine.loading.read import RangeReader
from reknit.engine.loading.root import MOST_LACKING, LoadRequests
from reknit.engine.messages import StoppedError
from reknit.engine.reports import LoadReport, other_files, unchecked
from reknit.engine.stored.file_checks import check_sizes
from reknit.errors import ReknitError
from reknit.planner.columns import NOTHING, unpacked
from reknit.types.shard import full_name
from reknit.types.wanted import selects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import ExitStack

    from reknit.engine.loading.collect import Sought
    from reknit.engine.loading.contents import ReceivedMetadata, RootMetadata
    from reknit.engine.loading.match import Fill
    from reknit.engine.loading.task import LoadTask
    from reknit.engine.sharing.shared_read import SharedRead
    from reknit.engine.stored.opening import OpenCheckpoint

logger = logging.getLogger("reknit")

_UNCHANGED = "; reknit had changed no tensor of the target yet"
_OWN_UNCHANGED = "; no tensor of this rank had changed yet, but those of other ranks may be partly written"
_PARTLY = "; the target is partly written"


class LoadPart(Struct):
    """Boxes that are filled together, their reader, and the number of bytes from other ranks."""

    fills: Sequence[Fill]
    reader: RangeReader
    nbytes_received: int = 0
    shared: SharedRead | None = None

    @classmethod
    def of(cls, task: LoadTask, checkpoint: OpenCheckpoint, fills: Sequence[Fill]) -> LoadPart:
        """Plan the reads for some boxes; the checkpoint has the rows of the index that they need."""
        reader = RangeReader(
            checkpoint,
            [(fill.tensor, fill.box, fill.target) for fill in fills],
            task.options,
            cast=frozenset(number for number, fill in enumerate(fills) if fill.cast),
            moved=task.recorder.advance,
        )
        return cls(fills, reader)

    def share(self, task: LoadTask, places: Mapping[str, int], last: ExitStack) -> None:
        """Begin the part of this rank in a shared read, which ends with `last`.

        All ranks use the numbers of files in `places`.
        """
        from reknit.engine.sharing.shared_read import SharedRead  # a rank alone shares nothing

        files = {places[path]: path for path in self.reader.checkpoint.index.files}
        self.shared = SharedRead.begin(task.group, task.carrier, self.reader, files, self.reader.options)
        last.callback(self.shared.close)

    def resharded(self) -> list[str]:
        """Return the names of the boxes that do not consist of exactly one chunk."""
        plan, lengths = self.reader.plan, self.reader.checkpoint.index.lengths
        numel = np.array([prod(fill.box.lengths) for fill in self.fills], np.int64)
        parted = numel > 0
        parted[plan.wanted[numel[plan.wanted] == lengths[plan.chunk].prod(axis=1)]] = False
        return [self.fills[number].name for number in np.flatnonzero(parted).tolist()]


class PlannedReads(Struct, frozen=True):
    """The reads of a rank: those for objects, if there are any, which come first, and all others."""

    early: LoadPart | None
    late: LoadPart

    @property
    def parts(self) -> list[LoadPart]:
        """Both parts, in the order in which they are read."""
        return [self.late] if self.early is None else [self.early, self.late]

    def in_turn(self, sought: Sought, decision: messages.LoadDecision) -> list[FillStep]:
        """Return the work of each round in which ranks read, in order; all ranks have the same rounds."""
        early = FillStep("objects", self.early, decision.early_share, sought.wanted.deliver_early)
        late = FillStep("load", self.late, decision.share, sought.wanted.deliver)
        return [early, late] if decision.early else [late]


class FillStep(Struct, frozen=True):
    """The work of a rank in a round: to read its part, with its share in the reads of others, and deliver."""

    name: str
    part: LoadPart | None
    share: messages.SharePlan | None
    deliver: Callable[[], None]

    @property
    def exchanges(self) -> bool:
        """Whether ranks of different hosts exchange bytes."""
        return self.share is not None and bool(self.share.num_turns)

    def reserve(self) -> None:
        """Take the memory for these exchanges.  Raises `ShortageError`."""
        if self.part is not None and self.part.shared is not None and self.share is not None:
            self.part.shared.reserve(self.share)


def plan_reads(
    task: LoadTask, contents: RootMetadata | ReceivedMetadata, sought: Sought, rows: messages.Answer
) -> PlannedReads:
    """Plan the reads of this rank, first those for objects; add faults of files to its problems.

    The checkpoint of the readers has the `rows` of the index that they need.
    """
    fills, wanted, problems = sought.fills, sought.wanted, sought.problems
    with task.recorder.phase("plan"):
        checkpoint = contents.with_rows(sought.checkpoint, sought.reach, rows)
        first = [fill for fill in fills if fill.name in wanted.early]
        early = LoadPart.of(task, checkpoint, first) if first else None
        others = [fill for fill in fills if fill.name not in wanted.early] if first else fills
        reads = PlannedReads(early, LoadPart.of(task, checkpoint, others))
    ranks, boxes = unpacked(rows.alike, "u8").reshape(-1, 2).T
    alike = ranks[boxes == boxes[ranks == task.group.rank]].tolist()
    problems.damaged.extend(_damaged(task, checkpoint, reads.parts, alike))
    if wanted.aliases and not problems.damaged:
        problems.mismatched.extend(unequal(task, checkpoint, wanted, fills))
    return reads


def _damaged(
    task: LoadTask, checkpoint: OpenCheckpoint, parts: Sequence[LoadPart], alike: list[int]
) -> list[str]:
    """Return the faults of the files that this rank reads; with ``verify="full"``, of a share of all files.

    The ranks `alike` read the same files, and divide the checks.
    """
    if task.options.verify == "full" and checkpoint.manifest.other is None:
        from reknit.engine.stored.verify import check_all  # most loads check only the bytes that they read

        with task.recorder.phase("verify"):
            check = partial(check_all, checkpoint, task.group.rank, task.group.size, task.options)
            return task.within_deadline("checking all files of", check)
    paths = {checkpoint.index.files[file] for part in parts for file in part.reader.plan.files}
    files = [checkpoint.files[path] for path in sorted(paths)[alike.index(task.group.rank) :: len(alike)]]
    check = partial(check_sizes, checkpoint.source, files, task.replicas)
    return task.within_deadline("looking for files of", check)


def load_request(task: LoadTask, sought: Sought, reads: PlannedReads) -> LoadRequests:
    """Return the request of this rank: names that do not fit and are not accepted, and ranges to read."""
    wanted, problems, lenient = sought.wanted, sought.problems, task.lenient
    num_filled = len({fill.name for fill in sought.fills} | problems.resized.keys()) + wanted.num_kept
    most = MOST_LACKING if lenient and not num_filled else 0
    request = messages.LoadRequest(
        rank=task.group.rank,
        missing=[p for p in problems.missing if not selects(p[0], lenient)],
        mismatched=[p for p in problems.mismatched if not selects(p[0], lenient)],
        idle=list(wanted.idle),
        damaged=problems.damaged,
        idle_rules=[] if sought.transformed is None else list(sought.transformed.idle),
        num_tensors=wanted.num_tensors,
        num_filled=num_filled,
        num_values=len(wanted.blobs) + len(wanted.own) - wanted.num_kept,
        lacking=problems.missing[:most],
        unfit=problems.mismatched[:most],
        refused=problems.refused,
        early=wanted.has_early,
    )
    shared = [None if part is None else part.shared for part in (reads.late, reads.early)]
    if shared[0] is None:
        return LoadRequests([request], None)
    from reknit.engine.saving.packing import Sections  # a rank alone offers nothing

    return LoadRequests([request], Sections(*(NOTHING if each is None else each.offer() for each in shared)))


def fill(task: LoadTask, step: FillStep, late: LoadPart) -> messages.Stopped:
    """Read a part, and deliver it; return whether another rank stopped this one.

    An error says whether it leaves the boxes of the `late` part, which are live memory, partly written.
    """
    part, group = step.part, task.group
    try:
        with _noting_target_state(task, late, alone=group.size == 1 or step.name == "objects") as target:
            if part is not None and part.shared is not None and step.share is not None:
                timeout_s = task.options.timeout_s
                part.nbytes_received = part.shared.run(step.share, task.recorder, timeout_s)
            elif part is not None:
                part.reader.run(task.recorder, task.options.timeout_s)
            target.is_delivered = part is late
            with task.recorder.phase("deliver"):
                step.deliver()
    except StoppedError as error:  # the rank that failed reports the cause, if one did
        return messages.Stopped(group.rank, error.message)
    return messages.Stopped(group.rank)


class _Target(Struct):
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
def _noting_target_state(task: LoadTask, late: LoadPart, *, alone: bool) -> Iterator[_Target]:
    """Add the state of the target to errors that pass."""
    target = _Target(late.reader, alone)
    try:
        yield target
    except ReknitError as error:
        error.message += str(target)
        raise
    except BaseException as error:  # an interrupt is raised as it is
        logger.warning("the load of %s was ended by %s%s", task.storage.url, type(error).__name__, target)
        raise


def load_report(
    task: LoadTask, sought: Sought, reads: PlannedReads, decision: messages.LoadDecision
) -> LoadReport:
    """Return the report of a successful load."""
    wanted, fills, problems, parts = sought.wanted, sought.fills, sought.problems, reads.parts
    checkpoint = reads.late.reader.checkpoint
    sizes, manifest = checkpoint.index.itemsize.tolist(), checkpoint.manifest
    resharded = {name for part in parts for name in part.resharded()}
    full = [fill.name for fill in fills if fill.name not in problems.resized]
    values = [full_name(*key) for key in wanted.blobs + wanted.own]
    return LoadReport(
        path=task.storage.url,
        step=manifest.step,
        metadata=manifest.metadata,
        restored=_unique(full + values),
        missing=tuple(name for name, _ in problems.missing),
        unexpected=tuple(decision.unexpected),
        mismatched=dict(problems.mismatched) | problems.resized,
        left=tuple(decision.left),
        cast=_unique([fill.name for fill in fills if fill.cast]),
        resharded=_unique([name for name in full if name in resharded]),
        notes=other_files(manifest) | {full_name(item, fqn): what for item, fqn, what in wanted.notes},
        nbytes_wanted=sum([prod(fill.box.lengths) * sizes[fill.tensor] for fill in fills]),
        nbytes_read=sum(part.reader.nbytes_read for part in parts),
        nbytes_received=sum(part.nbytes_received for part in parts),
        phases=tuple(task.recorder.records),
        unchecked=unchecked(manifest),
        saved_by=_number(manifest.origin.get("world_size")),
    )


def _number(value: object) -> int | None:
    """Return a number that a manifest has, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _unique(names: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
