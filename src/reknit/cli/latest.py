"""`reknit latest`: which checkpoint in a folder is the newest?"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from reknit import stored
from reknit.cli.output import print_json
from reknit.engine.record.other_formats import absent
from reknit.storage.registry import open_storage

if TYPE_CHECKING:
    import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program."""
    parser = commands.add_parser(
        "latest",
        help="print the path of the newest checkpoint",
        description="Print the path of the newest committed checkpoint directly below a folder: the one with "
        "the highest step.",
    )
    parser.add_argument("root", metavar="ROOT", help="a folder or URL that holds checkpoints")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the path, and return the exit code."""
    newest = stored.latest(args.root)
    if newest is None:
        with closing(open_storage(args.root)) as storage:
            raise absent(storage, "is no checkpoint directly below")
    if args.json:
        print_json({"path": newest})
    else:
        print(newest)
    return 0
