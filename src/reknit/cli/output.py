"""Output on a terminal (tables, sizes, times; with rich if it is installed), and numbers in options."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reknit.errors import UsageError, shown
from reknit.errors import printable as printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


_MOST = 10**18
_MOST_DIGITS = 100
"""Digits of the longest number that is read."""


def whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    """Return the type of an option that takes whole numbers from `least` to `most`."""

    def parsed(text: str) -> int:
        try:
            found = int(text[:_MOST_DIGITS])
        except ValueError:
            found = least - 1
        if not least <= found <= most:
            up_to = "on" if most == _MOST else f"to {most}"
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number from {least} {up_to}")
        return found

    return parsed


def amount_of(text: str) -> float:
    """Return a positive number in a plausible range, of seconds or hours, for example."""
    try:
        found = float(text[:_MOST_DIGITS])
    except ValueError:
        found = 0.0
    if not 1e-6 <= found <= 1e9:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number from 1e-06 to 1e+09")
    return found


def count_text(count: int) -> str:
    """Return a large count for people."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return str(count)


def time_text(seconds: float) -> str:
    """Return seconds since the epoch as UTC time."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):  # a time beyond all calendars
        return f"{seconds:g} s"


def readable(value: object) -> str:
    """Return plain data as words: ``torch 2.9.0, numpy 2.1.0`` for a dict, ``a, b`` for a list."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_inside(inner)}" for name, inner in value.items()) or "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_inside, value)) or "-"
    return "-" if value is None else str(value)


def _inside(value: object) -> str:
    return f"({readable(value)})" if isinstance(value, (dict, list, tuple)) else readable(value)


def write_text(path: str, text: str) -> None:
    """Write a file that a user named.  Raises `UsageError` where it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", remedy="name a file in a folder that can be written to"
        ) from error


def print_json(value: Any) -> None:
    """Print plain data as JSON."""
    print(json.dumps(value, indent=2))


def print_fields(fields: Mapping[str, object]) -> None:
    """Print names and values, one pair per line."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        print(f"{name:<{width}}  {printable(value)}".rstrip())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()) -> None:
    """Print rows below column names; `right` names the columns of numbers."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and _print_rich(columns, cells, right):
        return
    widths = [max(len(line[k]) for line in [columns, *cells]) for k in range(len(columns))]
    for line in [columns, *cells]:
        padded = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(line, widths, columns, strict=True)
        ]
        print("  ".join(padded).rstrip())


def _print_rich(columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[str]) -> bool:
    """Print with rich, or return False if it is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for line in cells:
        table.add_row(*(Text(cell) for cell in line))
    Console().print(table)
    return True
