"""``reknit dash``: show saves and loads on all ranks in a browser, while they run."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from reknit.cli.output import whole
from reknit.cli.report import add_costs, add_limit, add_places, cost_table, limit_of

if TYPE_CHECKING:
    import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "dash",
        help="serve the report to a browser, and keep it up to date",
        description="Serve the page of `reknit report` to browsers, with new events as they come, until "
        "Ctrl-C.  Other machines reach it only with --host, and by the printed address, which has a token.",
    )
    add_places(parser)
    add_limit(parser)
    add_costs(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    parser.add_argument(
        "--port", type=whole(0, 65535), default=8787, help="(default: 8787; 0 takes any that is free)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    from reknit.monitor.dash import LiveEvents, is_loopback, listen, server

    token = None if is_loopback(args.host) else secrets.token_urlsafe()
    events = LiveEvents(args.events, lambda operations: cost_table(operations, args), limit_of(args))
    try:
        with listen(args.host, args.port) as bound:
            port = bound.getsockname()[1]
            place = f"[{args.host}]" if ":" in args.host else args.host
            print(f"serving http://{place}:{port}/" + (f"?token={token}" if token else ""), flush=True)
            server(events, token, args.host, port).run(sockets=[bound])
    finally:
        events.close()
    return 0
