"""The summary of a save or load as lines of text, with sparklines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reknit.monitor.progress_text import amount
from reknit.monitor.reports.operation_summary import summary, time_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from reknit.monitor.figures.throughput import Limit
    from reknit.monitor.reports.operation_summary import OperationFigures
    from reknit.monitor.reports.recorded_operations import RecordedOperation

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-=+*%#"
_WIDTH = 60


def summary_lines(
    figures: OperationFigures,
    limit: Limit | None,
    others: Sequence[RecordedOperation] = (),
    *,
    encoding: str | None = "utf-8",
) -> Iterator[str]:
    """Yield the summary of an operation; `others` are those of its action, itself included, oldest first.

    Sparklines use letters that `encoding` has.
    """
    found = summary(figures, limit)
    facts = ", ".join(f"{name}: {value}" for name, value in found.facts)
    yield f"{figures.operation}: {found.outcome}"
    yield f"  {facts}"
    if found.last:
        yield f"  last: {found.last}"
    if found.reason:
        yield f"  why:  {found.reason}"
    for line in found.advice:
        yield f"  do:   {line}"
    letters = letters_of(encoding)
    if len(figures.throughput) and (most := float(figures.throughput.max())) > 0:
        drawn = sparkline(figures.throughput, letters)
        yield f"  throughput    {drawn}  up to {amount(most)}/s, over {time_of(figures.operation.elapsed_s)}"
    if figures.culprit is not None and len(figures.columns.ranks) > 1:
        lane = figures.culprit.part.lane
        seconds = np.nan_to_num(figures.columns.seconds()[lane])
        drawn = sparkline(seconds, letters)
        name = figures.columns.lanes[lane]
        yield f"  ranks         {drawn}  {name}: up to {time_of(float(seconds.max()))}, by rank"
    if len(others) > 1:
        seconds = np.array([max(each.elapsed_s, 0.0) for each in others[-_WIDTH:]])
        drawn = sparkline(seconds, letters)
        name = f"{figures.operation.action}s"
        yield f"  {name:12}  {drawn}  up to {time_of(float(seconds.max()))}, by step"


def sparkline(values: NDArray[np.float64], letters: str = _BLOCKS, width: int = _WIDTH) -> str:
    """Return numbers from 0 on as a line of letters: of more than `width`, the highest of each part."""
    if len(values) > width:
        edges = np.arange(width) * len(values) // width
        values = np.maximum.reduceat(values, edges)
    most = float(values.max()) if len(values) else 0.0
    if most <= 0:
        return letters[0] * len(values)
    level = np.minimum((values / most * len(letters)).astype(np.int64), len(letters) - 1)
    return "".join(letters[each] for each in level.tolist())


def letters_of(encoding: str | None) -> str:
    """Return letters of rising height that a stream of this encoding can show."""
    try:
        _BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _ASCII
    return _BLOCKS
