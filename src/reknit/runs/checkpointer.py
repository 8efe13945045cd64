"""The checkpoints of a run: saved when a policy says so, found after a restart, kept as long as wanted."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from reknit import api
from reknit.arguments import checked_metrics
from reknit.engine.saving.commit import manifest_exists
from reknit.engine.stored.newest import refuse_other
from reknit.engine.stored.notes import add_metrics
from reknit.engine.stored.steps import METRICS, numbered, step_name, steps_below
from reknit.errors import CheckpointNotFoundError, CorruptError, FormatError, VersionError
from reknit.monitor.phase import monotonic
from reknit.options import LoadOptions, SaveOptions
from reknit.policies.base import Facts
from reknit.policies.keeping import ranked
from reknit.ranks import acting
from reknit.runs.agreement import Agreement, asked
from reknit.runs.arguments import policy_for, step_number
from reknit.runs.retention import Retention
from reknit.runs.settle import settle
from reknit.runs.under_way import UnderWay
from reknit.storage.registry import open_storage, recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from os import PathLike

    from reknit.engine.outcome import PendingSave
    from reknit.engine.report import LoadReport
    from reknit.storage.base import Storage
    from reknit.types.saved_step import SavedStep

    Folder = tuple[int, str]
    """Number and name of the folder of a step."""

logger = logging.getLogger("reknit")

_SETTLE_S = 300.0


class Checkpointer:
    """Saves the steps of a run below one folder, resumes from the newest, and keeps those that are wanted.

    All ranks make one and make the same calls, as for `reknit.save`.  `save` says when (default: at each
    call of `save`), `keep` which committed steps stay (default: all); see `reknit.policies`.  Whatever
    `keep` says, the newest step whose files are all there is never removed.  With `wait=False` (the default)
    saves go on in the background.  Step 500 is the checkpoint ``ROOT/step_00000500``, which all other calls
    take as well.

    `options.promote_to` and `load_options.replicas` are roots here too: each step is promoted to, and read
    from, the folder of its name there.  Use it as a context manager, or call `close` at the end.
    """

    def __init__(
        self,
        root: str | PathLike[str],
        *,
        save: object = None,
        keep: object = None,
        wait: bool = False,
        options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        group: object = None,
    ) -> None:
        self._wait, self._options, self._load_options, self._given = wait, options, load_options, group
        self._when = None if save is None else policy_for("save", save)
        self._keep = None if keep is None else policy_for("keep", keep)
        options = options if isinstance(options, SaveOptions) else SaveOptions()
        self._timeout_s = options.timeout_s
        self._group = acting(group, options.comm).group
        self._storage = open_storage(root, durability=options.durability)
        self._root = recipe(root).url  # also for who changes the folder he works in
        self._agreement = None if self._when is None else Agreement(self._group, self._when, self._timeout_s)
        self._retention = None
        if self._keep is not None and self._group.rank == 0:
            self._retention = Retention(self._storage, self._keep)
        self._resumed = False
        self._saved: int | None = None
        self._saved_at = monotonic()
        self._decided: tuple[int, bool] | None = None
        self._stall_s: float | None = None
        self._under_way = UnderWay(self._retention)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:  # the other ranks may not come; agents finish what is staged
            self._leave()

    @property
    def preempted(self) -> str | None:
        """Why a rank will end soon, see `on_preemption`; None if none will.  The same on all ranks."""
        return None if self._agreement is None else self._agreement.preempted

    def should_save(self, step: int) -> bool:
        """Tell whether the policy wants `step` saved; all ranks ask, and get the same answer."""
        step = step_number(step)
        self._under_way.tend()
        if self._agreement is None:
            return True
        if self._decided is None or self._decided[0] != step:
            self._decided = step, self._agreement.due(step, self._saved, self._facts)
        return self._decided[1]

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        force: bool = False,
    ) -> PendingSave | None:
        """Save `state` as it is after `step`, if the policy wants that or with `force`; else return None.

        `metrics` are numbers that are stored with the step, for `best` and for people; those of rank 0 count.
        The last step can be saved again with `force`, which waits until it is there; if its save failed, that
        is one more try.

        Raises what `reknit.save` does.  A step that is there already is replaced where this run has resumed
        from an earlier one; otherwise that is `CheckpointExistsError`.
        """
        step = step_number(step)
        if not (force or self.should_save(step)):
            return None
        numbers = checked_metrics(metrics)
        if (last := self._under_way.last(step, sure=force or self._wait)) is not None:
            return last
        begin = monotonic()
        pending = api.save(
            _below(self._root, step_name(step)),
            state,
            step=step,
            wait=self._wait,
            overwrite=self._resumed,
            metadata={METRICS: numbers},
            options=self._save_options(step_name(step)),
            group=self._given,
        )
        self._saved, self._saved_at = step, monotonic()
        self._stall_s = self._saved_at - begin
        self._under_way.add(step, pending, begin)
        return pending

    def resume(self, state: Mapping[str, Any]) -> int:
        """Load the newest complete step into `state`, and return the next step.

        That is the loaded step plus one, or 0 if nothing has been saved yet; the log says which.  Damaged
        steps are skipped, and the log says why.  If all steps are damaged, this raises `CorruptError` rather
        than start from step 0.  Other errors, such as `MismatchError`, are raised.

        The saves of this run are waited for.  So are agents of an earlier run that are at work on the host of
        rank 0, up to five minutes; what that run has begun and nobody finished can never commit afterwards.
        """
        self._under_way.settle()
        self._ask("settle", partial(settle, self._storage, min(_SETTLE_S, self._timeout_s / 2)))
        bad: list[str] = []
        below: Folder | None = None
        while (found := self._ask("newest", partial(self._newest, below))) is not None:
            below = number, name = found[0], found[1]
            path = _below(self._root, name)
            try:
                reached = self._load(number, name, state)[1]
            except VersionError:
                raise
            except (FormatError, CheckpointNotFoundError) as error:
                bad.append(path)
                if self._retention is not None:
                    self._retention.note_damaged(number, name)
                self._say(logging.WARNING, "passed over step %d: %s", number, error.message)
            else:
                self._under_way.tend(surplus=True)  # the run before may have ended before it removed that
                self._say(logging.INFO, "resumed from %s: the next step is %d", path, reached + 1)
                return reached + 1
        if bad:
            raise CorruptError(
                f"none of the {len(bad)} steps below {self._root} can be loaded; the newest is {bad[0]}",
                path=self._root,
                remedy="reknit verify shows the damage; to start from step 0, use another folder",
            )
        self._say(logging.WARNING, "there is no checkpoint below %s yet: starting with step 0", self._root)
        return 0

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to a step that is committed, such as a score; `best` knows them from then on.

        Those of rank 0 count.  Raises `CheckpointNotFoundError`; see `reknit.note`.
        """
        numbers, number = checked_metrics(metrics), step_number(step)
        self._ask("note", lambda: add_metrics(self._folder_of(number), numbers), f"step {number}")

    def load(self, state: Mapping[str, Any], step: int | Literal["latest", "best"] = "latest") -> LoadReport:
        """Fill `state` from one step: a number, the newest, or the best by the metric that `keep` names.

        Raises `CheckpointNotFoundError` where there is none, and what `reknit.load` does.
        """
        if step not in ("latest", "best"):
            step = step_number(step)

        def find() -> Folder | None:
            if step == "latest":
                return self._newest()
            if step == "best":
                best = self.best()
                return None if best is None else (best.step or 0, best.path.rpartition("/")[2])
            return self._newest(number=step)

        found = self._ask("find", find, f"step {step}")
        if found is None:
            raise self._missing(f"step {step}" if isinstance(step, int) else f"{step} step")
        return self._load(found[0], found[1], state)[0]

    def steps(self) -> list[SavedStep]:
        """Return the committed steps, ascending, as `reknit.steps` does."""
        return steps_below(self._storage)

    def latest(self) -> int | None:
        """Return the number of the newest committed step, or None.  One rank may ask alone."""
        found = self._newest()
        return None if found is None else found[0]

    def best(self) -> SavedStep | None:
        """Return the best step by the metric that `keep` names, or None.  Raises `UsageError` without one."""
        return next(iter(ranked(self._keep, self.steps())), None)

    def prune(self, *, dry_run: bool = False) -> list[SavedStep]:
        """Remove the steps that `keep` does not keep, and return them; with `dry_run` only return them.

        That happens by itself after each save and after `resume`.  One rank does it; the others return an
        empty list.
        """
        return self._under_way.prune(dry_run=dry_run)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all saves are committed, and what they made surplus is removed.

        Raises what made a save fail, and `DeadlineError` after `timeout_s` seconds.
        """
        self._under_way.wait(timeout_s)

    def close(self) -> None:
        """Wait for all saves, and watch for signals no longer.  Every rank calls it, or none."""
        try:
            self.wait()
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._agreement is not None:
            self._agreement.close()
        self._under_way.end_pruning()
        self._storage.close()

    def _facts(self, preempted: bool) -> Facts:
        return Facts(
            seconds=monotonic() - self._saved_at,
            busy=self._under_way.busy(),
            preempted=preempted,
            stall_s=self._stall_s,
            write_s=self._under_way.write_s,
        )

    def _newest(self, below: Folder | None = None, number: int | None = None) -> Folder | None:
        """Return the newest committed step that comes before a folder, or one with this number."""
        folders = numbered(self._storage)
        for folder in folders:
            wanted = (below is None or folder < below) and number in (None, folder[0])
            if wanted and manifest_exists(self._storage.sub(folder[1])):
                return folder
        if not folders:
            refuse_other(self._storage)
        return None

    def _folder_of(self, number: int) -> Storage:
        """Return the folder of a committed step.  Raises `CheckpointNotFoundError`."""
        if (found := self._newest(number=number)) is None:
            raise self._missing(f"step {number}")
        return self._storage.sub(found[1])

    def _missing(self, what: str) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"there is no {what} below {self._root}",
            path=self._root,
            remedy=f"look there: reknit ls {self._root}",
        )

    def _ask(self, name: str, question: Callable[[], Any], subject: str = "") -> Any:
        """Return what rank 0 finds; its errors are raised on all ranks."""
        return asked(self._group, name, self._timeout_s, question, subject)

    def _load(self, number: int, name: str, state: Mapping[str, Any]) -> tuple[LoadReport, int]:
        """Load a step, and go on from it; also return its number, of which its manifest is sure."""
        options, path = self._load_options, _below(self._root, name)
        if isinstance(options, LoadOptions) and options.replicas:
            places = (_below(os.fspath(replica), name) for replica in options.replicas)
            options = replace(options, replicas=tuple(places))
        report = api.load(path, state, options=options, group=self._given)
        if report.step not in (None, number):
            self._say(logging.WARNING, "%s holds step %d", path, report.step)
        reached = number if report.step is None else report.step
        self._resumed, self._saved, self._saved_at, self._decided = True, reached, monotonic(), None
        self._under_way.loaded(reached)
        return report, reached

    def _save_options(self, name: str) -> SaveOptions | None:
        """Return the options of a save to a folder, which is promoted to a folder of the same name."""
        options = self._options
        if not isinstance(options, SaveOptions) or options.promote_to is None:
            return options
        return replace(options, promote_to=_below(os.fspath(options.promote_to), name))

    def _say(self, level: int, message: str, *arguments: object) -> None:
        if self._group.rank == 0:
            logger.log(level, message, *arguments)


def _below(root: str, name: str) -> str:
    """Return the place of a folder below a path or a URL, which may have options."""
    place, mark, options = root.partition("?") if "://" in root else (root, "", "")
    return f"{place.rstrip('/')}/{name}{mark}{options}"
