"""The picture of one save or load: bars, cells and throughput, as plain data of bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.monitor.page.page_file import packed
from reknit.monitor.reports.report_text import place_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reknit.monitor.figures.event_columns import EventColumns
    from reknit.monitor.reports.operation_summary import OperationFigures

_MOST_RANKS = 32_768
_MOST_CELLS = 400_000
_MOST_BARS = 120_000
_MOST_AXES = 8
_FULL = 65_535
"""Times are whole numbers up to this one, which stands for the end of the operation."""
_JOINED = (0, 16, 64, 256, 1024, 4096, _FULL)
"""Bars with gaps of at most so many of these units are joined, until few enough are left."""
_FAILED = 128
_SPARSE = 64
"""Added to the lane of a bar: of a phase that failed, and of one that works in little of its time."""
_SPARSE_SHARE = 0.2


def detail(figures: OperationFigures) -> dict[str, Any]:
    """Return the picture of an operation, of which a page draws timeline, heat map and throughput."""
    columns = figures.columns
    whole_s = max(float(columns.stop.max()) if len(columns.stop) else 0.0, 1e-9)
    num_ranks = min(len(columns.ranks), _MOST_RANKS)
    axes = list(dict.fromkeys(axis for place in columns.places for axis in place))[:_MOST_AXES]
    return {
        "seconds": whole_s,
        "lanes": [
            {"name": name, "work": bool(work)}
            for name, work in zip(columns.lanes, columns.is_work, strict=True)
        ],
        "ranks": packed(np.array(columns.ranks[:num_ranks]), "<u4"),
        "num_ranks": len(columns.ranks),
        "hosts": columns.hosts,
        "host": packed(columns.host_of[:num_ranks], "<u2" if len(columns.hosts) < _FULL else "<u4"),
        "axes": axes,
        "places": [
            packed(np.array([_at(place, axis) for place in columns.places[:num_ranks]]), "<i4")
            for axis in axes
        ],
        "bars": _bars(columns, whole_s, num_ranks),
        "cells": _cells(columns, num_ranks),
        "path": [_part(columns, part) for part in figures.path],
        "throughput": [round(float(each), 1) for each in figures.throughput],
    }


def _at(place: dict[str, int], axis: str) -> int:
    return int(np.clip(place.get(axis, -1), -1, 2**31 - 1))


def _part(columns: EventColumns, part: Any) -> dict[str, Any]:
    """Return a part of the critical path; its rank has a name here, as it may be left out elsewhere."""
    named = part.rank >= 0
    return {
        "row": part.rank,
        "name": f"rank {columns.ranks[part.rank]}{place_text(columns.places[part.rank])}" if named else "",
        "lane": part.lane,
        "start": round(part.start, 6),
        "stop": round(part.stop, 6),
    }


def _cells(columns: EventColumns, num_ranks: int) -> list[dict[str, Any]]:
    """Return the seconds of each lane on each rank, as shares of the most seconds in this lane.

    The lanes with the most seconds come first where the number of cells is limited.
    """
    seconds = columns.seconds()[:, :num_ranks]
    kept = np.argsort(-np.nansum(seconds, axis=1), kind="stable")[: max(_MOST_CELLS // max(num_ranks, 1), 1)]
    found = []
    for lane in sorted(kept.tolist()):
        row = seconds[lane]
        there = row[~np.isnan(row)]
        if not len(there):
            continue
        most = float(there.max())
        shares = np.round(np.nan_to_num(row) / max(most, 1e-12) * (_FULL - 1))
        shares[np.isnan(row)] = _FULL
        found.append(
            {
                "lane": lane,
                "least": float(there.min()),
                "median": float(np.median(there)),
                "most": most,
                "of": packed(shares, "<u2"),
            }
        )
    return found


def _bars(columns: EventColumns, whole_s: float, num_ranks: int) -> dict[str, Any]:
    """Return the bars of the timeline, in the order of rank and lane: bars that overlap or touch are one."""
    shown = columns.rank < num_ranks
    unit = _FULL / whole_s
    start = np.clip(np.floor(columns.start[shown] * unit), 0, _FULL).astype(np.int64)
    stop = np.clip(np.ceil(columns.stop[shown] * unit), 0, _FULL).astype(np.int64)
    key = columns.rank[shown] * len(columns.lanes) + columns.lane[shown]
    elapsed = columns.stop[shown] - columns.start[shown]
    marks = _FAILED * columns.failed[shown] + _SPARSE * (columns.busy[shown] < _SPARSE_SHARE * elapsed)
    order = np.lexsort((start, key))
    key, start, stop, marks = key[order], start[order], stop[order], marks[order]
    for gap in _JOINED:
        key, start, stop, marks = _joined(key, start, stop, marks, gap)
        if len(key) <= _MOST_BARS:
            break
    left_out = max(len(key) - _MOST_BARS, 0)
    if left_out:  # the longest say most
        kept = np.sort(np.argsort(start - stop, kind="stable")[:_MOST_BARS])
        key, start, stop, marks = key[kept], start[kept], stop[kept], marks[kept]
    rank, lane = np.divmod(key, max(len(columns.lanes), 1))
    return {
        "rank": packed(rank, "<u2" if num_ranks <= _FULL else "<u4"),
        "lane": packed(lane + marks, "u1"),
        "start": packed(start, "<u2"),
        "length": packed(stop - start, "<u2"),
        "left_out": left_out,
    }


def _joined(
    key: NDArray[np.int64],
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
    marks: NDArray[np.int64],
    gap: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Join bars of one rank and lane with at most this gap between them; they are sorted by start."""
    if not len(key):
        return key, start, stop, marks
    wide = 2 * _FULL + 2
    reach = np.maximum.accumulate(stop + key * wide)
    first = np.flatnonzero(np.concatenate(([True], start[1:] + key[1:] * wide > reach[:-1] + gap)))
    ends = np.maximum.reduceat(stop, first)
    failed = np.bitwise_or.reduceat(marks, first) & _FAILED
    return key[first], start[first], ends, failed | np.bitwise_and.reduceat(marks, first) & _SPARSE
