"""`reknit ls` and `reknit latest`: list the checkpoints below a folder, or print the newest."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import reknit
from reknit.cli.output import print_json, print_table, printable, time_text
from reknit.engine.stored.hints import MOST_FOREIGN, absent, elsewhere, foreign, foreign_inside, own_files
from reknit.errors import CheckpointNotFoundError, FormatError, StorageError
from reknit.plugins.events import amount
from reknit.plugins.store import Deadline, open_storage
from reknit.plugins.trainer import folder_in, manifest_in

if TYPE_CHECKING:
    import argparse

    from reknit.plugins.store import Storage

_SEARCH_S = 5.0
"""Seconds for the search of all folders without files of reknit."""
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class Row:
    """A folder that is, was or may become a checkpoint, with None for unknown facts.

    `state` is ``"committed"``, ``"uncommitted"`` (a save is pending, or never ended), ``"damaged"`` or
    ``"unreadable"`` (the store refuses access).
    """

    name: str
    path: str
    state: str
    step: int | None = None
    created: float | None = None
    nbytes: int | None = None
    world_size: int | None = None
    items: tuple[str, ...] = ()
    problem: str | None = None
    moved_to: str | None = None


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the program."""
    parser = commands.add_parser(
        "ls",
        help="list the checkpoints in a folder",
        description="List the checkpoints directly below a folder, oldest step first, and uncommitted saves.",
    )
    parser.add_argument("root", metavar="ROOT", help="a folder or URL that holds checkpoints")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    latest = commands.add_parser(
        "latest",
        help="print the path of the newest checkpoint",
        description="Print the path of the newest committed checkpoint directly below a folder: the one with "
        "the highest step.",
    )
    latest.add_argument("root", metavar="ROOT", help="a folder or URL that holds checkpoints")
    latest.add_argument("--json", action="store_true", help="print JSON")
    latest.set_defaults(run=run_latest)


def run(args: argparse.Namespace) -> int:
    """List, and return the exit code."""
    with closing(open_storage(args.root)) as storage:
        rows, left_out = rows_of(storage)
        if left_out:
            print(f"reknit: {_left_out(left_out)}", file=sys.stderr)
        if not rows:
            raise _nothing(storage)
    if args.json:
        print_json([asdict(row) for row in rows])
        return 0
    print_table(
        ("NAME", "STEP", "CREATED (UTC)", "SIZE", "RANKS", "ITEMS"),
        [_cells(row) for row in rows],
        right=("STEP", "SIZE", "RANKS"),
    )
    return 0


def run_latest(args: argparse.Namespace) -> int:
    """Print the path, and return the exit code."""
    newest = reknit.latest(args.root)
    if newest is None:
        with closing(open_storage(args.root)) as storage:
            raise absent(storage, "there is no checkpoint directly below")
    if args.json:
        print_json({"path": newest})
    else:
        print(newest)
    return 0


def _nothing(storage: Storage) -> CheckpointNotFoundError:
    """Return the error for a folder without files of reknit."""
    message = f"there is no checkpoint in {storage.url}"
    remedy = foreign_inside(storage) or elsewhere(
        storage, "pass the folder that holds the checkpoints, such as runs for runs/step_00000010"
    )
    if (other := foreign(storage)) is not None:
        message, remedy = f"{message}: it is {other.what}", other.remedy
    return CheckpointNotFoundError(message, path=storage.url, remedy=remedy)


def rows_of(storage: Storage) -> tuple[list[Row], list[str]]:
    """Return a row for every checkpoint directly below a folder, or for the folder itself if it is one.

    Also return the names of the folders that were not searched to the end.
    """
    if (itself := _committed(".", storage)) is not None:
        return [itself], []
    deadline, left_out = Deadline(_SEARCH_S), list[str]()
    found = [(name, folder_in(storage, name)) for name in storage.folders()]
    rows = [
        row
        for name, folder in found
        if folder is not None and (row := _row(name, folder, deadline, left_out)) is not None
    ]
    return sorted(rows, key=lambda row: (row.state != "committed", _age(row), row.name)), left_out


def _left_out(names: list[str]) -> str:
    """Return a message with the folders that were not searched to the end, and the reason."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    named = printable(", ".join(names[:_MOST_NAMED])) + more
    return (
        f"left out {named}: nothing of reknit in the first {MOST_FOREIGN:,} files, or within {_SEARCH_S:g} s"
    )


def _age(row: Row) -> tuple[int, float]:
    return (-1 if row.step is None else row.step, row.created or 0.0)


def _row(name: str, storage: Storage, deadline: Deadline, left_out: list[str]) -> Row | None:
    """Return the row of a folder, or None if the search finds no file of reknit in it."""
    try:
        if (row := _committed(name, storage)) is not None:
            return row
        files, is_whole = own_files(storage, deadline)
    except StorageError as error:  # one closed folder must not hide the others
        return Row(name, storage.url, "unreadable", problem=error.message)
    if not is_whole:
        left_out.append(name)
    return Row(name, storage.url, "uncommitted", nbytes=sum(f.nbytes for f in files)) if files else None


def _committed(name: str, storage: Storage) -> Row | None:
    """Return the row of a checkpoint, or None without a manifest."""
    try:
        manifest = manifest_in(storage)
    except FormatError as error:
        return Row(name, storage.url, "damaged", problem=error.message)
    if manifest is None:
        return None
    world_size = manifest.origin.get("world_size")
    return Row(
        name,
        storage.url,
        "committed",
        step=manifest.step,
        created=manifest.created,
        nbytes=manifest.nbytes,
        world_size=world_size if isinstance(world_size, int) else None,
        items=manifest.items,
        moved_to=manifest.moved_to,
    )


def _cells(row: Row) -> tuple[object, ...]:
    size = "-" if row.nbytes is None else amount(row.nbytes)
    if row.state == "committed":
        step = "-" if row.step is None else row.step
        created = "-" if row.created is None else time_text(row.created)
        items = ", ".join(row.items) + (f" (at {row.moved_to})" if row.moved_to else "")
        return row.name, step, created, size, row.world_size or "-", items
    status = f"{row.state}: {row.problem}" if row.problem else row.state
    return row.name, "-", "-", size, "-", status
