from __future__ import annotations

import builtins
import io
import sys
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from reknit.cli.output import count_text, print_table, printable, time_text

if TYPE_CHECKING:
    import pytest


def test_counts_are_told_with_three_digits_or_so() -> None:
    assert [count_text(n) for n in (999, 1000, 7_241_732_096, 10**12)] == ["999", "1.00K", "7.24B", "1.00T"]


def test_a_time_that_no_calendar_has_is_told_in_seconds() -> None:
    assert time_text(0.0) == "1970-01-01 00:00:00"
    assert time_text(1e30) == "1e+30 s"


@given(st.text())
def test_a_printable_text_has_one_line_and_cannot_steer_a_terminal(text: str) -> None:
    assert printable(text).isprintable()
    if text.isprintable():
        assert printable(text) == text


def test_columns_of_a_table_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("NAME", "SIZE"), [("a", 5), ("long\nname", 12345)], right=("SIZE",))
    assert capsys.readouterr().out == "NAME         SIZE\na               5\nlong\\nname  12345\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_same_cells_from_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    print_table(("NAME", "SIZE"), [("[bold]x", 5)], right=("SIZE",))
    assert isinstance(sys.stdout, Terminal)
    assert "[bold]x" in sys.stdout.getvalue()
    assert "SIZE" in sys.stdout.getvalue()


def test_a_terminal_without_rich_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_rich(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(builtins, "__import__", without_rich)
    print_table(("NAME",), [("x",)])
    assert isinstance(sys.stdout, Terminal)
    assert sys.stdout.getvalue() == "NAME\nx\n"
