"""Where are the elements of parts that lie one after the other, if one element of each comes in turn?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class Interleaving(NamedTuple):
    """The places of equal parts along `dim`, within groups of `parts` times `length` elements.

    On one side, the parts of a group lie one after the other.  On the other side, one element of each part
    comes in turn.  With `apart`, the target has them one after the other.
    """

    dim: int
    parts: int
    length: int
    apart: bool

    def needed(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of the source that has all elements of a range of the target."""
        group = self.parts * self.length
        first, last = start // group * group, (stop - 1) // group * group
        if first != last:
            return first, last + group
        # Within a group, row and column of the target are column and row of the source.
        columns, rows = (self.length, self.parts) if self.apart else (self.parts, self.length)
        (top, left), (bottom, right) = divmod(start - first, columns), divmod(stop - 1 - first, columns)
        if top != bottom:
            left, right = 0, columns - 1
        return first + left * rows + top, first + right * rows + bottom + 1

    def moves(self, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Yield places in a range of the target, and in the range of the source that is `needed` for it."""
        group = self.parts * self.length
        origin = self.needed(start, stop)[0]
        for first in range(start // group * group, stop, group):
            for part in range(self.parts):
                together, turns = (first + part * self.length, 1), (first + part, self.parts)
                (at, step), (of, source_step) = (together, turns) if self.apart else (turns, together)
                low = max(0, -((at - start) // step))
                high = min(self.length, -((at - stop) // step))
                if low < high:
                    yield (
                        _places(at - start, step, low, high),
                        _places(of - origin, source_step, low, high),
                    )


def _places(first: int, step: int, low: int, high: int) -> slice:
    return slice(first + low * step, first + (high - 1) * step + 1, step)
