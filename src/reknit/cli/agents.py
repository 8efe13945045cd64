"""`reknit agents`: list the agents of this host that still write below a folder, or wait for them."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from reknit.cli.output import print_json, print_table, time_text
from reknit.engine.stored.agents import at_work
from reknit.plugins.store import recipe

if TYPE_CHECKING:
    import argparse

_PAUSE_S = 0.2


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program."""
    parser = commands.add_parser(
        "agents",
        help="list the processes that still write checkpoints, or wait for them",
        description="List the agents on this host that write checkpoints at or below a folder: processes "
        "that write and commit saves in the background, also when their trainer has ended.  Only root sees "
        "those of other users.",
    )
    parser.add_argument("root", metavar="ROOT", help="a checkpoint, or a folder that holds some: path or URL")
    parser.add_argument("--wait", action="store_true", help="wait until none is left")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List, or wait, and return the exit code."""
    root = recipe(args.root).url
    found = at_work(root)
    if args.wait and found:
        pids = {agent.pid for agent in found}
        print(f"reknit: waiting for {len(pids)} agent{'s' * (len(pids) != 1)}", file=sys.stderr)
        while found := at_work(root):
            time.sleep(_PAUSE_S)
    if args.json:
        print_json([agent._asdict() for agent in found])
    elif not found:
        print(f"no agent on this host is at work for checkpoints in {root}")
    else:
        rows = [
            (
                agent.pid,
                "-" if agent.rank is None else agent.rank,
                "(about to end)" if agent.path is None else agent.path,
                "-" if agent.since is None else time_text(agent.since),
            )
            for agent in found
        ]
        print_table(("PID", "RANK", "PATH", "SINCE (UTC)"), rows, right=("PID", "RANK"))
    return 0
