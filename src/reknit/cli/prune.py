"""`reknit prune`: remove old steps of a run."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from reknit import policies
from reknit.cli.output import amount_of, print_json, printable, whole
from reknit.engine.stored.hints import absent
from reknit.errors import UsageError, shown
from reknit.plugins.events import amount
from reknit.plugins.store import open_storage
from reknit.plugins.trainer import numbered
from reknit.runs.retention import Retention

if TYPE_CHECKING:
    import argparse

    from reknit.policies import Policy

_MOST_DIGITS = 18
"""Digits of a number that counts steps."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program."""
    parser = commands.add_parser(
        "prune",
        help="remove old steps of a run",
        description="Remove the checkpoints directly below a folder that none of the --keep options keeps.  "
        "The newest one whose files all exist always stays, and so do checkpoints without a step, unreadable "
        "ones, and ones that are being saved.",
    )
    parser.add_argument("root", metavar="ROOT", help="a folder or URL that holds checkpoints")
    parser.add_argument("--keep-last", type=whole(1), metavar="N", help="keep the newest N steps")
    parser.add_argument("--keep-every", type=whole(1), metavar="N", help="keep one step of each N")
    parser.add_argument("--keep-best", metavar="N:METRIC[:max]", help="keep the N with the lowest metric")
    parser.add_argument("--keep-days", type=amount_of, metavar="D", help="keep steps younger than D days")
    parser.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="ITEM:D",
        help="remove this item of steps older than D days; can be repeated",
    )
    parser.add_argument("--dry-run", action="store_true", help="only list the steps that would be removed")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prune, and return the exit code."""
    keep = _keep(args)
    with closing(open_storage(args.root)) as storage:
        if not numbered(storage):
            raise absent(storage, "there are no steps in")
        retention = Retention(storage, keep)
        retention.check()
        if args.dry_run:
            gone, aged = retention.surplus(), retention.aged()
        else:
            removed = retention.removed()
            gone = [step for step, items in removed if items is None]
            aged = [(step, items) for step, items in removed if items is not None]
    if args.json:
        whole = [{"step": step.step, "path": step.path, "nbytes": step.nbytes} for step in gone]
        parts = [{"step": step.step, "path": step.path, "items": list(items)} for step, items in aged]
        print_json([*whole, *parts])
        return 0
    did = "would remove" if args.dry_run else "removed"
    for step in gone:
        print(f"{did} {printable(step.path)} (step {step.step}): {amount(step.nbytes)}")
    for step, items in aged:
        print(f"{did} {printable(', '.join(items))} of {printable(step.path)} (step {step.step})")
    if not gone and not aged:
        print("there is nothing to remove")
    return 0


def _keep(args: argparse.Namespace) -> Policy:
    """Return the policy of all options together.  Raises `UsageError` without an option."""
    found = []
    if args.keep_last is not None:
        found.append(policies.latest(args.keep_last))
    if args.keep_every is not None:
        found.append(policies.every(args.keep_every))
    if args.keep_days is not None:
        found.append(policies.younger(days=args.keep_days))
    if args.keep_best is not None:
        found.append(_best(args.keep_best))
    if not found:
        raise UsageError("no --keep option was given", remedy="give at least one, for instance --keep-last 3")
    keep = found[0]
    for each in found[1:]:
        keep = keep | each
    for text in args.drop:
        keep = keep & _without(text)
    return keep


def _without(text: str) -> Policy:
    item, _, days = text.rpartition(":")
    try:
        return policies.without(item, after_hours=24 * float(days))
    except ValueError as error:
        raise UsageError(
            f"--drop is ITEM:DAYS, not {shown(text)}", remedy="for instance optimizer:7"
        ) from error


def _best(text: str) -> Policy:
    number, _, rest = text.partition(":")
    metric, _, mode = rest.rpartition(":") if rest.endswith((":min", ":max")) else (rest, "", "")
    if not number.isdecimal() or len(number) > _MOST_DIGITS or not metric:
        raise UsageError(
            f"--keep-best is N:METRIC, or N:METRIC:max, not {shown(text)}", remedy="for instance 3:loss"
        )
    return policies.best(int(number), metric, mode="max" if mode == "max" else "min")
