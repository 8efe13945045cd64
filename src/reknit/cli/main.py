"""`reknit`: the program, its commands and its exit codes."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from reknit.cli import advise, agents, certify, diff, export, gc, latest, ls, promote, prune, rm, show, verify
from reknit.cli.reports import dash, report, trace
from reknit.environment import completing
from reknit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ReknitError,
    ShortageError,
    StorageNotFoundError,
    UsageError,
    typed_shortage,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

OK = 0
DIFFERENT = 1
USAGE = 2
NOT_FOUND = 3
FAILED = 4
SHORT = 5
INTERRUPTED = 130
PIPE_CLOSED = 141

_EXIT_CODES = """\
exit codes:
  0    success
  1    verify found problems, diff found differences
  2    the command line is wrong or cannot be carried out: the destination exists, for example
  3    there is no checkpoint at the path
  4    a checkpoint is damaged, or a storage failed
  5    too little memory, threads or open files; the checkpoint may be intact
  130  interrupted
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    program = argparse.ArgumentParser(
        prog="reknit",
        description="Look at, check, compare and export checkpoints, and clean up after saves.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    program.add_argument("--version", action="version", version=f"reknit {version('reknit')}")
    commands = program.add_subparsers(dest="command", metavar="COMMAND", required=True)
    looking = (ls, latest, show, verify, diff, report, trace, dash, advise)
    for command in (*looking, export, promote, rm, prune, gc, agents, certify):
        command.add_parser(commands)
    return program


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (default: those of the process) and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal's encoding lacks is shown escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with typed_shortage():
            code = _run(argv)
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has enough.  What is still buffered must not fail again when Python exits.
        _discard_output()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        print("reknit: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ReknitError as error:
        print(f"reknit: {error}", file=sys.stderr)
        return exit_code(error)
    return code


def _run(argv: Sequence[str] | None) -> int:
    program = parser()
    if completing():
        _complete(program)
    try:
        args = program.parse_args(argv)
    except SystemExit as leaving:  # argparse has printed help, the version, or what is wrong
        return leaving.code if isinstance(leaving.code, int) else USAGE
    try:
        return int(args.run(args))
    except ReknitError as error:
        error.remedy = error.remedy and in_flags(error.remedy, args)
        raise


def _complete(program: argparse.ArgumentParser) -> None:
    """Tell the shell how the command line could go on, and leave, where argcomplete is installed."""
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(program)


def in_flags(remedy: str, args: argparse.Namespace) -> str:
    """Return a remedy in the words of the shell: what Python passes as ``name=True`` is a flag here."""
    for name in vars(args):
        remedy = re.sub(rf"\b{name}=True\b", f"--{name.replace('_', '-')}", remedy)
    return remedy


def exit_code(error: ReknitError) -> int:
    """Return the exit code for an error."""
    if isinstance(error, UsageError | CheckpointExistsError):
        return USAGE
    if isinstance(error, CheckpointNotFoundError | StorageNotFoundError):
        return NOT_FOUND
    return SHORT if isinstance(error, ShortageError) else FAILED


def _discard_output() -> None:
    """Point standard output to where nothing fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    finally:
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
