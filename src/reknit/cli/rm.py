"""`reknit rm`, `pin` and `unpin`: remove checkpoints, or keep them from being removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import reknit
from reknit.cli.output import print_json, printable
from reknit.plugins.events import amount

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the program."""
    rm = _command(
        commands,
        "rm",
        run,
        "remove checkpoints",
        "Remove checkpoints, manifests first, so that no partial checkpoint is ever visible.  "
        "Files that reknit did not write stay.  A checkpoint that is being saved is not removed.",
    )
    rm.add_argument("--item", action="append", metavar="ITEM", help="remove only this item; can be repeated")
    rm.add_argument("--dry-run", action="store_true", help="only print the bytes that would be freed")
    rm.add_argument("--json", action="store_true", help="print JSON")
    pin = _command(
        commands,
        "pin",
        _pin,
        "keep checkpoints from being removed",
        "Pin checkpoints: runs, `reknit prune` and `reknit rm` do not remove them.",
    )
    pin.add_argument(
        "--reason", default="", metavar="TEXT", help="the reason, shown to anyone who tries to remove it"
    )
    _command(
        commands,
        "unpin",
        _unpin,
        "let pinned checkpoints be removed again",
        "Remove the pins of checkpoints.",
    )


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    call: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    """Add a command that takes checkpoints."""
    parser = commands.add_parser(name, help=summary, description=description)
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a checkpoint: a folder or URL")
    parser.set_defaults(run=call)
    return parser


def run(args: argparse.Namespace) -> int:
    """Remove, and return the exit code."""
    freed = {}
    for path in args.paths:
        freed[path] = reknit.delete(path, items=args.item, dry_run=args.dry_run)
        if not args.json:
            of = f"{printable(', '.join(args.item))} of " if args.item else ""
            did = "would remove" if args.dry_run else "removed"
            print(f"{did} {of}{printable(path)}: {amount(freed[path])}")
    if args.json:
        print_json([{"path": path, "nbytes": nbytes} for path, nbytes in freed.items()])
    return 0


def _pin(args: argparse.Namespace) -> int:
    for path in args.paths:
        reknit.pin(path, args.reason)
        print(f"pinned {printable(path)}")
    return 0


def _unpin(args: argparse.Namespace) -> int:
    for path in args.paths:
        print(f"{'unpinned' if reknit.unpin(path) else 'was not pinned:'} {printable(path)}")
    return 0
