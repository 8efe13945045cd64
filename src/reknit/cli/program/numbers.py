"""Parse the numbers of options."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from reknit.errors import shown

if TYPE_CHECKING:
    from collections.abc import Callable

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
