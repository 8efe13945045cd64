"""The content of a terminal: a real one, of a process of its own."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from typing import IO, TYPE_CHECKING, NamedTuple

import pytest

from reknit.events.progress import terminal_line

if TYPE_CHECKING:
    from pathlib import Path

ERASE = "\r\x1b[2K"
SAVE = """
import sys
import numpy as np
import reknit
from reknit.events import progress
from tests.storage.process_memory import ProcessMemory
from reknit.storage.registry import register
from reknit.testing.faulty_storage import Fault, FaultyStorage

if "--no-rich" in sys.argv:
    sys.modules["rich"] = None
progress.INTERVALS = progress.Intervals(0.0, 0.001, 0.001)
plan = [Fault("stall", 1, "finish")]
store = ProcessMemory("x").sub("deep/" * 29 + "deep")
register("stalled", lambda url, durability: FaultyStorage(store, plan=plan, stall=sys.stdin.readline))
reknit.save("stalled://x", {"model": {"w": np.ones(1 << 20, np.float32)}})
print("saved", "rich.console" in sys.modules)
"""


class Screen(NamedTuple):
    """A process whose standard error is a terminal, and our end of that."""

    process: subprocess.Popen[str]
    end: IO[bytes]

    def until(self, part: str, seen: str = "") -> str:
        """Return the shown text, up to a part of it, or up to the end."""
        while not part or part not in seen:
            try:
                data = os.read(self.end.fileno(), 1 << 16)
            except OSError:  # the error of Linux when the process has ended
                break
            if not data:
                break
            seen += data.decode()
        return seen


def begin(*arguments: str, **environment: str) -> Screen:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "70", **environment},
        )
    return Screen(process, os.fdopen(ours, "rb", buffering=0))


def finish(screen: Screen, seen: str) -> tuple[str, str]:
    """Let the process go on; return all that it has shown, and its output."""
    with screen.end, screen.process:
        assert screen.process.stdin is not None
        assert screen.process.stdout is not None
        screen.process.stdin.write("\n")
        screen.process.stdin.close()
        seen = screen.until("", seen)
        return seen, screen.process.stdout.read()


def test_a_terminal_shows_one_line_that_is_gone_in_the_end() -> None:
    screen = begin()
    shown, printed = finish(screen, screen.until("4.0 of 4.0 MiB"))
    assert printed == "saved True\n"
    assert screen.process.returncode == 0
    assert shown.startswith(ERASE)
    assert shown.endswith(ERASE)
    assert "\n" not in shown
    lines = [line for line in shown.split(ERASE) if line]
    assert all(line.startswith("save to ...") and len(line) < 70 for line in lines)
    assert any("deep: 100 % (4.0 of 4.0 MiB), commit" in line for line in lines), lines


def test_ctrl_c_leaves_a_clean_line() -> None:
    screen = begin()
    shown = screen.until("4.0 of 4.0 MiB")
    screen.process.send_signal(signal.SIGINT)
    shown, printed = finish(screen, shown)
    assert printed == ""
    line, _, reported = shown.partition("Traceback")
    assert line.endswith(ERASE)
    assert "KeyboardInterrupt" in reported
    assert ERASE not in reported


def test_without_rich_and_on_a_dumb_terminal_nothing_is_shown() -> None:
    cases: list[tuple[list[str], dict[str, str]]] = [(["--no-rich"], {}), ([], {"TERM": "dumb"})]
    for arguments, environment in cases:
        shown, printed = finish(begin(*arguments, **environment), "")
        assert printed.startswith("saved"), arguments
        assert shown == "", arguments


class WritesOnly:
    """A stream as some programs set it."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


class BrokenTee(WritesOnly):
    closed = False
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise BrokenPipeError

    flush = write  # type: ignore[assignment]


def test_a_stream_with_write_and_flush_alone_has_no_line() -> None:
    assert terminal_line(WritesOnly()) is None  # type: ignore[arg-type]


def test_a_broken_pipe_leaves_standard_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    line = terminal_line(BrokenTee())  # type: ignore[arg-type]
    assert line is not None
    before = os.fstat(1)
    with pytest.raises(BrokenPipeError):
        line.show("text")
    assert os.path.samestat(os.fstat(1), before)


def test_a_stream_that_is_no_terminal_has_no_line(tmp_path: Path) -> None:
    assert terminal_line(None) is None
    assert terminal_line(io.StringIO()) is None
    with (tmp_path / "f").open("w") as file:
        assert terminal_line(file) is None
    assert terminal_line(file) is None, "closed"
