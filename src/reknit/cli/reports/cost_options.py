"""The cost of the time between saves, by the formula of `reknit advise` and the times in events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.cli.program.numbers import amount_of
from reknit.cli.reports.interval_costs import HEADS, cells, duration, rows_around
from reknit.monitor.reports.measured_saves import CostTable, measured_saves
from reknit.policies.cost_model import RunCosts
from reknit.policies.policy import HOUR_S

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from reknit.monitor.reports.recorded_operations import RecordedOperation

_RANK_MTTF_H = 50_000.0
"""Hours of a rank between failures: Llama 3 (2024) had 419 in 54 days, on 16,384 ranks."""


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add the options for the cost of failures."""
    parser.add_argument(
        "--mttf",
        type=amount_of,
        metavar="H",
        help="hours between failures of the job, on average (default: 50,000 by the number of ranks)",
    )
    parser.add_argument(
        "--restart",
        type=amount_of,
        default=300.0,
        metavar="S",
        help="seconds from a failure until training continues (default: 300)",
    )


def cost_table(operations: Sequence[RecordedOperation], args: argparse.Namespace) -> CostTable | None:
    """Return the costs of the measured interval and of others, or None for too few saves."""
    measured = measured_saves(operations)
    if measured is None:
        return None
    mttf_h = _RANK_MTTF_H / measured.num_ranks if args.mttf is None else args.mttf
    stall_s = max(measured.stall_s, 1e-6)  # less than 0 where a clock was set back
    costs = RunCosts(
        stall_s=stall_s,
        write_s=max(measured.write_s, stall_s),
        restart_s=args.restart,
        mttf_s=mttf_h * HOUR_S,
    )
    interval_s = max(measured.apart_s - measured.stall_s, 1e-6)
    best_s = costs.best_interval_s()
    whose = "assumed, 50,000 h for one rank; say --mttf" if args.mttf is None else "as given"
    remarks = (
        f"medians of {measured.num_saves} saves: training stalled for {measured.stall_s:.3g} s, "
        f"committed after {measured.write_s:.3g} s, the next save {duration(measured.apart_s)} later",
        f"with a failure every {duration(costs.mttf_s)} ({whose}) and {duration(args.restart)} to restart "
        f"(--restart), {costs.ettr(interval_s):.2%} of the time is training that is kept (ETTR)",
        f"best would be to save every {duration(best_s)}: {costs.ettr(best_s):.2%}",
    )
    return CostTable(remarks, HEADS, [cells(row) for row in rows_around(costs, interval_s)])
