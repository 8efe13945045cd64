"""Appendix of ByteCheckpoint: the share of training that counts in the time, and the GPU time that is lost.

The appendix spreads failures evenly over the interval between two saves.  Half an interval and half a save
are then lost on average, and a load.  The times of DCP and MCP are the paper's, at the paper's scales.  Those
of reknit are a projection: the rival's times over factors that were measured side by side on this machine.
The factors are those of the most similar workload in the table `stalls` if it was kept, else of
benchmarks/results/table.json.

Every policy is then asked at each step of 54 days.  Failures come at random moments, as often as in the
pre-training of Llama 3 405B: 419 unexpected interruptions (arXiv 2407.21783, section 3.3.4).  The costs of
torch DCP and Orbax are those for 405B parameters on 64 GPUs of the Orbax paper (table 1, median).
"""

from __future__ import annotations

import json
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks import reports
from benchmarks.paper.results import About, Measured, Row, small
from benchmarks.pictures import draw_both
from benchmarks.reports import RESULTS, kept
from reknit.policies import Facts, Moment, auto, every
from reknit.policies.save_policies import RunCosts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from reknit.policies import Policy

ABOUT = About(
    name="ettr",
    source="appendix of ByteCheckpoint, on average ETTR",
    title="effective training time, and GPU time that is lost",
    paper="ByteCheckpoint raises the effective training time ratio 1.16 to 1.29 times.",
)
INTERVAL_S = 200.0
"""100 steps of 2 s between two saves; the paper gives neither number."""
DAYS = 54.0
DAY_S = 86400.0
MTTF_S = 54 * DAY_S / 419
STEP_S, RESTART_S = 20.0, 300.0
"""The seconds of a step of the trace, and those from a failure to the load."""
MINUTES = (2.0, 5.0, 10.0, 30.0, 60.0, 180.0)
OURS = "reknit, projected"
OF_THE_TRACE = "FSDP2"
"""The workload whose factors the trace takes."""


class Times(NamedTuple):
    """The seconds that training stops for a save, of a save, and of a load (same layout and another)."""

    stall_s: float
    save_s: float
    load_s: float

    def over(self, factors: Times) -> Times:
        """Return these times divided by factors."""
        return Times(*(time_s / factor for time_s, factor in zip(self, factors, strict=True)))

    def wasted_s(self, interval_s: float) -> float:
        """Return the time that a failure costs on average, as in the appendix."""
        return 0.5 * (interval_s + self.save_s) + self.load_s

    def ettr(self, interval_s: float) -> float:
        return interval_s / (interval_s + self.wasted_s(interval_s))


class Scale(NamedTuple):
    """A workload of the paper's Table 4: its GPUs, ours that is most like it, and the times of the others."""

    name: str
    gpus: int
    like: str
    theirs: Times
    bytecheckpoint: Times

    @property
    def rival(self) -> str:
        return "MCP" if self.like == "Megatron" else "DCP"


DCP_405B = Times(7.9, 595.0, 169.5)
ORBAX_405B = Times(12.8, 173.0, 117.2)
SCALES = (
    Scale("vDiT 4B", 32, "FSDP1", Times(16.25, 86.82, (50.12 + 74.89) / 2), Times(0.54, 27.47, 13.85)),
    Scale("vDiT 4B", 128, "FSDP1", Times(61.37, 236.34, (105.74 + 91.01) / 2), Times(0.38, 23.74, 12.825)),
    Scale("tGPT 70B", 2400, "Megatron", Times(4.73, 28.97, (69.87 + 126.30) / 2), Times(0.39, 13.11, 55.79)),
    Scale("tGPT 70B", 4800, "Megatron", Times(4.70, 76.21, (123.80 + 64.62) / 2), Times(0.36, 8.59, 59.35)),
)


def measure(scratch: Path) -> Measured:
    """Compute the ratios for each scale of the paper, and on a trace of failures."""
    factors, source, skipped = _factors()
    rows = [row for scale in SCALES for row in _rows(scale, factors[scale.like])]
    days = 1.0 if small() else DAYS
    found = on_a_trace(factors[OF_THE_TRACE], days)
    rows += _of_the_trace(found, days)
    said = ", ".join(
        f"{workload}: stall {each.stall_s:.2f}, save {each.save_s:.2f}, load {each.load_s:.2f}"
        for workload, each in factors.items()
    )
    return Measured(
        rows,
        skipped,
        [
            f"Factors of reknit from {source}. {said}.",
            "vDiT trains with FSDP and ZeRO-2, as FSDP1 here; the trace takes the factors of FSDP2.",
            f"{INTERVAL_S:g} s between two saves; a load is the mean of both layouts.",
            "A projection: on GPUs and networks both factors and times will differ.",
        ],
        found,
    )


