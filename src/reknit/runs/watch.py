"""Follow a run: yield each step once it is committed, and hold it while it is read."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from reknit.api.ranks import AnyGroup, acting
from reknit.engine.stored.hints import refuse_other
from reknit.engine.stored.notes import RenewedHold
from reknit.engine.stored.steps import described, numbered
from reknit.errors import CheckpointNotFoundError, FormatError, StorageNotFoundError, UsageError
from reknit.events.phase import Deadline
from reknit.format import paths
from reknit.format.manifest_file import MAX_FOLLOWER_NBYTES, Follower, decode_note, encode_note
from reknit.keywords import checked_call, is_text
from reknit.options import CommOptions
from reknit.policies.policy import positive
from reknit.runs.agreement import ask_root
from reknit.runs.arguments import step_number
from reknit.storage.registry import open_storage
from reknit.types.manifest import SavedStep

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from reknit.comm.group import Group
    from reknit.storage.base import Storage

logger = logging.getLogger("reknit")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LOOKED_AT_AGAIN = 64
"""Number of steps, the newest ones, that each poll checks for a replacement."""
_ROUND_TIMEOUT_S = 1800.0
_MOST_S = 30 * 86400


@checked_call
def watch(
    root: str | PathLike[str],
    *,
    name: str | None = None,
    since: int = 0,
    poll_s: float = 10.0,
    idle_s: float | None = None,
    lease_s: float = 300.0,
    comm: CommOptions | None = None,
    group: AnyGroup | None = None,
) -> Iterator[SavedStep]:
    """Yield each committed step directly below `root` once, the oldest first, and wait for the next.

    The existing steps come first, from number `since` on.  While a step is processed, a lease keeps
    `reknit.delete` and the `keep` of a run from removing it; the lease ends `lease_s` seconds after this
    process.  Without permission to write to the folder, there is no lease, and a warning is logged.  A step
    counts as done when the next one is requested.  With a `name`, that is recorded in the folder, so that the
    next job of this name continues after the last step; without one, each job receives all steps.  A step
    that is saved anew is yielded again.

    `root` is listed every `poll_s` seconds.  After `idle_s` seconds without a new step the iteration ends;
    without `idle_s` it never ends.  Under torchrun or JAX all ranks iterate together, and rank 0 lists.

    Raises `UsageError`, `StorageError`.
    """
    if name is not None and not (is_text(name) and _NAME.fullmatch(name)):
        raise UsageError(f"name is 1 to 64 letters, digits, - and _, not {name!r}")
    for what, value in (("poll_s", poll_s), ("lease_s", lease_s), ("idle_s", idle_s or 1.0)):
        if not positive(value) or value > _MOST_S:
            raise UsageError(f"{what} is a number of seconds above 0, at most {_MOST_S}, not {value!r}")
    since = step_number(since)
    ranks = acting(group, comm or CommOptions()).group
    storage = open_storage(root)
    return _yielded_by_all(ranks, _StepFollower(storage, name, since, lease_s), poll_s, idle_s)


def _yielded_by_all(
    group: Group, follower: _StepFollower, poll_s: float, idle_s: float | None
) -> Iterator[SavedStep]:
    """Yield on all ranks the steps that rank 0 finds."""
    idle = None if idle_s is None else Deadline(idle_s)

    def find() -> dict[str, Any]:
        step = follower.next()
        return {"step": None if step is None else asdict(step), "over": idle is not None and idle.passed()}

    try:
        while True:
            answer = ask_root(group, "watch", _ROUND_TIMEOUT_S, find)
            if answer["step"] is not None:
                step = answer["step"]
                yield SavedStep(**step | {name: tuple(step[name]) for name in ("items", "dropped")})
                idle = None if idle_s is None else Deadline(idle_s)
            elif answer["over"]:
                return
            else:
                time.sleep(poll_s if idle is None else min(poll_s, idle.remaining() + 0.01))
    finally:
        follower.close()


class _StepFollower:
    """The steps of a run that are done, and the hold on the current step."""

    def __init__(self, root: Storage, name: str | None, since: int, lease_s: float) -> None:
        self._root, self._since, self._lease_s = root, since, lease_s
        self._path = None if name is None else f"{paths.NOTES_FOLDER}/follower.{name}.json"
        self._met: dict[str, str] | None = None
        self._waiting: list[tuple[str, SavedStep]] = []
        self._held: tuple[str, str, RenewedHold] | None = None
        self._warned = False

    def next(self) -> SavedStep | None:
        """Return the next step, which is then held, or None; the step before is done."""
        met = self._met = self._noted() if self._met is None else self._met
        if self._held is not None:
            met[self._held[0]] = self._held[1]
            self._note(met)
            self._release()
        self._waiting = self._waiting or self._look(met)
        while self._waiting:
            name, step = self._waiting.pop(0)
            try:
                written = step.write_id or ""
                self._held = name, written, RenewedHold(self._root.sub(name), written, self._lease_s)
            except (CheckpointNotFoundError, FormatError):
                continue  # it was removed since it was listed; if it is still there, it comes again
            return step
        return None

    def close(self) -> None:
        """Release the current step, which does not count as done."""
        self._release()
        self._root.close()

    def _look(self, met: dict[str, str]) -> list[tuple[str, SavedStep]]:
        """Return the steps that are not done, with the names of their folders, ascending."""
        folders = numbered(self._root)
        if not folders:
            refuse_other(self._root)
            if not self._warned:
                logger.warning("there is no checkpoint below %s yet: waiting for the first", self._root.url)
                self._warned = True
        names = [name for _, name in folders]
        for gone in met.keys() - set(names):
            del met[gone]
        again = [name for name in names if name in met][:_LOOKED_AT_AGAIN]
        wanted = [name for number, name in folders if number >= self._since and name not in met] + again
        found = zip(wanted, described(self._root, wanted), strict=True)
        new = [
            (name, step)
            for name, step in found
            if step is not None and step.problem is None and met.get(name) != step.write_id
        ]
        return sorted(new, key=lambda each: (each[1].step or 0, each[1].created))

    def _noted(self) -> dict[str, str]:
        """Return the steps that an earlier job of this name has done."""
        if self._path is not None:
            try:
                return dict(decode_note(self._root.get(self._path, limit=MAX_FOLLOWER_NBYTES), Follower).met)
            except StorageNotFoundError:
                pass
            except FormatError as error:  # a kill may leave half of it
                raise type(error)(
                    error.message,
                    path=f"{self._root.url}/{self._path}",
                    remedy="delete the file; this follower then meets all steps again",
                ) from error
        return {}

    def _note(self, met: dict[str, str]) -> None:
        if self._path is not None:
            self._root.put(self._path, encode_note(Follower(met)), if_absent=False)

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held[2].release()
