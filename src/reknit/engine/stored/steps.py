"""The steps of a run: checkpoints directly below a folder, found by name, described by their manifests."""

from __future__ import annotations

import logging
import re
from bisect import insort
from typing import TYPE_CHECKING, NamedTuple

from reknit.engine.memory.workers import run_jobs
from reknit.engine.stored.at_path import manifest_in
from reknit.engine.stored.hints import own_files, refuse_other, warn_of_others
from reknit.engine.stored.marker import begun_in, named
from reknit.engine.stored.notes import metrics_of
from reknit.engine.stored.run_record import Line, read_line
from reknit.errors import FormatError, StorageError, StoragePermissionError
from reknit.format.paths import RUN_FOLDER
from reknit.types.manifest import SavedStep

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from reknit.engine.stored.marker import Begun
    from reknit.storage.base import Storage


logger = logging.getLogger("reknit")


class _Age(NamedTuple):
    """The order of checkpoints; one without a step is older than all that have one."""

    step: int
    created: float
    url: str
    generation: int


def newest(root: Storage) -> str | None:
    """Return the path of the newest checkpoint directly below a folder, or None.

    A folder whose manifest is damaged or closed to this user is passed over with a warning.  A store that
    fails is an error: an older checkpoint in place of the newest would be lost work.  Steps that a run gave
    up when it went back to an earlier one do not count.  A warning names the saves that are under way, of the
    run that made the newest or of a later one.
    """
    begun: list[Begun] = []
    ages = [age for name in root.folders() if (age := _age(root, name, begun)) is not None]
    line = read_line(root)[1] if ages else Line()
    line = line.begun([(age.generation, age.step) for age in ages])
    ages = [age for age in ages if age.step < 0 or line.holds(age.generation, age.step)]
    since = max(ages).generation if ages else -1
    if later := [each for each in begun if each.generation >= since]:
        logger.warning(
            "saves below %s are under way, or were killed, and may yet commit: %s; "
            "latest(root, pending='wait') waits for them, and pending='fence' keeps them from it",
            root.url,
            named(later),
        )
    if ages:
        return max(ages).url
    refuse_other(root)
    warn_of_others(root)
    return None


def folder_in(root: Storage, name: str) -> Storage | None:
    """Return a folder that a store has listed; None, with a warning, for a name that it does not take."""
    try:
        return root.sub(name)
    except StorageError as error:
        logger.warning("passed over %r in %s: %s", name, root.url, error.message)
        return None


def _age(root: Storage, name: str, begun: list[Begun]) -> _Age | None:
    """Return the age of the checkpoint in a folder, None without one or with an unreadable manifest.

    Without a checkpoint, the saves under way there are added to `begun`.
    """
    if (folder := folder_in(root, name)) is None:
        return None
    try:
        if (manifest := manifest_in(folder)) is None:
            begun += begun_in(folder, own_files(folder).files)
            return None
    except (FormatError, StoragePermissionError) as error:
        logger.warning("passed over %s: %s", folder.url, error.message)
        return None
    step = -1 if manifest.step is None else manifest.step
    generation = -1 if manifest.generation is None else manifest.generation
    return _Age(step, manifest.created, folder.url, generation)


METRICS = "metrics"
"""Key of the metrics of a step in the metadata of its manifest."""

_NAME = re.compile(r"step_([0-9]{1,18})")
_READERS = 16


def step_name(step: int) -> str:
    """Return the name of the folder of a step."""
    return f"step_{step:08d}"


