"""The load story, in numbered steps: from a committed checkpoint to this rank's live objects.

Steps 1 to 3 are in `api/loads.py`: find the ranks that act, read the call, and open the place.  Steps 4 to 10
are here, in the order in which they happen.  A step takes values, and returns one.

A round is a `with` block: each rank sends its request, rank 0 decides, and each rank receives its answer.  An
error inside a block, also of the work before the request, becomes the error of all ranks.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from reknit.comm import group as comm
from reknit.engine import messages
from reknit.engine.loading.collect import request_items, seek
from reknit.engine.loading.contents import ReceivedMetadata, RootMetadata, read_for_all
from reknit.engine.loading.parts import fill, load_report, load_request, plan_reads
from reknit.engine.loading.root import judge, merge_requests, require_cause, rows_for
from reknit.engine.stored.places import CHANGED, TRIES, changed
from reknit.events.progress import progress
from reknit.system import start_thread

if TYPE_CHECKING:
    from reknit.engine.loading.task import LoadTask
    from reknit.engine.reports import LoadReport
    from reknit.errors import ReknitError

logger = logging.getLogger("reknit")

FIRST_ROUND = "open"
"""The round in which a load begins."""


def load(task: LoadTask) -> LoadReport:
    """Load into the live objects.  Every rank returns, or every rank raises the same error.

    When the files move, or another checkpoint replaces the one that is read, all ranks load anew.  Raises
    `CheckpointNotFoundError` when it is deleted meanwhile.
    """
    tries = TRIES
    while True:
        tries -= 1
        whole = None
        try:
            with progress(task.recorder, start_thread, wanted=task.options.progress), ExitStack() as last:
                whole, part = _read_contents(task)
                return _load(task, whole, part, last)
        except CHANGED as error:
            if not tries or not _look_again(task, whole, error):
                raise


def _read_contents(task: LoadTask) -> tuple[RootMetadata | None, messages.ItemContents]:
    """Return the contents that rank 0 has read, None on other ranks, and this rank's part of them."""
    timeout_s = task.options.timeout_s
    with task.recorder.phase("open"), comm.turn(task.group, FIRST_ROUND, timeout_s, opens=True) as turn:
        # 4 Read the contents: rank 0 reads manifest, index and shared values for everyone.
        requests = turn.gather(request_items(task))
        if requests is None:
            return None, turn.give(None, messages.ItemContents)
        read = partial(read_for_all, task, requests)
        whole = task.within_deadline("reading manifest and index of", read)
        return whole, turn.give(whole.answers, messages.ItemContents)


def _load(
    task: LoadTask, whole: RootMetadata | None, part: messages.ItemContents, last: ExitStack
) -> LoadReport:
    """Load the parts of the contents that the target takes; `last` ends this rank's shared reads."""
    group, options, recorder, timeout_s = task.group, task.options, task.recorder, task.options.timeout_s
    with recorder.phase("locate"), comm.turn(group, "locate", timeout_s) as turn:
        # 5 Seek: the entries that the target takes, by the names and shapes in the checkpoint.
        contents = whole or ReceivedMetadata.of(part, task)
        sought = seek(task, contents.checkpoint)

        # 6 Fetch their rows of the index from rank 0.
        asked = turn.gather(sought.request())
        located = None if asked is None or whole is None else rows_for(whole, sought, asked)
        rows = turn.give(None if located is None else located.handout.answers, messages.Answer)

    with recorder.phase("agree"), comm.turn(group, "agree", timeout_s, merge=merge_requests) as turn:
        # 7 Plan the reads, and look at their files.
        reads = plan_reads(task, contents, sought, rows)
        if group.size > 1 and options.share != "never":
            for each in reads.parts:
                each.share(task, contents.places, last)

        # 8 Judge: a problem of any rank is an error on all ranks, before a byte of any target changes.
        # Ranks that want the same bytes divide the reads.
        requests = turn.gather(load_request(task, sought, reads))
        decisions = None if requests is None or located is None else judge(task, located, *requests)
        decision = turn.give(decisions, messages.LoadDecision)

    # 9 Read and verify, and 10 deliver: first for objects, whose tensors are read into new memory.  When an
    # object refuses them, only its own code can have changed a live tensor.
    recorder.expect(sum(each.reader.plan.nbytes for each in reads.parts))
    for step in reads.in_turn(sought, decision):
        if step.exchanges:
            # A rank without memory for the exchanges between hosts would block the other ranks in them.
            with comm.turn(group, "reserve", timeout_s) as turn:
                step.reserve()
                turn.arrive()
        with comm.turn(group, step.name, timeout_s) as turn:
            ends = turn.gather(fill(task, step, reads.late))
            if ends is not None:
                require_cause(ends)
            turn.arrive()
    return load_report(task, sought, reads, decision)


def _look_again(task: LoadTask, whole: RootMetadata | None, error: ReknitError) -> bool:
    """Return, on all ranks, whether the checkpoint has changed since the read that failed with `error`."""
    with comm.turn(task.group, "look_again", task.options.timeout_s) as turn:
        turn.gather(b"")
        read = None if whole is None else whole.checkpoint.manifest
        found = read is not None and changed(task.storage, read, error, task.replicas) is not None
        has_changed = turn.give_all(found, bool)
    if has_changed:
        logger.info("%s moved or was replaced while it was read; loading anew: %s", task.storage.url, error)
    return has_changed
