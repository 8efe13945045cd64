"""A line below the cell of a notebook: written anew, empty in the end, and not there in other shells."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from reknit.events.phase import Recorder
from reknit.events.progress import Intervals, notebook_line, progress
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Cell:
    """The displays that a notebook shows below a cell, each with all its texts."""

    def __init__(self) -> None:
        self.displays: list[list[str]] = []
        self.on_text: Callable[[str], None] = lambda text: None

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id, "or it could not be written anew"
        reported: list[str] = []
        self.displays.append(reported)

        def update(content: dict[str, str], *, raw: bool) -> None:
            reported.append(content["text/plain"])
            self.on_text(reported[-1])

        update(content, raw=True)
        return SimpleNamespace(update=update)


def install(monkeypatch: pytest.MonkeyPatch, shell: object) -> Cell:
    """Let this process look as if IPython ran it."""
    cell = Cell()
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    display.display = cell.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return cell


def test_progress_is_one_line_below_the_cell_and_gone_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = install(monkeypatch, SimpleNamespace(kernel=object()))
    recorder = Recorder("load", path="ck/step_5")
    threads, seen = [], []

    def note(text: str) -> None:
        seen.append(text)
        recorder.advance(100)

    cell.on_text = note
    recorder.expect(400)
    with progress(
        recorder,
        lambda name, work: threads.append(start_thread(name, work)),
        intervals=Intervals(0, 0.001, 3600),
    ):
        while not any("100 %" in text for text in seen):
            threads[0].join(0.001)
    threads[0].join(60)
    (reported,) = cell.displays
    assert reported[0].startswith("load from ck/step_5: 0 %")
    assert reported[-1] == ""


def test_a_process_without_a_notebook_has_no_such_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[object] = [None, SimpleNamespace(), SimpleNamespace(kernel=None)]
    for shell in cases:
        install(monkeypatch, shell)
        assert notebook_line() is None, shell
        monkeypatch.delitem(sys.modules, "IPython")
        assert notebook_line() is None, shell
