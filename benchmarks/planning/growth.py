"""The growth of the root's part with the number of ranks: a fit, and a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure


def exponent(ranks: Sequence[int], seconds: Sequence[float]) -> float | None:
    """Return the k of the `c * (n log n) ** k` that fits best, None for less than three sizes."""
    if len(ranks) < 3:
        return None
    sizes = np.array(ranks, np.float64)
    slope, _ = np.polyfit(np.log(sizes * np.log(sizes)), np.log(seconds), 1)
    return round(float(slope), 3)


def figure_of(rows: Mapping[str, Any], growth: Mapping[str, Any]) -> Figure:
    """Return a figure of CPU seconds and memory over ranks, with DCP beside."""
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    _seconds(left, rows, growth)
    _memory(right, rows, growth)
    return figure


def _seconds(axes: Any, rows: Mapping[str, Any], growth: Mapping[str, Any]) -> None:
    names = growth["jobs"]
    ranks = np.array(growth["ranks"])
    first = np.array(growth["seconds"])
    axes.plot(ranks, first, "o-", label="405B, TP 8 x PP 16: first save")
    again = [rows[name].get("same_plans", {}).get("planning_and_index_s") for name in names]
    axes.plot(ranks, [np.nan if s is None else s for s in again], "s--", label="the same layout again")
    busiest = [rows[name]["receipts"]["busiest_inner_node_s"] for name in names]
    axes.plot(ranks, busiest, "^:", label="busiest inner node")
    line = ranks * np.log(ranks)
    axes.plot(ranks, first[-1] * line / line[-1], color="0.6", lw=1, label="n log n")
    dcp = [(row["ranks"], row["dcp_global_plan_s"]) for row in rows.values() if "dcp_global_plan_s" in row]
    ours = [(row["ranks"], row["root_s"]) for row in rows.values() if "dcp_global_plan_s" in row]
    for points, style, label in ((dcp, "x-", "DCP"), (ours, "+-", "reknit")):
        if points:
            axes.plot(*zip(*points, strict=True), style, label=f"FSDP2, 500 tensors: {label}")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="CPU seconds of one process")
    axes.set_title("planning and index")
    axes.legend(fontsize=7)


def _memory(axes: Any, rows: Mapping[str, Any], growth: Mapping[str, Any]) -> None:
    ranks, names = growth["ranks"], growth["jobs"]
    mib = 1 << 20
    axes.plot(ranks, [rows[n]["peak_memory_nbytes"] / mib for n in names], "o-", label="root's memory, peak")
    axes.plot(
        ranks,
        [rows[n]["receipts"]["into_root_nbytes"] / mib for n in names],
        "s-",
        label="receipts into the root",
    )
    axes.plot(
        ranks,
        [rows[n]["claims"]["into_root_nbytes"] / mib for n in names],
        "^-",
        label="claims into the root",
    )
    axes.plot(ranks, [rows[n]["index_nbytes"] / mib for n in names], "x-", label="index")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="MiB")
    axes.set_title("405B, TP 8 x PP 16")
    axes.legend(fontsize=7)
