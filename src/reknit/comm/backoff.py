"""Growing pauses between attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def doubling(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield seconds without end: `first_s`, then twice as many each time, up to `longest_s`."""
    while True:
        yield first_s
        first_s = min(longest_s, first_s * 2)
