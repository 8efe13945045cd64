"""What if the output cannot be written?  One line says so, and nothing fails again when Python exits."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress

_REFUSED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def open_streams() -> None:
    """Make both streams usable: one that the shell has closed leads nowhere; a letter it lacks is escaped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # opened, it also keeps other files from getting its number
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def complain(text: str) -> None:
    """Print a line to standard error, as far as that takes it."""
    with suppress(OSError):
        print(f"reknit: {text}", file=sys.stderr, flush=True)


def is_of_output(error: OSError) -> bool:
    """Tell whether an error came from writing the output: those of files have a name."""
    return error.filename is None and error.errno in _REFUSED


def discard_output() -> None:
    """Point standard output to where nothing fails: what is buffered must not fail when Python exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    finally:
        os.close(nowhere)
