"""One step of a run as a trainer of Lightning loads it: first the trainer's own state, then its objects."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import reknit
from reknit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ReknitError,
    UsageError,
    VersionError,
)
from reknit.integrations.formats.programs import is_start, newest_of_others
from reknit.integrations.formats.recognise import checkpoint_of_others, run_of_others
from reknit.integrations.lightning.hooks import copied
from reknit.integrations.trainers import newest_before
from reknit.locations import location_text
from reknit.options import LoadOptions
from reknit.plugins.framework import tree
from reknit.plugins.store import open_storage
from reknit.plugins.trainer import UNSOUND, Kept, below, manifest_exists, numbered, read_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit import Checkpointer, LoadReport
    from reknit.plugins.format import Storage


_SUFFIX = ".ckpt"


class FolderContents(NamedTuple):
    """The contents of the folder of a run: numbers of its steps, and whether a run has opened it."""

    steps: tuple[int, ...]
    is_opened: bool


def folder_contents(root: str) -> FolderContents:
    """Return the contents of a folder."""
    with closing(open_storage(root)) as storage:
        steps = tuple(number for number, name in numbered(storage) if manifest_exists(storage.sub(name)))
        return FolderContents(steps, is_opened=read_line(storage)[0] >= 0)


def refuse_others(root: str, files: Any) -> None:
    """Raise `UsageError` if a folder without steps has checkpoints of Lightning, or of another program.

    `files` is the file system of fsspec in which the folder is.
    """
    if newest := _newest_file(root, files):
        raise UsageError(
            f"{root} has no step of reknit, but checkpoints of Lightning; the newest is {newest}",
            path=root,
            remedy=f"pass ckpt_path={newest!r} to go on from it; to begin at step 0, give ReknitCheckpoint "
            "another dirpath, or resume=False",
        )
    with closing(open_storage(root)) as storage:
        if (what := _others(storage)) is not None:
            raise UsageError(
                f"{root} has no step of reknit, but {what}",
                path=root,
                remedy="give ReknitCheckpoint another dirpath; or load the weights with reknit.load, and "
                "pass resume=False to begin at step 0 beside these files",
            )


def refuse_later(root: str, step: int) -> None:
    """Raise `CheckpointExistsError` if a run has saved steps after the one after which a training begins.

    Raises `UsageError` for a folder that is a checkpoint.
    """
    with closing(open_storage(root)) as storage:
        if manifest_exists(storage):
            raise UsageError(
                f"{root} is itself a checkpoint, and no folder for the steps of a run",
                path=root,
                remedy="give ReknitCheckpoint another dirpath, such as the folder above",
            )
    if later := [number for number in folder_contents(root).steps if number > step]:
        raise CheckpointExistsError(
            f"{root} has the steps of an earlier run up to {max(later)}, and this training begins after step "
            f"{step}",
            path=root,
            remedy='pass ckpt_path="last" to fit, to go on after the newest; or give ReknitCheckpoint '
            "another dirpath; or later_steps='move', which puts those steps aside, or 'replace', which "
            "removes them",
        )


def _newest_file(root: str, files: Any) -> str | None:
    """Return the newest file, or folder, with a name as Lightning gives it to its checkpoints."""
    try:
        names = [str(name) for name in files.ls(root, detail=False) if str(name).endswith(_SUFFIX)]
    except OSError:
        return None
    newest = max(names, key=files.modified, default=None)
    # The names of a remote file system lack the scheme, without which Lightning finds a local file.
    return newest if newest is None or "://" not in root else str(files.unstrip_protocol(newest))


def _others(storage: Storage) -> str | None:
    """Return a description of checkpoints of other programs in a folder, or in folders of it; or None."""
    for found in (checkpoint_of_others(storage), run_of_others(storage)):
        if found is not None and not is_start(storage, "", found.kind):
            return found.what
    other = newest_of_others(storage, works=True)
    return None if other is None else f"{other[0]} in it is {other[1].what}"


def first_error(*checks: Any) -> ReknitError | None:
    """Return the error of the first check that raises one, to raise it on all ranks."""
    for check in checks:
        try:
            check()
        except ReknitError as error:
            return error
    return None


logger = logging.getLogger("reknit")

TRAINER = "trainer"
"""The item with the state of a trainer that is not the state of its objects."""
_OPTIMIZERS = ("optimizer*",)

T = TypeVar("T")


class FolderOfRun(NamedTuple):
    """The folder of the steps of a `ReknitCheckpoint`, while its trainer runs.

    `run` is open while the trainer trains, else None.  `note` takes the report of each load.
    """

    run: Checkpointer | None
    load_options: LoadOptions | None
    note: Callable[[LoadReport], None]


@dataclass
class StepOfRun:
    """A committed step, with the trainer's own state in it.

    `gives_way` is whether an older step of the run may take its place if it is damaged.
    """

    path: str
    rest: dict[str, Any]
    options: LoadOptions
    run: Checkpointer | None = None
    number: int = -1
    gives_way: bool = False

    def load(self, state: Mapping[str, Any], *, lenient: bool) -> LoadReport:
        """Fill objects of a trainer; with `lenient`, the model may lack entries, and have others."""
        if self.run is not None and not lenient:
            return self.run.load(state, self.number)
        strict = ["!model/*"] if lenient and "model" in state else True
        return reknit.load(self.path, state, strict=strict, options=self.options)

    def load_optimizers(self, state: Mapping[str, Any]) -> LoadReport:
        """Fill optimizers; `state` has the model, too, which names their parameters, and is not filled."""
        return reknit.load(self.path, state, options=replace(self.options, only=_OPTIMIZERS))

    def states(self, groups: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Return the saved states of the model and of optimizers in new memory, as Lightning has them.

        `groups` are those of the optimizers, as `groups_of` returns them.
        """
        plain = replace(
            self.options, only=(), cast=False, allow_shape_mismatch=(), share="auto", progress=True
        )
        with reknit.open(self.path, options=plain) as checkpoint:
            items = [optimizer_name(number) for number, one in enumerate(groups) if one is not None]
            found = checkpoint.read_all(["model"] * ("model" in checkpoint.items) + items)
        optimizers = [
            {} if one is None else _numbered(found[optimizer_name(number)], one)
            for number, one in enumerate(groups)
        ]
        return found.get("model", {}), optimizers

    def before(self) -> str | None:
        """Return the path of the step before this one that may take its place, or None."""
        if self.run is None or not self.gives_way:
            return None
        older = newest_before(self.number, steps := self.run.steps())
        return next((each.path for each in steps if older is not None and each.step == older), None)


