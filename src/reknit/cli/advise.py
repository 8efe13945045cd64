"""`reknit advise` computes how often it is best to save, and at which cost."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from reknit.cli.output import amount_of, print_fields, print_json, print_table, whole
from reknit.cli.report import HEADS, HOUR_S, cells, duration, rows_around
from reknit.engine.stored.hints import absent
from reknit.errors import UsageError
from reknit.plugins.events import amount
from reknit.plugins.store import open_storage
from reknit.plugins.trainer import RunCosts, manifest_in, numbered

if TYPE_CHECKING:
    import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program."""
    parser = commands.add_parser(
        "advise",
        help="compute the best time between saves",
        description="Compute the time between two saves at which failures and saves together cost least.  "
        "It also computes the effective training time ratio (ETTR): the share of the time spent on training "
        "that no failure undoes.  The report of a save and the log have its times.",
    )
    parser.add_argument(
        "root", metavar="ROOT", nargs="?", help="a folder of checkpoints; the newest one gives size and ranks"
    )
    seconds: dict[str, Any] = {"type": amount_of, "metavar": "S"}
    parser.add_argument("--stall", required=True, help="seconds that a save blocks training", **seconds)
    parser.add_argument(
        "--write", required=True, help="seconds from the beginning of a save to its commit", **seconds
    )
    parser.add_argument(
        "--restart", required=True, help="seconds from a failure until training continues", **seconds
    )
    often = parser.add_mutually_exclusive_group(required=True)
    often.add_argument(
        "--mttf", type=amount_of, metavar="H", help="hours between failures of the job, on average"
    )
    often.add_argument("--rank-mttf", type=amount_of, metavar="H", help="the same for one rank; see --ranks")
    parser.add_argument(
        "--ranks", type=whole(1, 10**9), metavar="N", help="ranks of the job (default: as in ROOT)"
    )
    parser.add_argument("--step", type=amount_of, metavar="S", help="seconds that a training step takes")
    parser.add_argument(
        "--interval", type=amount_of, metavar="S", help="also show the cost of this time between saves"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the best interval and its costs, and return the exit code."""
    nbytes, ranks = (None, None) if args.root is None else _newest(args.root)
    ranks = args.ranks or ranks
    if args.rank_mttf is not None and ranks is None:
        raise UsageError(
            "--rank-mttf is the time between failures of one rank, and the number of ranks is not known",
            remedy="add --ranks, or the folder of a run",
        )
    mttf_h = args.rank_mttf / ranks if args.mttf is None else args.mttf
    costs = RunCosts(
        stall_s=args.stall,
        write_s=max(args.write, args.stall),
        restart_s=args.restart,
        mttf_s=mttf_h * HOUR_S,
    )
    best_s = costs.best_interval_s()
    rows = rows_around(costs, args.interval)
    if args.json:
        sizes = {"nbytes": nbytes, "ranks": ranks, "mttf_h": mttf_h}
        print_json({"interval_s": best_s, "ettr": costs.ettr(best_s)} | sizes | {"intervals": rows})
        return 0
    fields = {"save every": duration(best_s), "ETTR": f"{costs.ettr(best_s):.2%}"}
    if args.step is not None:
        fields["in steps"] = str(max(1, round(best_s / args.step)))
    fields["a failure every"] = duration(costs.mttf_s)
    if nbytes is not None:
        fields["size of a checkpoint"] = amount(nbytes)
        fields["bytes to store per second"] = amount(int(nbytes / best_s))
        if ranks is not None:
            fields["host memory per rank"] = f"{amount(nbytes // ranks)} for each copy that is written"
    print_fields(fields)
    print()
    print_table(HEADS, [cells(row) for row in rows], right=HEADS)
    return 0


def _newest(root: str) -> tuple[int, int | None]:
    """Return size and ranks of the newest step below a folder.  Raises `CheckpointNotFoundError`."""
    with closing(open_storage(root)) as storage:
        for _, name in numbered(storage):
            if (manifest := manifest_in(storage.sub(name))) is not None:
                ranks = manifest.origin.get("world_size")
                return manifest.nbytes, ranks if isinstance(ranks, int) and ranks > 0 else None
        raise absent(storage, "there is no step in")
