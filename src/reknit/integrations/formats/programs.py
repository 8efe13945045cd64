"""The formats of other programs: one row for each, to recognise, open and read its checkpoints.

The formats of reknit's rows are recognised by first bytes, and before the formats of other distributions.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from reknit import plugins
from reknit.errors import StorageError, UsageError, shown
from reknit.integrations.formats.recognise import (
    NVRX,
    READABLE,
    WEIGHTS,
    checkpoint_of_others,
    file_at,
    file_in,
    head_of,
    newest_first,
    single_file,
)
from reknit.integrations.formats.recognise import run_of_others as run_of_others
from reknit.plugins.format import Foreign

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint

    from reknit.plugins.format import Storage

logger = logging.getLogger("reknit")

_OF_STEP = re.compile(r"(?i)(?:.*(?:checkpoint|ckpt|step|epoch|iter|iteration)s?[-_=]?)?[0-9]{1,18}")
"""Names of folders and files of a step, which models with a number in their name do not have."""
_STATES = ("trainer_state.json", "optimizer.pt", "optimizer.bin", "random_states_0.pkl")
"""Files that trainers save beside the weights of a step."""
_MOST_INSIDE = 4
"""Folders of a folder, the newest by name, that are looked at for checkpoints of other programs."""


def is_weights(kind: str) -> bool:
    """Return whether checkpoints of this kind have weights alone."""
    return kind in WEIGHTS


def opens(kind: str) -> bool:
    """Return whether reknit opens checkpoints of this kind as they are."""
    return kind in READABLE or kind in installed()


@cache
def _checked(entry: EntryPoint) -> Any:
    """Return the format of an entry point; None, with an error in the log, for a wrong one."""
    try:
        made = plugins.loaded(entry)
        made = made() if isinstance(made, type) else made
        if lacking := [name for name in ("recognise", "read") if not callable(getattr(made, name, None))]:
            raise UsageError(
                f"{plugins.shown_entry(entry)}, which has no {lacking[0]}", remedy=plugins.remedy_for(entry)
            )
    except UsageError as error:
        logger.error("no checkpoint is recognised by this format: %s", error)  # noqa: TRY400 (the error has all)
        return None
    return made


def installed() -> Mapping[str, Any]:
    """Return the formats that other distributions bring, by kind."""
    found = {kind: _checked(entry) for kind, entry in plugins.installed("reknit.formats").items()}
    return {kind: made for kind, made in found.items() if made is not None}


def recognise(storage: Storage) -> Foreign | None:
    """Return the kind of files that another program has saved at a path, None if it is unknown."""
    if (known := file_at(storage) or checkpoint_of_others(storage)) is not None and known.kind in READABLE:
        return known
    for kind, made in installed().items():
        if (found := made.recognise(storage)) is not None:
            if not isinstance(found, Foreign):
                entry = plugins.installed("reknit.formats")[kind]
                raise UsageError(
                    f"{plugins.shown_entry(entry)}, whose recognise returned {shown(found)}",
                    remedy=plugins.remedy_for(entry),
                )
            return found._replace(kind=kind)
    return known


def is_start(folder: Storage, name: str, kind: str) -> bool:
    """Return whether a folder, or a file in it, with this name has weights from which a run may start.

    They are not earlier work of a run.  Weights of a step are: their name ends with its number, or the state
    of a trainer is beside them.
    """
    if kind not in WEIGHTS or _OF_STEP.fullmatch(name):
        return False
    return all(head_of(folder, state) is None for state in _STATES)


def newest_of_others(storage: Storage, *, works: bool = False) -> tuple[str, Foreign] | None:
    """Return the newest checkpoint of another program in a folder, by name: its path there, and its kind.

    Files that are checkpoints in themselves may also be in a folder with a number in its name.  With `works`,
    weights from which a run may start do not count.
    """
    ordered = newest_first(name for name in storage.folders() if not name.startswith("."))
    for numbered, names in groupby(ordered, key=lambda name: any(map(str.isdigit, name))):
        for name in islice(names, _MOST_INSIDE):
            try:
                folder = storage.sub(name)
                other = recognise(folder)
                if other is not None and not (works and is_start(folder, name, other.kind)):
                    return name, other
                if numbered and (found := _single_file(folder, name, works=works)) is not None:
                    return f"{name}/{found[0]}", found[1]
                if (found := _part_of_rank(folder)) is not None:
                    return f"{name}/{found[0]}", found[1]
            except StorageError:  # a name that no store takes
                continue
    return _single_file(storage, "", works=works)


def _part_of_rank(session: Storage) -> tuple[str, Foreign] | None:
    """Return the newest file of NVRx in the folder of a rank, which has the rank as its name."""
    ranks = newest_first(name for name in session.folders() if name.isdecimal())
    for rank in ranks[:_MOST_INSIDE]:
        folder = session.sub(rank)
        if (found := single_file(folder, lambda _, kind: kind == NVRX)) is not None:
            other = file_in(folder, found[0], f"{folder.url}/{found[0]}")
            return None if other is None else (f"{rank}/{found[0]}", other)
    return None


def _single_file(folder: Storage, above: str, *, works: bool) -> tuple[str, Foreign] | None:
    def counts(name: str, kind: str) -> bool:
        return _OF_STEP.fullmatch(above) is not None or not is_start(folder, name.rpartition(".")[0], kind)

    if (found := single_file(folder, counts if works else None)) is None:
        return None
    other = file_in(folder, found[0], f"{folder.url}/{found[0]}")
    return None if other is None else (found[0], other)