def optimizer_name(number: int) -> str:
    """Return the name of the item of an optimizer."""
    return f"optimizer_{number}" if number else "optimizer"


def _numbered(saved: Mapping[str, Any], groups: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of an optimizer by the numbers of its parameters, as its `state_dict` has them."""
    numbers = {name: number for number, name in enumerate(groups["names"])}
    state: dict[Any, Any] = {}
    more: dict[Any, Any] = {}
    for fqn, value in saved.items():
        part, *names = (tree.unescape(element) for element in fqn.split("/"))
        if part == "state" and len(names) == 2 and names[0] in numbers:
            state.setdefault(numbers[names[0]], {})[names[1]] = value
        elif part in ("shared", "more") and len(names) == 1:
            (state if part == "shared" else more)[names[0]] = value
    return {"state": state, "param_groups": copied(groups["param_groups"]), **more}


def find(path: str, folders: Mapping[str, FolderOfRun], broadcast: Any, *, fits: bool) -> StepOfRun | None:
    """Return the step at a path, or the newest one of the run whose folder is the path.

    None for the folder of a run that has no step yet.  A trainer that only evaluates takes a checkpoint that
    no trainer saved, too.
    """
    rest = Kept(continues=fits)
    for root, folder in folders.items():
        run = folder.run
        if path == root and run is not None:
            # Lightning's own door decides about other work in the folder, in Lightning's words.
            if not (following := run._resume({TRAINER: rest}, 0)):
                return None
            number = following - 1
            place = next((each.path for each in run.steps() if each.step == number), below(root, "?"))
            return _step(place, rest, folder, number=number, gives_way=True)
        if path == root:
            if (newest := broadcast(reknit.latest(root))) is None:
                raise CheckpointNotFoundError(f"there is no committed step below {root}")
            return _at(newest, rest, folder, fits=fits)
        if run is not None and (numbers := [each.step for each in run.steps() if each.path == path]):
            assert numbers[0] is not None
            run.load({TRAINER: rest}, numbers[0])
            return _step(path, rest, folder, number=numbers[0])
    return _at(path, rest, None, fits=fits)


def _at(path: str, rest: Kept, folder: FolderOfRun | None, *, fits: bool) -> StepOfRun:
    step = _step(path, rest, folder)
    with reknit.open(path) as checkpoint:
        has_trainer = TRAINER in checkpoint.items
    if fits or has_trainer:
        reknit.load(path, {TRAINER: rest}, options=step.options)
    step.rest = dict(rest.values)
    return step


def _step(
    path: str, rest: Kept, folder: FolderOfRun | None, *, number: int = -1, gives_way: bool = False
) -> StepOfRun:
    given = None if folder is None else folder.load_options
    options = given if isinstance(given, LoadOptions) else LoadOptions()
    name = path.partition("?")[0].rstrip("/").rpartition("/")[2]
    copies = tuple(below(location_text(root), name) for root in options.replicas)
    run = None if folder is None else folder.run
    return StepOfRun(path, dict(rest.values), replace(options, replicas=copies), run, number, gives_way)


def sound(step: StepOfRun, use: Callable[[StepOfRun], T], find_again: Callable[[str], StepOfRun | None]) -> T:
    """Return the result for a step; if the step is damaged, for the newest older one that is not.

    `find_again` finds that by its path.  Raises the error of the last step.
    """
    while True:
        try:
            return use(step)
        except VersionError:
            raise
        except UNSOUND as error:
            if (path := step.before()) is None:
                raise
            logger.warning("passed over step %d: %s", step.number, error.message)
            found = find_again(path)
            assert found is not None
            step = found
            step.gives_way = True
