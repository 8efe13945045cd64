"""``reknit report`` and ``reknit trace``: show the saves and loads of all ranks as text, page or trace."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from reknit.cli.output import print_table, printable, write_text
from reknit.cli.program.numbers import amount_of, whole
from reknit.cli.reports.cost_options import add_costs, cost_table
from reknit.errors import UsageError

if TYPE_CHECKING:
    import argparse

    from reknit.monitor.reports.recorded_operations import RecordedOperation

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
    from reknit.monitor.reports import report_page
    from reknit.monitor.reports.operation_summary import figures_of
    from reknit.monitor.reports.recorded_operations import read_operations
    from reknit.monitor.reports.report_text import RUN_HEADS, headline, run_rows
    from reknit.monitor.reports.terminal_summary import summary_lines
    from reknit.types.rank_text import named

    operations, num_invalid, num_dropped, done = read_operations(args.events)
    if num_dropped:
        print(f"{num_dropped} events were lost, as sinks failed or did not keep up")
    if num_invalid:
        print(f"{num_invalid} lines are not events, and are left out")
    costs = cost_table(operations, args)
    if args.output is not None:
        write_text(args.output, report_page.page(operations, costs, done, limit_of(args)))
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
    limit = report_page.limit_of(figures, limit_of(args))
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
    from reknit.monitor.reports.report_text import PHASE_HEADS, phase_rows, remarks
    from reknit.monitor.reports.storage_figures import (
        STORAGE_HEADS,
        error_texts,
        histogram_lines,
        storage_rows,
    )

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
    from reknit.monitor.reports.chrome_trace import trace
    from reknit.monitor.reports.recorded_operations import read_operations

    operations, *_, beside = read_operations(args.events)
    content = trace(operations, beside)
    write_text(args.output, json.dumps(content))
    print(
        f"wrote {args.output}: {sum(event['ph'] == 'b' for event in content['traceEvents'])} saves and loads"
    )
    return 0