def _factors() -> tuple[dict[str, Times], str, dict[str, str]]:
    """Return the factors of reknit by workload, their source, and the workloads without rows of their own."""
    stalls = kept(RESULTS / "paper" / "stalls.json")
    found = {} if stalls is None else _of_stalls(stalls["rows"])
    source = "the table `stalls`"
    if OF_THE_TRACE not in found:
        found, source = {OF_THE_TRACE: _of_the_readme()}, "benchmarks/results/table.json"
    missing = {
        f"{name} beside reknit": f"no row in the table `stalls`; factors of {OF_THE_TRACE} stand for it"
        for name in (OF_THE_TRACE, *dict.fromkeys(scale.like for scale in SCALES))
        if name not in found
    }
    return {scale.like: found[OF_THE_TRACE] for scale in SCALES} | found, source, missing


def _of_the_readme() -> Times:
    """Return the factors over DCP of the README's table."""
    rows = {row["row"]: row for row in json.loads((RESULTS / "table.json").read_text())["rows"]}

    def factor(name: str) -> float:
        return float(rows[name]["rival"]["median"] / rows[name]["ours"]["median"])

    return Times(
        factor("later saves, blocked (1 GiB a rank)"),
        factor("later saves, end to end (1 GiB a rank)"),
        factor("load, 2 ranks, cold"),
    )


def _of_stalls(rows: Sequence[Mapping[str, Any]]) -> dict[str, Times]:
    """Return the median factors of the table `stalls` for each workload that has all of them."""
    ends = {"training stops": "stall", "a save from end to end": "save"}
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        where, _, what = row["what"].partition(": ")
        kind = ends.get(what, "load" if what.startswith("a load") else "")
        if kind and row["factor"]:
            workload = where.partition(" on ")[0]
            found.setdefault(workload, {}).setdefault(kind, []).append(row["factor"])
    whole = {workload: each for workload, each in found.items() if len(each) == 3}
    kinds = ("stall", "save", "load")
    return {workload: Times(*(median(each[kind]) for kind in kinds)) for workload, each in whole.items()}


def _rows(scale: Scale, factors: Times) -> list[Row]:
    ours = scale.theirs.over(factors)
    name = f"{scale.name}, {scale.gpus:,} GPUs"
    three = {OURS: ours, scale.rival: scale.theirs, "ByteCheckpoint": scale.bytecheckpoint}
    ratios = {who: times.ettr(INTERVAL_S) for who, times in three.items()}
    wasted = {who: times.wasted_s(INTERVAL_S) * scale.gpus / 3600 for who, times in three.items()}
    stalls = {who: times.stall_s * scale.gpus * 24 / INTERVAL_S for who, times in three.items()}
    why = "the factors of this machine have no GPU and no network, where the paper's rivals lose most"
    found = []
    for what, unit, figures, more in (
        ("effective training time ratio", "share", ratios, True),
        ("GPU time lost by a failure", "GPU hours", wasted, False),
        ("GPU time lost to stalls in a day", "GPU hours", stalls, False),
    ):
        theirs, best = figures[scale.rival], figures["ByteCheckpoint"]
        paper = best / theirs if more else theirs / best
        values = {who: [float(f"{value:.5g}")] for who, value in figures.items()}
        found.append(Row(f"{name}: {what}", unit, values, scale.rival, OURS, (paper,), why, more))
    return found


def trace(days: float, seed: int) -> list[float]:
    """Return the times between failures."""
    number = int(2 * days * DAY_S / MTTF_S) + 10
    gaps: list[float] = np.random.default_rng(seed).exponential(MTTF_S, number).tolist()
    return gaps


