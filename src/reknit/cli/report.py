"""`reknit report` and `reknit trace`: the saves and loads of all ranks, and the cost of saves."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from reknit.cli.output import amount_of, print_table, printable, whole, write_text
from reknit.errors import UsageError
from reknit.monitor.summary import CostTable, measured_saves
from reknit.plugins.trainer import RunCosts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from reknit.monitor.operations import RecordedOperation


HEADS = ("SAVE EVERY", "KEPT (ETTR)", "STALLS", "DONE AGAIN", "RESTARTS", "LOST A DAY")
HOUR_S, DAY_S = 3600.0, 86400.0
_AROUND = (0.1, 0.3, 1.0, 3.0, 10.0)


def rows_around(costs: RunCosts, interval_s: float | None = None) -> list[dict[str, float]]:
    """Return the costs of intervals around the best one, and of `interval_s`, as shares of the time."""
    best_s = costs.best_interval_s()
    intervals = {max(best_s * factor, costs.write_s) for factor in _AROUND}
    if interval_s is not None:
        intervals.add(interval_s)
    return [{"interval_s": each} | costs.shares(each) for each in sorted(intervals)]


def cells(row: dict[str, float]) -> tuple[str, ...]:
    """Return a row as it is printed, below `HEADS`."""
    lost_s = (1.0 - row["kept"]) * DAY_S
    shares = (f"{row[name]:.2%}" for name in ("kept", "stalls", "again", "restarts"))
    return duration(row["interval_s"]), *shares, duration(lost_s)


def duration(seconds: float) -> str:
    """Return a time in the unit that fits, such as ``3.1 h``."""
    for unit, name in ((DAY_S, "d"), (HOUR_S, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s"


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


_MOST_LISTED = 20


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    parser = commands.add_parser(
        "report",
        help="show the times of all phases on all ranks, from events",
        description="Show the phases of a save or load over all ranks, stragglers and failures, from the "
        "events that SaveOptions(events=...) and LoadOptions(events=...) wrote.",
    )
    add_places(parser)
    parser.add_argument(
        "--step", type=whole(0), help="show the last save of this step (default: the last operation)"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write a page: summary, timeline, heat map, throughput"
    )
    add_limit(parser)
    add_costs(parser)
    parser.set_defaults(run=run)
    trace_parser = commands.add_parser(
        "trace",
        help="write a trace of all ranks for Perfetto or Chrome, from events",
        description="Write a trace that ui.perfetto.dev and chrome://tracing open: a process for each rank, "
        "a row for each phase, and one more process with the steps and failures of the run.",
    )
    add_places(trace_parser)
    trace_parser.add_argument(
        "-o", "--output", metavar="FILE", default="trace.json", help="(default: trace.json)"
    )
    trace_parser.set_defaults(run=run_trace)


def add_places(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names events."""
    parser.add_argument("events", nargs="+", help="files of events, or folders of them")


def add_limit(parser: argparse.ArgumentParser) -> None:
    """Add the option for the limit of the storage."""
    parser.add_argument(
        "--limit",
        type=amount_of,
        metavar="GIB/S",
        help="throughput of the storage for all ranks together (default: the highest in the events)",
    )


def limit_of(args: argparse.Namespace) -> float | None:
    """Return the limit of the storage in bytes per second, None without one."""
    return None if args.limit is None else args.limit * 2**30


def run(args: argparse.Namespace) -> int:
    """Print a report, or write a page."""
    from reknit.monitor import page
    from reknit.monitor.operations import read_operations
    from reknit.monitor.summary import figures_of, summary_lines
    from reknit.monitor.text import RUN_HEADS, headline, run_rows
    from reknit.plugins.events import named

    operations, num_invalid, num_dropped, done = read_operations(args.events)
    if num_dropped:
        print(f"{num_dropped} events were lost, as sinks failed or did not keep up")
    if num_invalid:
        print(f"{num_invalid} lines are not events, and are left out")
    costs = cost_table(operations, args)
    if args.output is not None:
        write_text(args.output, page.report_page(operations, costs, done, limit_of(args)))
        print(f"wrote {args.output}: {len(operations)} saves and loads")
        return 0
    of_step = [operation for operation in operations if args.step in (None, operation.step)]
    if not of_step:
        steps = sorted({operation.step for operation in operations if operation.step is not None})
        has = (
            f"there are events of {named(steps, 'step')}"
            if steps
            else "leave --step out: no event has a step"
        )
        raise UsageError(f"there are no events of step {args.step} in {', '.join(args.events)}", remedy=has)
    for operation in operations[-_MOST_LISTED:]:
        print(printable(headline(operation)))
    shown = of_step[-1]
    alike = [operation for operation in operations if operation.action == shown.action]
    figures = [figures_of(operation) for operation in alike[-_MOST_LISTED:] if operation is not shown]
    figures.append(figures_of(shown))
    limit = page.limit_of(figures, limit_of(args))
    print()
    for line in summary_lines(figures[-1], limit, alike, encoding=sys.stdout.encoding):
        print(printable(line))
    _print_details(shown)
    if rows := run_rows(event for event in done if args.step in (None, event.step)):
        print("\nthe acts of the run beside saves and loads:")
        print_table(RUN_HEADS, rows[-_MOST_LISTED:])
    if costs is not None:
        print("\n".join(("", "the costs of the interval (ETTR):", *costs.remarks, "")))
        print_table(costs.heads, costs.rows, right=costs.heads)
    return 0


def _print_details(shown: RecordedOperation) -> None:
    """Print the phases of a save or load, remarks about them, and the operations of its stores."""
    from reknit.monitor.storage_figures import STORAGE_HEADS, error_texts, histogram_lines, storage_rows
    from reknit.monitor.text import PHASE_HEADS, phase_rows, remarks

    print()
    print_table(PHASE_HEADS, phase_rows(shown), right=PHASE_HEADS[1:])
    for remark in remarks(shown):
        print(printable(remark))
    if shown.storage:
        print()
        print_table(STORAGE_HEADS, storage_rows(shown.storage, shown.elapsed_s))
        for line in (*error_texts(shown.storage), "", *histogram_lines(shown.storage)):
            print(printable(line))


def run_trace(args: argparse.Namespace) -> int:
    """Write the trace."""
    from reknit.monitor.chrome_trace import trace
    from reknit.monitor.operations import read_operations

    operations, *_, beside = read_operations(args.events)
    content = trace(operations, beside)
    write_text(args.output, json.dumps(content))
    print(
        f"wrote {args.output}: {sum(event['ph'] == 'b' for event in content['traceEvents'])} saves and loads"
    )
    return 0
