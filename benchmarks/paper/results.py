"""A repeated table of a paper: its rows, kept as JSON, and the summary of all tables as a page."""

from __future__ import annotations

import os
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.aims import judged
from benchmarks.reports import kept

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


SMALL = "REKNIT_PAPER_SMALL"
"""The environment variable of a run with the least sizes."""


def small() -> bool:
    """Return whether this run has the least sizes."""
    return bool(os.environ.get(SMALL))


class About(NamedTuple):
    """A table of a paper: `paper` has the paper's own factors, in words and numbers."""

    name: str
    source: str
    title: str
    paper: str


class Row(NamedTuple):
    """One row of a table.

    `figures` has the figures of each contestant, one for each round; an exact quantity has one.  The factor
    of the row is the figure of `over` divided by that of `ours`, the other way round if `more` is better.
    `paper` has the factors of the paper's own rows, and `why` the reason if the factor here is smaller.
    """

    what: str
    unit: str
    figures: Mapping[str, Sequence[float]]
    over: str = ""
    ours: str = "reknit"
    paper: Sequence[float] = ()
    why: str = ""
    more: bool = False


class Measured(NamedTuple):
    """The rows of a table, the reasons of everything skipped, and notes on sizes and differences.

    `data` is for pictures and texts beside the table, which the table's module writes by `keep`.
    """

    rows: Sequence[Row]
    skipped: Mapping[str, str] = {}
    notes: Sequence[str] = ()
    data: Any = None


def factors(row: Row) -> list[float]:
    """Return the factors of a row by round, or the one of the medians; none without both, or with a zero."""
    ours, others = row.figures.get(row.ours, ()), row.figures.get(row.over, ())
    if not ours or not others or 0 in (*ours, *others):
        return []
    pairs = (
        list(zip(others, ours, strict=True))
        if len(ours) == len(others)
        else [(statistics.median(others), statistics.median(ours))]
    )
    return [b / a if row.more else a / b for a, b in pairs]


def as_json(about: About, measured: Measured, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table as it is kept; `run` has machine, versions, date and load."""
    rows = []
    for row in measured.rows:
        found = factors(row)
        rows.append(
            {
                **row._asdict(),
                "figures": {who: [_short(each, 6) for each in all_] for who, all_ in row.figures.items()},
                "medians": {
                    who: _short(statistics.median(all_), 4) for who, all_ in row.figures.items() if all_
                },
                "factor": _short(statistics.median(found), 4) if found else None,
                "factor_least_and_most": [_short(min(found), 4), _short(max(found), 4)] if found else None,
            }
        )
    return {
        **about._asdict(),
        "run": dict(run),
        "rows": rows,
        "skipped": dict(measured.skipped),
        "notes": list(measured.notes),
    }


HEADER = """\
| row | unit | figures | the paper's factor | our factor (least to most) | behind, and why |
|---|---|---|---|---|---|
"""


def summary(abouts: Iterable[About], folder: Path) -> str:
    """Return the page of all tables, as they are kept in a folder."""
    text = "# The papers' tables, repeated\n\nMade by `scripts/bench paper`. "
    text += "A factor says how many times better reknit is than the contestant that it is compared with.\n"
    for about in abouts:
        text += f"\n## {about.name}: {about.title}\n\n{about.source}. In the paper: {about.paper}\n\n"
        text += _section(kept(folder / f"{about.name}.json"))
    return text


OVERVIEW = """\
| table | repeats | the paper's factors | factors here | rows in which reknit is ahead | skipped |
|---|---|---|---|---|---|
"""


def overview(abouts: Iterable[About], folder: Path) -> str:
    """Return one row for each table: its factors in the paper and here."""
    rows = (_cells(about, kept(folder / f"{about.name}.json")) for about in abouts)
    return OVERVIEW + "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _cells(about: About, table: Mapping[str, Any] | None) -> list[str]:
    repeats = f"{about.source}: {about.title}"
    if table is None:
        return [f"`{about.name}`", repeats, "-", "not measured yet", "-", "-"]
    compared = [row for row in table["rows"] if row["factor"]]
    paper = [factor for row in compared for factor in row["paper"]]
    here = [row["factor"] for row in compared]
    ahead = sum(factor >= 1 for factor in here)
    return [
        f"`{about.name}`",
        repeats,
        _span(paper, "x") if paper else "-",
        _span(here, "x") if here else "-",
        f"{ahead} of {len(here)}" if here else "-",
        str(len(table["skipped"]) or "-"),
    ]


def _section(table: Mapping[str, Any] | None) -> str:
    if table is None:
        return "Not measured yet.\n"
    lines = [line_of(row) for row in table["rows"]]
    text = HEADER + "".join(f"| {' | '.join(cells)} |\n" for cells in lines) if lines else ""
    run = table["run"]
    said = [
        *table["notes"],
        *aims_of(table),
        *(f"Skipped: {what}: {why}" for what, why in table["skipped"].items()),
    ]
    said.append(
        f"Measured on {run['date']} with {run['sizes']} sizes in {run['seconds']:g} s; "
        f"load average {run['load_before']:g} before and {run['load_after']:g} after."
    )
    return text + "\n" + "".join(f"- {each}\n" for each in said)


def aims_of(table: Mapping[str, Any]) -> list[str]:
    """Return the aims of a table's rows, with the reason where one is missed."""
    return [
        f"{row['what']}: {each.text}."
        for row in table["rows"]
        for each in judged(f"paper {table['name']}", row["what"], row["figures"], (row["ours"],))
    ]


def line_of(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row of the summary."""
    figures = ", ".join(f"{who} {_number(value)}" for who, value in row["medians"].items())
    paper = _span(row["paper"], "x") if row["paper"] else "-"
    factor = row["factor"]
    if factor is None:
        return [row["what"], row["unit"], figures, paper, "-", row["why"]]
    ours = f"{_number(factor)}x ({' to '.join(_number(each) for each in row['factor_least_and_most'])})"
    return [row["what"], row["unit"], figures, paper, ours, behind(row)]


def behind(row: Mapping[str, Any]) -> str:
    """Return whether a row is behind the other contestant or the paper's factor, with the reason."""
    factor, paper = row["factor"], min(row["paper"], default=0.0)
    if factor < 1:
        return f"behind {row['over']}: {row['why'] or 'no reason found'}"
    return f"smaller than in the paper: {row['why'] or 'no reason found'}" if factor < paper else ""


def _span(values: Sequence[float], unit: str) -> str:
    ends = dict.fromkeys(_number(value) for value in (min(values), max(values)))
    return " to ".join(ends) + unit


def _number(value: float) -> str:
    if value and abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}"


def _short(value: float, digits: int) -> float:
    """Return a figure with so many digits; whole numbers stay exact."""
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")
