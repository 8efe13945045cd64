"""The summary of a row: least and median, and ratios to the best rival and to the limit."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks import aims

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.table.rounds import Kind, Row


def summary(row: Row, group: str = "") -> dict[str, Any]:
    """Return a row's summary; a ratio is the median over the rounds, if both took part in every round."""
    best = {kind: _best(row, kind) for kind in ("ours", "rival", "limit")}
    reported: dict[str, Any] = {"row": row.name, "group": group, "unit": row.unit}
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
    return aims.best(row.figures, [who for who, each in row.kinds.items() if each == kind])


def _figures(figures: list[float]) -> dict[str, float]:
    return {"min": min(figures), "median": round(statistics.median(figures), 6)}


def _ratio(figures: Mapping[str, list[float]], ours: str | None, other: str | None) -> float | None:
    if ours is None or other is None:
        return None
    return float(f"{aims.ratio(figures[ours], figures[other]):.3g}")


def judged(row: Mapping[str, Any]) -> list[aims.Judged]:
    """Return the aims of a row of a result."""
    figures = {who: each["rounds"] for who, each in row["all"].items()}
    ours = [who for who, each in row["all"].items() if each["kind"] == "ours"]
    return list(aims.judged(f"table {row['group']}", row["row"], figures, ours))


HEADER = """\
| row | unit | reknit | best rival | reknit / rival | limit | reknit / limit | aim |
|---|---|---|---|---|---|---|---|
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
        cells.append("; ".join(each.short for each in judged(row)))
        text += "| " + " | ".join(cells) + " |\n"
    missed = [
        f"- {row['row']}: {each.text}" for row in result["rows"] for each in judged(row) if each.met is False
    ]
    beside = [
        f"- {row['row']}: {_cell(reported | {'name': who})} {row['unit']}"
        for row in result["rows"]
        for who, reported in row["all"].items()
        if reported["kind"] == "beside"
    ]
    missing = sorted({f"- {who}: {why}" for row in result["rows"] for who, why in row["missing"].items()})
    measured = [f"- {group}: {when}" for group, when in result.get("measured", {}).items()]
    failed = [f"- {group}: {why}" for group, why in result["failed"].items()]
    return text + "".join(
        f"\n{title}\n\n" + "\n".join(each) + "\n"
        for title, each in (
            ("Aims that are not met, with the reasons:", missed),
            ("Not compared, since it does not sync its files:", beside),
            ("Not measured:", missing),
            ("Failed:", failed),
            ("Measured by group:", measured),
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
