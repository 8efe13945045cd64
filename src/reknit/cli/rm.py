"""`reknit rm`, `pin` and `unpin`: remove checkpoints, or keep them from being removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit import stored
from reknit.cli.output import print_json, printable
from reknit.monitor.progress_text import amount

if TYPE_CHECKING:
    import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to those of the program."""
    parser = commands.add_parser(
        "rm",
        help="remove checkpoints",
        description="Remove checkpoints, manifests first, so that no partial checkpoint is ever visible.  "
        "Files that reknit did not write stay.  A checkpoint that is being saved is not removed.",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a checkpoint: a folder or URL")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    pin = commands.add_parser(
        "pin",
        help="keep checkpoints from being removed",
        description="Pin checkpoints: runs, `reknit prune` and `reknit rm` do not remove them.",
    )
    pin.add_argument("paths", metavar="PATH", nargs="+", help="a checkpoint: a folder or URL")
    pin.add_argument(
        "--reason", default="", metavar="TEXT", help="the reason, shown to anyone who tries to remove it"
    )
    pin.set_defaults(run=_pin)
    unpin = commands.add_parser(
        "unpin",
        help="let pinned checkpoints be removed again",
        description="Remove the pins of checkpoints.",
    )
    unpin.add_argument("paths", metavar="PATH", nargs="+", help="a checkpoint: a folder or URL")
    unpin.set_defaults(run=_unpin)


def run(args: argparse.Namespace) -> int:
    """Remove, and return the exit code."""
    freed = {}
    for path in args.paths:
        freed[path] = stored.delete(path)
        if not args.json:
            print(f"removed {printable(path)}: {amount(freed[path])}")
    if args.json:
        print_json([{"path": path, "nbytes": nbytes} for path, nbytes in freed.items()])
    return 0


def _pin(args: argparse.Namespace) -> int:
    for path in args.paths:
        stored.pin(path, args.reason)
        print(f"pinned {printable(path)}")
    return 0


def _unpin(args: argparse.Namespace) -> int:
    for path in args.paths:
        print(f"{'unpinned' if stored.unpin(path) else 'was not pinned:'} {printable(path)}")
    return 0