def kept_share(costs: RunCosts, policy: Policy, gaps: list[float], days: float) -> float:
    """Return the share of the time that went into training steps that were not lost."""
    total_s = kept = 0.0
    stall_s: float | None = None
    step = 0
    for gap_s in gaps:
        now = since = 0.0
        saved: int | None = step
        done, committed, pending = step, step, None
        while now < gap_s:
            now += STEP_S
            done += 1
            if pending is not None and pending[1] <= now:
                committed, pending = pending[0], None
            facts = Facts(
                seconds=now - since,
                busy=pending is not None,
                stall_s=stall_s,
                write_s=None if stall_s is None else costs.write_s,
            )
            if policy.due(Moment(step=done, saved=saved, facts=facts)) and pending is None:
                pending = done, now + costs.write_s
                now += costs.stall_s
                stall_s, saved, since = costs.stall_s, done, now
        if pending is not None and pending[1] <= gap_s:
            committed = pending[0]
        step = committed
        total_s += gap_s + costs.restart_s
        kept = step * STEP_S
        if total_s >= days * DAY_S:
            break
    return kept / total_s


def on_a_trace(factors: Times, days: float) -> dict[str, Any]:
    """Return the costs of each system, and its ratio by policy."""
    systems = {"torch DCP": DCP_405B, "Orbax": ORBAX_405B, OURS: DCP_405B.over(factors)}
    policies = {f"every {minutes:g} min": every(minutes=minutes) for minutes in MINUTES}
    policies["auto"] = auto(mttf_hours=MTTF_S / 3600)
    gaps = trace(days, seed=0)
    found: dict[str, Any] = {}
    for who, times in systems.items():
        costs = _run_costs(times)
        best_s = costs.best_interval_s()
        found[who] = {
            "costs_s": list(times),
            "ettr": {kind: kept_share(costs, each, gaps, days) for kind, each in policies.items()},
            "best_interval_s": best_s,
            "ettr_of_the_formula": costs.ettr(best_s),
        }
    return found


def _run_costs(times: Times) -> RunCosts:
    return RunCosts(
        stall_s=times.stall_s, write_s=times.save_s, restart_s=RESTART_S + times.load_s, mttf_s=MTTF_S
    )


def _of_the_trace(found: Mapping[str, Any], days: float) -> list[Row]:
    """Return the rows of a training that is saved when it pays."""
    ratios = {who.removeprefix("torch "): [row["ettr"]["auto"]] for who, row in found.items()}
    name = f"405B, a failure every 3.1 hours, days: {days:g}, `auto`: effective training time ratio"
    why = "projected from DCP's times, while Orbax's background save was 3.4 times shorter than DCP's there"
    return [
        Row(f"{name}, against {other}", "share", ratios, other, OURS, why=why, more=True)
        for other in ("DCP", "Orbax")
    ]


def keep(found: dict[str, Any], folder: Path) -> None:
    """Write the ratios on the trace as data, as text and as a picture."""
    reports.keep(found, folder / "ettr.json")
    (folder / "ettr.txt").write_text(text(found))
    draw_both(partial(figure_of, found), folder / "ettr.png", dpi=120)


def text(found: Mapping[str, Any]) -> str:
    """Return a table for people."""
    kinds = list(next(iter(found.values()))["ettr"])
    lines = [f"{'ETTR':19s} " + " ".join(f"{kind:>13s}" for kind in kinds) + "   best interval, formula"]
    for name, row in found.items():
        values = " ".join(f"{row['ettr'][kind]:13.4f}" for kind in kinds)
        formula = f"{row['best_interval_s'] / 60:6.1f} min, {row['ettr_of_the_formula']:.4f}"
        lines.append(f"{name:19s} {values}   {formula}")
    return "\n".join(lines) + "\n"


def figure_of(found: Mapping[str, Any]) -> Figure:
    """Return a figure with a curve for each system."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, row in found.items():
        times = Times(*row["costs_s"])
        costs = _run_costs(times)
        intervals = np.geomspace(max(times.save_s, 30.0), 4 * 3600.0, 100)
        (line,) = axes.plot(intervals / 60, [costs.ettr(float(each)) for each in intervals], label=name)
        axes.plot(costs.best_interval_s() / 60, row["ettr"]["auto"], "o", color=line.get_color())
    axes.set(xscale="log", xlabel="minutes between saves", ylabel="effective training time ratio")
    axes.set_title("a failure every 3.1 hours; lines: formula, dots: `auto` on the trace")
    axes.legend()
    return figure
