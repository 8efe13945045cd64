"""A report as one HTML page in one file: its parts, its data and its pictures, without a network."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import lru_cache
from importlib import resources
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.monitor.figures import Limit, highest
from reknit.monitor.storage_figures import STORAGE_HEADS, error_texts, histogram, storage_rows, time_text
from reknit.monitor.summary import blocked_s, figures_of, summary
from reknit.monitor.text import PHASE_HEADS, RUN_HEADS, phase_rows, place_text, remarks, run_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from reknit.monitor.figures import EventColumns
    from reknit.monitor.operations import RecordedOperation
    from reknit.monitor.summary import CostTable, OperationFigures
    from reknit.plugins.events import PhaseRecord


_COMMON_SCRIPTS = ("uPlot.iife.min.js", "common.js")
_STYLES = ("uPlot.min.css", "page.css")
_PARTS = ("<!--STYLES-->", "<!--SCRIPTS-->", "<!--DATA-->", "<!--POLICY-->")


@lru_cache(maxsize=8)
def page_file(body: str, scripts: tuple[str, ...]) -> str:
    """Return the page without data, from a file of this folder, with `scripts` after the common ones.

    A page without data requests them from its server.
    """
    policy = f'<meta http-equiv="Content-Security-Policy" content="{content_policy(scripts, frames=False)}">'
    styles = "".join(f"<style>{_text(name)}</style>" for name in _STYLES)
    code = "".join(f"<script>{_text(name)}</script>\n" for name in (*_COMMON_SCRIPTS, *scripts))
    text = _text(body)
    for mark, part in zip(_PARTS, (styles, code, None, policy), strict=True):
        if part is not None:
            text = text.replace(mark, part)
    return text


def with_data(page: str, data: Any) -> str:
    """Return a page with its data, as a block of JSON, which browsers never run."""
    # Names in the data come from strangers, and must not end the block.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return page.replace(_PARTS[2], f'<script type="application/json" id="data">{text}</script>')


@lru_cache(maxsize=8)
def content_policy(scripts: tuple[str, ...], *, frames: bool = True) -> str:
    """Return the content policy of a page: only the scripts and styles of this package, by their digests.

    `frames` adds the rule about frames of other pages, which only the header of an answer may have.
    """
    code = " ".join(f"'{_digest(name)}'" for name in (*_COMMON_SCRIPTS, *scripts))
    styles = " ".join(f"'{_digest(name)}'" for name in _STYLES)
    rules = (
        f"default-src 'none'; script-src {code}; style-src {styles}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"{rules}; frame-ancestors 'none'" if frames else rules


def packed(values: NDArray[Any], dtype: str) -> str:
    """Return numbers as base64, for a typed array of the page."""
    return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode()


def _digest(name: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(_text(name).encode()).digest()).decode()


@lru_cache(maxsize=32)
def _text(name: str) -> str:
    return resources.files(__package__).joinpath("assets").joinpath(name).read_text(encoding="utf-8").strip()


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


_MOST_LISTED = 200
_MOST_OPERATIONS = 2_000
"""The last operations that the page shows: a run may have phases of its own at each step."""
_MOST_FIGURED = 300
"""The last operations with a summary and tables."""
_MOST_ROWS = 30
"""Phases, remarks, and kinds of operations of stores, of one operation."""
_MOST_LETTERS = 400
_DETAIL_LETTERS = 3_000_000
"""The pictures of the last operations take at most so many letters; the last one always has a picture."""
_SCRIPTS = ("heat_map.js", "timeline.js", "report.js")


class PageContent(NamedTuple):
    """The data of a page: `shown` without pictures, and the figures of the operations that have some."""

    shown: dict[str, Any]
    figures: list[OperationFigures | None]


def report_page(
    operations: Sequence[RecordedOperation],
    costs: CostTable | None = None,
    run: Sequence[PhaseRecord] = (),
    limit_bytes_per_s: float | None = None,
) -> str:
    """Return the page: summary, timeline, heat map, throughput, steps, storage and tables."""
    found = content(operations, costs, run, limit_bytes_per_s)
    left = _DETAIL_LETTERS
    for each, figures in zip(reversed(found.shown["operations"]), reversed(found.figures), strict=True):
        if figures is None:
            break
        picture = detail(figures)
        left -= _letters(picture)
        if left < 0 and figures is not found.figures[-1]:
            break
        each["detail"] = picture
    return with_data(live_page(), found.shown)


def live_page() -> str:
    """Return the page without data, which it requests from its server whenever they change."""
    return page_file("report.html", _SCRIPTS)


def live_policy() -> str:
    """Return the content policy of the page, for the header of an answer."""
    return content_policy(_SCRIPTS)


def content(
    operations: Sequence[RecordedOperation],
    costs: CostTable | None = None,
    run: Sequence[PhaseRecord] = (),
    limit_bytes_per_s: float | None = None,
    figured: Callable[[RecordedOperation], OperationFigures] = figures_of,
) -> PageContent:
    """Return the content of the page as plain data, with a bounded number of operations, axes and phases.

    `figured` returns the figures of an operation; it may have kept them.
    """
    operations = operations[-_MOST_OPERATIONS:]
    without = max(len(operations) - _MOST_FIGURED, 0)
    figures = [None if n < without else figured(each) for n, each in enumerate(operations)]
    limit = limit_of(figures, limit_bytes_per_s)
    shown = {
        "phase_heads": PHASE_HEADS,
        "storage_heads": STORAGE_HEADS,
        "run_heads": RUN_HEADS,
        "run": [_clipped(row) for row in run_rows(run[-_MOST_LISTED:])],
        "costs": None if costs is None else costs._asdict(),
        "limit": None if limit is None else limit._asdict() | {"noun": limit.noun},
        "operations": [
            brief(each) | ({} if figured is None else facts(figured, limit))
            for each, figured in zip(operations, figures, strict=True)
        ],
    }
    return PageContent(shown, figures)


def limit_of(
    figures: Sequence[OperationFigures | None], limit_bytes_per_s: float | None = None
) -> Limit | None:
    """Return the given limit, or else the highest throughput of these operations; None without bytes."""
    if limit_bytes_per_s is not None:
        return Limit(limit_bytes_per_s, given=True)
    best = highest(each.throughput for each in figures if each is not None)
    return Limit(best, given=False) if best > 0 else None


def brief(operation: RecordedOperation) -> dict[str, Any]:
    """Return the facts on an operation that the strip of all steps needs."""
    return {
        "name": _clip(str(operation)),
        "action": operation.action,
        "step": operation.step,
        "started": operation.started,
        "seconds": operation.elapsed_s,
        "nbytes": operation.nbytes,
        "blocked": blocked_s(operation) or 0.0,
        "failed": len(operation.failures),
    }


def facts(figures: OperationFigures, limit: Limit | None) -> dict[str, Any]:
    """Return summary and tables of an operation."""
    operation = figures.operation
    found = summary(figures, limit)
    rows = phase_rows(operation)
    longest = sorted(rows, key=lambda row: -float(row[5]))[:_MOST_ROWS]
    return {
        "summary": found._asdict()
        | {"last": _clip(found.last), "reason": _clip(found.reason), "advice": _clipped(found.advice)},
        "remarks": [_clip(line) for line in islice(remarks(operation), _MOST_ROWS)],
        "phases": [_clipped(row) for row in (rows if len(rows) <= _MOST_ROWS else longest)],
        "storage": _storage(operation),
    }


def _storage(operation: RecordedOperation) -> dict[str, Any]:
    """Return the operations of stores: a table, errors, and a histogram for each row."""
    busiest = sorted(operation.storage.items(), key=lambda entry: -entry[1].seconds)[:_MOST_ROWS]
    return {
        "rows": [_clipped(row) for row in storage_rows(dict(busiest), operation.elapsed_s)],
        "errors": [_clip(line) for line in islice(error_texts(operation.storage), _MOST_ROWS)],
        "bars": [[(time_text(bar.up_to_s), bar.num) for bar in histogram(one)] for _, one in busiest],
    }


def _letters(picture: dict[str, Any]) -> int:
    """Return about how many letters a picture takes in a page."""
    bars = sum(len(each) for each in picture["bars"].values() if isinstance(each, str))
    cells = sum(len(each["of"]) for each in picture["cells"])
    places = sum(map(len, (*picture["places"], picture["ranks"], picture["host"])))
    return bars + cells + places + sum(map(len, picture["hosts"])) + 150 * len(picture["path"]) + 4_000


def _clip(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…"


def _clipped(texts: Sequence[str]) -> list[str]:
    return [_clip(text) for text in texts]
