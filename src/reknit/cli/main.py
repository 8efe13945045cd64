"""`reknit`: the program, its commands, its exit codes and its output streams."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import platform
import re
import sys
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NoReturn

from reknit import plugins
from reknit.environment import completing
from reknit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ReknitError,
    ShortageError,
    StorageNotFoundError,
    UsageError,
    did_you_mean,
    printable,
    typed_known,
)
from reknit.format.checksum import FORMAT_VERSION, OLDEST_READABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class CommandLine(argparse.ArgumentParser):
    """A parser whose errors suggest the nearest name; the parsers of commands have this class too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given: list[str] = []

    def parse_known_args(  # type: ignore[override]  # one signature in place of two overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse, and exit with an error and the usage of this parser for unknown arguments."""
        self._given = list(sys.argv[1:] if args is None else args)
        found, unknown = super().parse_known_args(self._given, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print the usage, the error, and the option that was probably meant; exit with 2."""
        remedy = self._meant() or f"{self.prog} --help lists its options"
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}\n  -> {remedy}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        # The method of argparse ignores a full disk.
        (file or sys.stderr).write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if question := did_you_mean(str(value), map(str, action.choices or ())):
                self.print_usage(sys.stderr)
                self.exit(2, f"{self.prog}: {error}\n  -> {question}\n")
            raise

    def _meant(self) -> str | None:
        """Return a question with the nearest option in place of an unknown one, or None."""
        for text in self._given:
            name = text.partition("=")[0]
            if name == "--":
                break
            if name.startswith("--") and not any(known.startswith(name) for known in self._options()):
                return did_you_mean(name, self._options())
        return None

    def _options(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]


_PACKAGES = ("torch", "jax", "numpy", "pyarrow")
_CLIENTS = {"obstore": "s3://, gs://, az://", "hdfs-native": "hdfs://", "fsspec": "other URLs"}


class PrintVersions(argparse.Action):
    """The option that prints the versions and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the versions, and exit."""
        print("\n".join(version_lines()))
        parser.exit()


def version_lines() -> Iterator[str]:
    """Yield a line for each version, from metadata of packages: none of them is imported."""
    yield f"reknit {version('reknit')}"
    yield f"checkpoint format {FORMAT_VERSION} (reads {OLDEST_READABLE} to {FORMAT_VERSION})"
    yield f"Python {platform.python_version()}"
    for name in _PACKAGES:
        yield f"{name} {_installed(name)}"
    for name, schemes in _CLIENTS.items():
        yield f"{name} {_installed(name)} (for {schemes})"
    for entry in plugins.installed("reknit.storage").values():
        if entry.dist is not None:
            yield f"{entry.dist.name} {entry.dist.version} (for {entry.name}://)"


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "is not installed"


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


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    With the name of the command that runs, the others have only their line in the help, and no module is
    imported for them.  Raises `UsageError` if this command, of another distribution, cannot be loaded.
    """
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
    running = plugins.COMMANDS.get(only or "")
    added: set[str] = set()
    for name, row in plugins.COMMANDS.items():
        if only is not None and (running is None or row.module != running.module):
            commands.add_parser(name, help=row.help)
        elif row.module not in added:  # it may add several commands, which follow each other
            added.add(row.module)
            plugins.value_of(row.module, f"reknit {name}").add_parser(commands)
    if running is None:
        _add_installed(commands, only)
    return program


def _add_installed(commands: argparse._SubParsersAction[CommandLine], only: str | None) -> None:
    """Add the commands of other distributions; import the one that runs, or all without `only`."""
    for name, entry in plugins.installed("reknit.commands").items():
        if only not in (None, name):
            commands.add_parser(name, help=plugins.summary_of(entry))
            continue
        try:
            module = plugins.loaded(entry)
            if callable(getattr(module, "add_parser", None)):
                module.add_parser(commands)
            if name not in commands.choices:
                raise UsageError(
                    f"{plugins.shown_entry(entry)}, which has no function add_parser that adds the command",
                    remedy=plugins.remedy_for(entry),
                )
        except UsageError as error:
            if only is not None:
                raise
            _complain(str(error))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (default: of the process) and return its exit code."""
    _open_streams()
    try:
        with typed_known(), _each_warning_once():
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
    words = sys.argv[1:] if argv is None else argv
    if completing():
        _complete(parser())
    program = parser(next((word for word in words if not word.startswith("-")), ""))
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
