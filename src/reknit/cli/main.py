"""`reknit`: the program, its commands, its exit codes and its output streams."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import re
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reknit.cli import (
    advise,
    agents,
    certify,
    diff,
    export,
    gc,
    imports,
    ls,
    promote,
    prune,
    rm,
    show,
    verify,
)
from reknit.cli.program.command_line import CommandLine
from reknit.cli.program.versions import PrintVersions
from reknit.cli.reports import dash, report
from reknit.environment import completing
from reknit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ReknitError,
    ShortageError,
    StorageNotFoundError,
    UsageError,
    printable,
    typed_shortage,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger("reknit")

OK = 0
DIFFERENT = 1
USAGE = 2
NOT_FOUND = 3
FAILED = 4
SHORT = 5
UNWRITTEN = 6
INTERRUPTED = 130
PIPE_CLOSED = 141

_REFUSED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})

_EXIT_CODES = """\
exit codes:
  0    success
  1    verify found problems, diff found differences
  2    the command line is wrong or cannot be carried out: the destination exists, for example
  3    there is no checkpoint at the path
  4    a checkpoint is damaged, or a storage failed
  5    too little memory, threads or open files; the checkpoint may be intact
  6    the output could not be written: the disk is full, for example
  130  interrupted
  141  the reader of the output closed the pipe
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    program = CommandLine(
        prog="reknit",
        description="Look at, check, compare, import and export checkpoints, and clean up after saves.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    program.add_argument(
        "--version",
        action=PrintVersions,
        nargs=0,
        help="print the versions of reknit, its format, and related packages",
    )
    commands = program.add_subparsers(dest="command", metavar="COMMAND", required=True)
    looking = (ls, show, verify, diff, report, dash, advise)
    for command in (*looking, imports, export, promote, rm, prune, gc, agents, certify):
        command.add_parser(commands)
    return program


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (default: of the process) and return its exit code."""
    _open_streams()
    try:
        with typed_shortage(), _each_warning_once():
            code = _run(argv)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output closed the pipe
        _discard_output()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except ReknitError as error:
        _complain(str(error))
        return exit_code(error)
    except OSError as error:
        if not _is_of_output(error):
            raise
        _discard_output()
        _complain(f"the output could not be written, and is incomplete: {error.strerror}")
        return UNWRITTEN
    return code


@contextmanager
def _each_warning_once() -> Iterator[None]:
    """Leave warnings out that were printed before: a command may open a checkpoint several times."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in said
        said.add(text)
        return new

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def _run(argv: Sequence[str] | None) -> int:
    program = parser()
    if completing():
        _complete(program)
    try:
        args = program.parse_args(argv)
    except SystemExit as leaving:  # argparse has printed help, the version, or an error
        return leaving.code if isinstance(leaving.code, int) else USAGE
    try:
        return int(args.run(args))
    except ReknitError as error:
        error.remedy = error.remedy and in_flags(error.remedy, args)
        raise


def _complete(program: argparse.ArgumentParser) -> None:
    """Send completions of the command line to the shell and exit, if argcomplete is installed."""
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(program)


def in_flags(remedy: str, args: argparse.Namespace) -> str:
    """Return a remedy for the command line, with flags in place of ``name=True`` of Python."""
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


def _open_streams() -> None:
    """Make both streams usable: replace closed ones by the null device, and escape unsupported letters."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # opened, it also keeps other files from getting its number
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _complain(text: str) -> None:
    """Print a line to standard error, and ignore errors of that."""
    with suppress(OSError):
        shown = "\n".join(map(printable, text.split("\n")))  # names in it come from strangers
        print(f"reknit: {shown}", file=sys.stderr, flush=True)


def _is_of_output(error: OSError) -> bool:
    """Return whether an error comes from writing the output: errors of files have a file name."""
    return error.filename is None and error.errno in _REFUSED


def _discard_output() -> None:
    """Redirect standard output to the null device, so that buffered output does not fail at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    finally:
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
