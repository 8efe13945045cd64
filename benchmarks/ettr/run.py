"""What share of a long training is kept, for each policy and each cost of a checkpoint?

The trace has failures at random moments, as often as in the pre-training of Llama 3 405B: 419 unexpected
interruptions in 54 days (arXiv 2407.21783, section 3.3.4).  Every policy is the object that `Checkpointer`
asks, asked at each step of 54 days of training.

The costs of torch DCP and Orbax are those for 405B parameters on 64 GPUs of the Orbax paper (table 1,
median): blocking, background and load.  Those of reknit are a
projection: DCP's costs times the ratios of reknit to DCP in one run on one machine.  Pass your own
measurements as --ratios (`scripts/bench async_save`, `load`).

Prints a table, and JSON with --json; with --plot, draws the curves to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.pictures import draw_both
from reknit.policies import Facts, Moment, auto, every
from reknit.policies.cost_model import RunCosts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from reknit.policies import Policy

DAY_S = 86400.0
MTTF_S = 54 * DAY_S / 419
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
DCP = (7.9, 595.0, 169.5)
ORBAX = (12.8, 173.0, 117.2)
RATIOS = (0.4, 0.2, 0.75)
MINUTES = (2.0, 5.0, 10.0, 30.0, 60.0, 180.0)


def trace(days: float, seed: int) -> list[float]:
    """Return the times between failures."""
    number = int(2 * days * DAY_S / MTTF_S) + 10
    gaps: list[float] = np.random.default_rng(seed).exponential(MTTF_S, number).tolist()
    return gaps


def ettr(costs: RunCosts, policy: Policy, gaps: list[float], days: float, step_s: float) -> float:
    """Return the share of the time that went into training steps that were not lost."""
    total_s = kept = 0.0
    stall_s: float | None = None
    step = 0
    for gap_s in gaps:
        now = since = 0.0
        saved: int | None = step
        done, committed, pending = step, step, None
        while now < gap_s:
            now += step_s
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
        kept = step * step_s
        if total_s >= days * DAY_S:
            break
    return kept / total_s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--days", type=float, default=54.0)
    parser.add_argument("--step", type=float, default=20.0, help="seconds that a training step takes")
    parser.add_argument("--restart", type=float, default=300.0, help="seconds from a failure to the load")
    parser.add_argument("--ratios", type=float, nargs=3, default=RATIOS, metavar=("STALL", "WRITE", "LOAD"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    systems = {
        "torch DCP": DCP,
        "Orbax": ORBAX,
        "reknit (projected)": tuple(given * ratio for given, ratio in zip(DCP, args.ratios, strict=True)),
    }
    gaps = trace(args.days, args.seed)
    found: dict[str, Any] = {}
    for name, (stall_s, write_s, load_s) in systems.items():
        costs = RunCosts(stall_s=stall_s, write_s=write_s, restart_s=args.restart + load_s, mttf_s=MTTF_S)
        policies = {f"every {minutes:g} min": every(minutes=minutes) for minutes in MINUTES}
        policies["auto"] = auto(mttf_hours=MTTF_S / 3600)
        ratios = {kind: ettr(costs, each, gaps, args.days, args.step) for kind, each in policies.items()}
        best_s = costs.best_interval_s()
        found[name] = {"costs_s": [stall_s, write_s, load_s], "ettr": ratios, "best_interval_s": best_s}
        found[name]["ettr_of_the_formula"] = costs.ettr(best_s)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        reported(found)
    if args.plot:
        plot(found, args.restart)
    return 0


def reported(found: dict[str, Any]) -> None:
    kinds = list(next(iter(found.values()))["ettr"])
    print(f"{'ETTR':19s} " + " ".join(f"{kind:>13s}" for kind in kinds) + "   best interval, formula")
    for name, row in found.items():
        values = " ".join(f"{row['ettr'][kind]:13.4f}" for kind in kinds)
        print(
            f"{name:19s} {values}   {row['best_interval_s'] / 60:6.1f} min, {row['ettr_of_the_formula']:.4f}"
        )


def plot(found: dict[str, Any], restart_s: float) -> None:
    """Write the ratios, as pictures and as data."""
    draw_both(partial(figure_of, found, restart_s), RESULTS / "ettr.png", dpi=120)
    (RESULTS / "ettr.json").write_text(json.dumps(found, indent=1) + "\n")


def figure_of(found: dict[str, Any], restart_s: float) -> Figure:
    """Return a figure with a curve for each system."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, row in found.items():
        stall_s, write_s, load_s = row["costs_s"]
        costs = RunCosts(stall_s=stall_s, write_s=write_s, restart_s=restart_s + load_s, mttf_s=MTTF_S)
        intervals = np.geomspace(max(write_s, 30.0), 4 * 3600.0, 100)
        (line,) = axes.plot(intervals / 60, [costs.ettr(float(each)) for each in intervals], label=name)
        axes.plot(costs.best_interval_s() / 60, row["ettr"]["auto"], "o", color=line.get_color())
    axes.set(xscale="log", xlabel="minutes between saves", ylabel="effective training time ratio")
    axes.set_title("a failure every 3.1 hours; lines: formula, dots: `auto` on the trace")
    axes.legend()
    return figure


if __name__ == "__main__":
    sys.exit(main())
