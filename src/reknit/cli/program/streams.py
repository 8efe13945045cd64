"""Handle output that cannot be written: print one line, and avoid a second error when Python exits."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress

_REFUSED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def open_streams() -> None:
    """Make both streams usable: replace closed ones by the null device, and escape unsupported letters."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # opened, it also keeps other files from getting its number
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def complain(text: str) -> None:
    """Print a line to standard error, and ignore errors of that."""
    with suppress(OSError):
        print(f"reknit: {text}", file=sys.stderr, flush=True)


def is_of_output(error: OSError) -> bool:
    """Return whether an error comes from writing the output: errors of files have a file name."""
    return error.filename is None and error.errno in _REFUSED


def discard_output() -> None:
    """Redirect standard output to the null device, so that buffered output does not fail at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    finally:
        os.close(nowhere)
