"""`reknit verify` checks that a checkpoint is whole, and that its index agrees with its data files."""

from __future__ import annotations

import os
import shlex
from contextlib import closing
from typing import TYPE_CHECKING

import reknit
from reknit.cli.output import print_json, printable
from reknit.engine.stored.verify import rebuild
from reknit.errors import UsageError
from reknit.plugins.events import amount
from reknit.plugins.format import open_checkpoint
from reknit.plugins.store import LocalStorage

if TYPE_CHECKING:
    import argparse

    from reknit import VerifyReport


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program."""
    parser = commands.add_parser(
        "verify",
        help="check a checkpoint without loading it",
        description="Check the metadata of a checkpoint, or every byte with --data; print every problem on a "
        "line of its own, and exit with 1 if there is one.  Nothing in the checkpoint is changed.",
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint: a folder or URL")
    parser.add_argument("--data", action="store_true", help="also read the tensors, and compare every digest")
    parser.add_argument(
        "--rebuild-index",
        action="store_true",
        help="rebuild the index from the headers of the data files alone, and report whether the two agree",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="with --rebuild-index: write the rebuilt index to this new file"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


class _Findings:
    """Problems and notes, printed at once, or together as JSON at the end."""

    def __init__(self, *, quiet: bool) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._quiet = quiet

    def problem(self, *texts: str) -> None:
        """Record problems."""
        self._record(texts, self.problems)

    def note(self, *texts: str) -> None:
        """Record successes and actions."""
        self._record(texts, self.notes)

    def _record(self, texts: tuple[str, ...], kept: list[str]) -> None:
        kept += texts
        for text in () if self._quiet else texts:
            print(printable(text))


def run(args: argparse.Namespace) -> int:
    """Verify, and return the exit code."""
    if args.output and not args.rebuild_index:
        raise UsageError(
            "--output names the file for the rebuilt index, and no index is rebuilt",
            remedy="add --rebuild-index, or leave --output out",
        )
    report = reknit.verify(args.path, "data" if args.data else "metadata")
    findings = _Findings(quiet=args.json)
    findings.problem(*report.problems)
    if args.rebuild_index:
        _rebuild(args.path, args.output, findings)
    if args.json:
        facts = {"path": report.path, "level": report.level, "ok": not findings.problems}
        facts |= {"num_files": report.num_files, "nbytes_checked": report.nbytes_checked}
        facts |= {"num_unread": report.num_unread, "nbytes_unread": report.nbytes_unread}
        facts |= {"unread": _unread(report, args.path), "unchecked": report.unchecked}
        print_json(facts | {"problems": findings.problems, "notes": findings.notes})
    elif not findings.problems:
        where = "in" if args.data else "in the metadata of"
        print(f"no problems {where} {report.num_files} files ({amount(report.nbytes_checked)} checked)")
        if unread := _unread(report, args.path):
            print(printable(unread))
        if report.unchecked:
            print(printable(report.unchecked))
    return 1 if findings.problems else 0


def _unread(report: VerifyReport, path: str) -> str | None:
    """Return a message about unread bytes and the command that reads them, or None."""
    if not report.num_unread:
        return None
    return f"{report.unread_bytes()}; this reads them: reknit verify {shlex.quote(path)} --data"


def _rebuild(path: str, output: str | None, findings: _Findings) -> None:
    """Rebuild the index, compare it, and record the result."""
    with closing(open_checkpoint(path)) as storage:
        found = rebuild(storage)
    findings.problem(*found.problems)
    findings.note(*found.notes)
    if output is not None and found.data is not None:
        _write(output, found.data)
        findings.note(f"wrote the rebuilt index to {output}")


def _write(output: str, data: bytes) -> None:
    """Write a new local file; nothing is ever replaced."""
    folder, name = os.path.split(os.path.abspath(output))
    if not name or not LocalStorage(folder).put(name, data, if_absent=True):
        raise UsageError(f"{output} exists already", remedy="name a new file")
