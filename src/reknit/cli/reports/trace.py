"""``reknit trace``: write the saves and loads of all ranks as a trace for Perfetto or Chrome."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from reknit.cli.output import write_text
from reknit.cli.reports.report import add_places

if TYPE_CHECKING:
    import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "trace",
        help="write a trace of all ranks for Perfetto or Chrome, from events",
        description="Write a trace that ui.perfetto.dev and chrome://tracing open: a process for each rank, "
        "a row for each phase, and one more process with the steps and failures of the run.",
    )
    add_places(parser)
    parser.add_argument("-o", "--output", metavar="FILE", default="trace.json", help="(default: trace.json)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the trace."""
    from reknit.monitor.reports.chrome_trace import trace
    from reknit.monitor.reports.recorded_operations import read_operations

    operations, *_, beside = read_operations(args.events)
    write_text(args.output, json.dumps(trace(operations, beside)))
    print(f"wrote {args.output}: {len(operations)} saves and loads")
    return 0
