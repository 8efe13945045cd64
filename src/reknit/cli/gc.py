"""`reknit gc`: list the leftovers of killed saves in a store, and delete them."""

from __future__ import annotations

import argparse
import math
import re
from contextlib import closing
from typing import TYPE_CHECKING, Any

from reknit.cli.output import print_json, print_table, printable, time_text
from reknit.engine.stored.hints import elsewhere
from reknit.engine.stored.leftovers import Leftover, leftovers, remove
from reknit.errors import StorageError, StorageNotFoundError, UsageError
from reknit.plugins.events import amount
from reknit.plugins.store import open_storage, sweepable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reknit.plugins.store import Dated, Storage, Sweepable

_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program."""
    parser = commands.add_parser(
        "gc",
        help="list and delete the leftovers of killed saves",
        description="List the leftovers of killed saves below a folder, with their sizes: files that belong "
        "to no checkpoint, temporary files, and unfinished uploads.  Nothing is deleted without --delete.  "
        "Committed checkpoints, and saves that may be running, are never deleted.",
    )
    parser.add_argument("url", metavar="URL", help="a checkpoint, or a folder that holds some: a path or URL")
    parser.add_argument(
        "--older-than",
        metavar="AGE",
        type=age,
        default="24h",
        help="treat a save as dead if nothing changed for this time: a number with s, m, h or d (default: "
        "24h)",
    )
    parser.add_argument("--delete", action="store_true", help="delete leftovers older than that")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def age(text: str) -> float:
    """Return an age such as ``24h`` in seconds."""
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age: write 24h, 90m or 7d")
    return float(found[1]) * _UNITS[found[2]]


def run(args: argparse.Namespace) -> int:
    """List the leftovers, delete them with ``--delete``, and return the exit code."""
    with closing(open_storage(args.url)) as storage:
        sweep = sweepable(storage)
        if sweep is None:
            raise UsageError(
                f"gc cannot find the files that killed saves have left in {storage.url}",
                remedy="gc works on folders, s3://, gs://, az:// and hdfs://; mem:// may hold files of a "
                "checkpoint whose manifest is on another host; delete files there by hand, or let a later "
                "save to the same path do it",
            )
        moment = sweep.moment()
        # "0" means all, also a file that is written at this moment.
        before = moment - args.older_than if args.older_than else math.inf
        found = leftovers(storage, _something(storage, sweep.dated()), before)
        rows = [_row(storage, each, moment) for each in found]
        if args.delete:
            _delete(storage, sweep, found, rows)
    if args.json:
        print_json({"url": storage.url, "leftovers": rows, "unseen": sweep.unseen})
    else:
        _show(storage.url, rows, args, sweep.unseen)
    return 0


def _something(storage: Storage, held: Iterable[Dated]) -> Iterator[Dated]:
    """Yield the files of a store; raise an error for an empty store, whose URL is probably misspelt."""
    empty = True
    for each in held:
        empty = False
        yield each
    if empty:
        raise StorageNotFoundError(
            f"there is nothing in {storage.url}",
            remedy=elsewhere(storage, "pass a folder or URL to which checkpoints were saved"),
            path=storage.url,
        )


def _delete(storage: Storage, sweep: Sweepable, found: list[Leftover], rows: list[dict[str, Any]]) -> None:
    for leftover, row in zip(found, rows, strict=True):
        if leftover.kept is None:
            try:
                row["deleted"] = remove(storage, sweep, leftover, open_storage)
            except (UsageError, StorageError) as error:
                row["kept"] = error.message
                continue
            if not row["deleted"]:
                row["kept"] = "its save went on meanwhile"


def _row(storage: Storage, leftover: Leftover, moment: float) -> dict[str, Any]:
    """Return the facts about one save as plain data."""
    return {
        "folder": f"{storage.url}/{leftover.folder}".rstrip("/"),
        "name": leftover.folder or ".",
        "write_id8": leftover.write_id8,
        "nbytes": leftover.nbytes,
        "modified": leftover.modified,
        "age_s": max(0.0, moment - leftover.modified),
        "kept": leftover.kept,
        "deleted": False,
        "found": [{"kind": each.kind, "path": each.path, "nbytes": each.nbytes} for each in leftover.found],
    }


def _show(url: str, rows: list[dict[str, Any]], args: argparse.Namespace, unseen: str | None) -> None:
    if not rows:
        print(f"killed saves have left nothing in {printable(url)}")
    else:
        cells = [(row["name"], row["write_id8"] or "-", *_cells(row)) for row in rows]
        columns = ("FOLDER", "SAVE", "LEFT", "SIZE", "LAST CHANGED (UTC)", "")
        print_table(columns, cells, right=("SIZE",))
        dead = sum(row["nbytes"] for row in rows if row["kept"] is None)
        kept = sum(row["nbytes"] for row in rows if row["kept"] is not None)
        done = "deleted" if args.delete else "would be deleted with --delete"
        print(f"{amount(dead)} {done}; {amount(kept)} kept")
    if unseen is not None:
        print(unseen)


def _cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    kinds = [each["kind"] for each in row["found"]]
    names = {"file": "file", "temporary": "temporary file", "upload": "upload"}
    counts = {name: kinds.count(kind) for kind, name in names.items()}
    left = ", ".join(f"{n} {name}{'s' * (n != 1)}" for name, n in counts.items() if n)
    state = f"kept: {row['kept']}" if row["kept"] else "deleted" if row["deleted"] else "dead"
    return left, amount(row["nbytes"]), time_text(row["modified"]), state
