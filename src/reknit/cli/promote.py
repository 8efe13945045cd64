"""`reknit promote`: copy a committed checkpoint to another store, and commit it there as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import reknit
from reknit.cli.output import print_json, printable
from reknit.errors import UsageError
from reknit.plugins.events import amount

if TYPE_CHECKING:
    import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program."""
    parser = commands.add_parser(
        "promote",
        help="copy a checkpoint to a durable store",
        description="Copy a committed checkpoint to another store and commit it there as well, every block "
        "compared with its digest on the way.  The copy becomes visible only when it is complete.  Files of "
        "an earlier attempt are checked and kept, so you can repeat this after any failure.",
    )
    parser.add_argument("path", metavar="SRC", help="a checkpoint: a folder or URL")
    parser.add_argument("to", metavar="DST", help="the destination: a folder or URL")
    parser.add_argument("--overwrite", action="store_true", help="replace another checkpoint at DST")
    parser.add_argument(
        "--cool",
        action="store_true",
        help="then remove the files at SRC; its manifest stays and leads to DST, so SRC goes on working",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Promote, and return the exit code."""
    if args.cool:
        return _cool(args)
    report = reknit.promote(args.path, args.to, overwrite=args.overwrite)
    if args.json:
        names = ("path", "source", "step", "write_id", "nbytes", "num_files")
        print_json({name: getattr(report, name) for name in names})
        return 0
    step = "" if report.step is None else f" (step {report.step})"
    what = f"{amount(report.nbytes)} in {report.num_files} files copied"
    if not report.num_files:
        what = "all files were there already"
    print(f"{printable(report.path)}{step} is committed; {what}")
    return 0


def _cool(args: argparse.Namespace) -> int:
    if args.overwrite:
        raise UsageError(
            "--cool replaces no other checkpoint at DST, so --overwrite has no meaning with it",
            remedy="leave --overwrite out, or name a DST of its own for this checkpoint",
        )
    freed = reknit.cool(args.path, args.to)
    if args.json:
        print_json({"path": args.path, "moved_to": args.to, "freed_nbytes": freed})
    else:
        print(f"{printable(args.path)} has moved to {printable(args.to)}; {amount(freed)} freed")
    return 0
