"""The program `reknit`, also as ``python -m reknit``: an interrupt ends it in one line from the start."""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130


def main() -> int:
    """Run the program with the arguments of the process, and return its exit code."""
    # Imports take most of the start, and an exception in one of them may turn into another.
    early = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if early:
        signal.signal(signal.SIGINT, _leave)
    from reknit.cli.main import main as program

    if early:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return program()


def _leave(*_: object) -> None:
    """End the process at once: it has done nothing yet."""
    os.write(2, b"reknit: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
