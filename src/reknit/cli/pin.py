"""`reknit pin` and `reknit unpin`: keep checkpoints from being removed, or let them be removed again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit import stored
from reknit.cli.output import printable

if TYPE_CHECKING:
    import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands to those of the program."""
    pin = commands.add_parser(
        "pin",
        help="keep checkpoints from being removed",
        description="Pin checkpoints: neither a run, nor `reknit prune`, nor `reknit rm` removes them then.",
    )
    pin.add_argument("paths", metavar="PATH", nargs="+", help="a checkpoint: a folder or URL")
    pin.add_argument("--reason", default="", metavar="TEXT", help="why, for whoever wants to remove it")
    pin.set_defaults(run=_pin)
    unpin = commands.add_parser(
        "unpin",
        help="let pinned checkpoints be removed again",
        description="Take the pins of checkpoints away.",
    )
    unpin.add_argument("paths", metavar="PATH", nargs="+", help="a checkpoint: a folder or URL")
    unpin.set_defaults(run=_unpin)


def _pin(args: argparse.Namespace) -> int:
    for path in args.paths:
        stored.pin(path, args.reason)
        print(f"pinned {printable(path)}")
    return 0


def _unpin(args: argparse.Namespace) -> int:
    for path in args.paths:
        print(f"{'unpinned' if stored.unpin(path) else 'was not pinned:'} {printable(path)}")
    return 0
