"""The summary of a row: least and median, and ratios to the best rival and to the limit."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.table.rounds import Kind, Row


def summary(row: Row) -> dict[str, Any]:
    """Return a row's summary; a ratio is the median over the rounds, if both took part in every round."""
    best = {kind: _best(row, kind) for kind in ("ours", "rival", "limit")}
    reported: dict[str, Any] = {"row": row.name, "unit": row.unit}
    for kind, who in best.items():
        reported[kind] = None if who is None else {"name": who, **_figures(row.figures[who])}
    for kind in ("rival", "limit"):
        reported[f"ours_over_{kind}"] = _ratio(row.figures, best["ours"], best[kind])
    reported["all"] = {
        who: {"kind": row.kinds[who], **_figures(figures), "rounds": figures}
        for who, figures in row.figures.items()
    }
    return reported | {"missing": row.missing}


def _best(row: Row, kind: Kind) -> str | None:
    medians = {who: statistics.median(each) for who, each in row.figures.items() if row.kinds[who] == kind}
    return min(medians, key=medians.__getitem__, default=None)


def _figures(figures: list[float]) -> dict[str, float]:
    return {"min": min(figures), "median": round(statistics.median(figures), 6)}


def _ratio(figures: Mapping[str, list[float]], ours: str | None, other: str | None) -> float | None:
    if ours is None or other is None:
        return None
    mine, others = figures[ours], figures[other]
    if len(mine) == len(others):
        return _rounded(statistics.median(a / b for a, b in zip(mine, others, strict=True)))
    return _rounded(statistics.median(mine) / statistics.median(others))


def _rounded(ratio: float) -> float:
    return float(f"{ratio:.3g}")


HEADER = """\
| row | unit | reknit | best rival | reknit / rival | limit | reknit / limit |
|---|---|---|---|---|---|---|
"""


def markdown(result: dict[str, Any]) -> str:
    """Return the table, after the circumstances of the run."""
    lines = [f"- {what}: {value}" for what, value in result["run"].items()]
    text = "\n".join(lines) + "\n\nFigures are the least and the median of all rounds.\n\n" + HEADER
    for row in result["rows"]:
        cells = [row["row"], row["unit"], _cell(row["ours"], named=False)]
        for kind in ("rival", "limit"):
            ratio = row[f"ours_over_{kind}"]
            cells += [_cell(row[kind]), "-" if ratio is None else f"{ratio:g}"]
        text += "| " + " | ".join(cells) + " |\n"
    beside = [
        f"- {row['row']}: {_cell(reported | {'name': who})} {row['unit']}"
        for row in result["rows"]
        for who, reported in row["all"].items()
        if reported["kind"] == "beside"
    ]
    missing = sorted({f"- {who}: {why}" for row in result["rows"] for who, why in row["missing"].items()})
    failed = [f"- {group}: {why}" for group, why in result["failed"].items()]
    return text + "".join(
        f"\n{title}\n\n" + "\n".join(each) + "\n"
        for title, each in (
            ("Not compared, since it does not sync its files:", beside),
            ("Not measured:", missing),
            ("Failed:", failed),
        )
        if each
    )


def _cell(reported: Mapping[str, Any] | None, *, named: bool = True) -> str:
    if reported is None:
        return "-"
    figures = f"{reported['min']:.3g}" + (
        "" if reported["min"] == reported["median"] else f" / {reported['median']:.3g}"
    )
    return f"{figures} ({reported['name']})" if named else figures
