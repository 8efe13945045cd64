"""Appendix of ByteCheckpoint: which share of the time is training that counts, and how much GPU time is lost?

The appendix spreads failures evenly over the interval between two saves.  Half an interval and half a save
are then lost on average, and a load.  The times of DCP and MCP are the paper's, at the paper's scales.  Those
of reknit are a projection: the rival's times over factors that were measured side by side on this machine.
The factors are those of the most similar workload in the table `stalls` if it was kept, else of
benchmarks/results/table.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.ettr.run import DCP as DCP_405B
from benchmarks.ettr.run import MTTF_S, trace
from benchmarks.ettr.run import ORBAX as ORBAX_405B
from benchmarks.ettr.run import ettr as ettr_of_trace
from benchmarks.paper.results import About, Measured, Row, kept, small
from reknit.policies import auto
from reknit.policies.cost_model import RunCosts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ABOUT = About(
    name="ettr",
    source="appendix of ByteCheckpoint, on average ETTR",
    title="effective training time, and GPU time that is lost",
    paper="ByteCheckpoint raises the effective training time ratio 1.16 to 1.29 times.",
)
RESULTS = Path(__file__).resolve().parents[1] / "results"
INTERVAL_S = 200.0
"""100 steps of 2 s between two saves; the paper gives neither number."""
DAYS = 54.0
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
    rows += _on_a_trace(factors[OF_THE_TRACE])
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
    )


def _factors() -> tuple[dict[str, Times], str, dict[str, str]]:
    """Return the factors of reknit by workload, their source, and the workloads without rows of their own."""
    stalls = kept(RESULTS / "paper", "stalls")
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


def _on_a_trace(factors: Times) -> list[Row]:
    """Return the ratios on a trace of failures as in the training of Llama 3 405B, saved when it pays."""
    days = 1.0 if small() else DAYS
    gaps = trace(days, seed=0)
    systems = {
        OURS: Times(*DCP_405B).over(factors),
        "DCP": Times(*DCP_405B),
        "Orbax": Times(*ORBAX_405B),
    }
    ratios = {}
    for who, (stall_s, write_s, load_s) in systems.items():
        costs = RunCosts(stall_s=stall_s, write_s=write_s, restart_s=300.0 + load_s, mttf_s=MTTF_S)
        ratios[who] = [ettr_of_trace(costs, auto(mttf_hours=MTTF_S / 3600), gaps, days, 20.0)]
    name = f"405B, a failure every 3.1 hours, days: {days:g}, `auto`: effective training time ratio"
    why = "projected from DCP's times, while Orbax's background save was 3.4 times shorter than DCP's there"
    return [
        Row(f"{name}, against {other}", "share", ratios, other, OURS, why=why, more=True)
        for other in ("DCP", "Orbax")
    ]
