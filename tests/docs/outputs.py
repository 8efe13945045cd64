"""What does a page show as the output of its snippets and commands, and is that what they print?

Numbers and names that differ from run to run (times, sizes, ids) do not count:
`normalised` replaces them by `…`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import warnings
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.docs.pages import Block

HERE = "/home/ada/tutorial"
"""The folder in which a reader follows the pages."""

_VOLATILE = [
    re.compile(pattern)
    for pattern in (
        r"\{'reknit': .*\}",  # versions
        r"(?<=origin.python )\S+",
        r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d",
        r"\b[0-9a-f]{32}\b|(?<=\.)[0-9a-f]{8}(?=\.)|(?<=pending\.)[0-9a-f.]+",  # write ids, unfinished files
        r"\b[\d.]+ (?:[KMG]i)?B\b(?:/s)?|\b\d+(?= bytes)",
        r"-?\b\d+(?:\.\d+)?(?:e[+-]\d+)?(?= s\b)|-?\b\d+\.\d{4,}",
    )
]
_PROGRESS = re.compile(
    r"^(?:INFO:reknit:(?:save to|load from) .*|reknit: waiting for \d+ agents?)\n", re.MULTILINE
)
"""Lines that only a slow machine prints."""


class Printed(NamedTuple):
    """The line where a page shows an output (0 without such a line), that output, and the real one."""

    line: int
    shown: str
    real: str

    def agrees(self) -> bool:
        return normalised(self.shown) == normalised(self.real)


def normalised(text: str) -> list[str]:
    """Return the lines of an output in order, with `…` for parts that differ from run to run.

    Spaces count as one.  The lines are sorted: a thread that logs and the program write in any order.
    """
    text = re.sub(r"[ \t]+", " ", _PROGRESS.sub("", text))
    for pattern in _VOLATILE:
        text = pattern.sub("…", text)
    return sorted(line.rstrip() for line in text.splitlines() if line.strip())


def after_commands(block: Block) -> list[tuple[str, int, str]]:
    """Return the commands of a console block, each with the line where its output begins, and the output."""
    found: list[tuple[str, int, str]] = []
    for number, line in enumerate(block.text.splitlines(keepends=True), block.line):
        if line.startswith("$ "):
            found.append((line[2:].rstrip("\n"), number + 1, ""))
        elif found:
            command, start, output = found[-1]
            found[-1] = command, start, output + line
    return found


def with_real_outputs(page: str, outputs: Sequence[Printed]) -> str:
    """Return the page with the real output in each place where another is shown."""
    lines = page.splitlines(keepends=True)
    for output in sorted(outputs, reverse=True):
        if output.line and not output.agrees():
            start = output.line - 1
            lines[start : start + len(output.shown.splitlines())] = [output.real]
    return "".join(lines)


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    """Collect the output of the block, with logging as it is in a process that has not set it up."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers, root.level
    root.handlers = []
    try:
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            yield stream
    finally:
        root.handlers = handlers
        root.setLevel(level)


@contextlib.contextmanager
def shown_in(path: str) -> Iterator[None]:
    """Add the output of this forked process to a file, with the logs and warnings of a new process."""
    logging.disable(logging.NOTSET)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    yield
    sys.stdout.flush()
    sys.stderr.flush()