def number_in(name: str) -> int | None:
    """Return the number in the name of a folder of a step, None for another name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def is_step_name(name: str) -> bool:
    """Return whether `step_name` may have named a folder."""
    return _NAME.fullmatch(name) is not None


def folders_of_steps(root: Storage) -> list[str]:
    """Return the names of the folders that may hold steps."""
    return [name for name in root.folders() if name != RUN_FOLDER]


def numbered(root: Storage) -> list[tuple[int, str]]:
    """Return the numbers and names of the folders that may hold steps, the newest first.

    A folder that `step_name` named is not looked into, so a run of ten thousand steps costs one listing.  For
    any other name the manifest has the step.
    """
    found, others = [], []
    for name in folders_of_steps(root):
        if (number := number_in(name)) is not None:
            found.append((number, name))
        else:
            others.append(name)
    found += [
        (step.step, name)
        for name, step in zip(others, described(root, others, notes=False), strict=True)
        if step is not None and step.step is not None and step.problem is None
    ]
    return sorted(found, reverse=True)


def descending(
    root: Storage, named: Collection[int] | None = None, folders: Sequence[tuple[int, str]] | None = None
) -> Iterator[tuple[int, SavedStep]]:
    """Yield the checkpoints that have a step, the newest first, with their numbers, without added metrics.

    With `named`, only folders that are named like these steps are tried.  `folders` is a result of `numbered`
    from a moment ago; without it the folders are listed.

    No more manifests are read than checkpoints are asked for.  The manifest has the step.  The name of a
    folder only has the order of the search: a copy of step 10 that is called ``step_40`` comes as step 10.
    A checkpoint whose manifest cannot be read comes with its `problem`, where its name says.
    """
    listed = numbered(root) if folders is None else folders
    waiting = sorted(folder for folder in listed if named is None or folder[0] in named)
    known: dict[str, SavedStep] = {}
    while waiting:
        number, name = waiting.pop()
        step = known.get(name) or _described(root, name, notes=False)
        if step is None:
            continue
        if step.problem is None and step.step is not None and step.step < number:
            known[name] = step
            insort(waiting, (step.step, name))
        elif step.problem is not None or step.step is not None:
            yield number, step


def steps_below(root: Storage, *, of_run: bool = False) -> list[SavedStep]:
    """Return the committed checkpoints directly below a folder, by step; those without one come first.

    Raises `UsageError` if the folder is itself a checkpoint, or belongs to another program.  The folder
    `of_run` may have weights from which the run starts.
    """
    found = [step for step in described(root, folders_of_steps(root)) if step is not None]
    if not found:
        refuse_other(root, of_run=of_run)
    return sorted(found, key=lambda step: (-1 if step.step is None else step.step, step.created, step.path))


def described(root: Storage, names: Sequence[str], *, notes: bool = True) -> list[SavedStep | None]:
    """Return the saved step of each folder, or None without a manifest; several are read at once.

    Without `notes`, the metrics are those of the saves, and a folder takes one request instead of two.
    """
    found: list[SavedStep | None] = [None] * len(names)

    def work(number: int, _: object) -> None:
        found[number] = _described(root, names[number], notes=notes)

    run_jobs(range(len(names)), work, threads=_READERS, arena_nbytes=4096, budget_nbytes=_READERS * 4096)
    return found


def _described(root: Storage, name: str, *, notes: bool) -> SavedStep | None:
    if (folder := folder_in(root, name)) is None:
        return None
    number = number_in(name)
    try:
        manifest = manifest_in(folder)
    except (FormatError, StoragePermissionError) as error:
        return SavedStep(number, folder.url, problem=error.message)
    if manifest is None:
        return None
    metrics = manifest.metadata.get(METRICS)
    return SavedStep(
        step=manifest.step,
        path=folder.url,
        created=manifest.created,
        nbytes=manifest.nbytes,
        items=manifest.items,
        metrics=(_numbers(metrics) if isinstance(metrics, dict) else {})
        | (_added(folder, manifest.save_id) if notes else {}),
        write_id=manifest.save_id,
        dropped=tuple(manifest.dropped),
        moved_to=manifest.moved_to,
        generation=manifest.generation,
        of_run=METRICS in manifest.metadata,
    )


def _added(folder: Storage, write_id: str) -> dict[str, float | None]:
    """Return the metrics that were added to a checkpoint; a damaged one hides no step."""
    try:
        return metrics_of(folder, write_id)
    except (FormatError, StoragePermissionError) as error:
        logger.warning("metrics that were added to %s are left out: %s", folder.url, error.message)
        return {}


def _numbers(metrics: dict[object, object]) -> dict[str, float | None]:
    """Return the metrics that are numbers; the metadata may be a user's own."""
    return {
        str(name): float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        for name, value in metrics.items()
    }
