"""The speed of saves and loads, beside the best rival and the limits of disk, memory or bytes: one table.

Contestants take turns within one run.  The first save or load of a process is measured with new processes
for each, in turn too.  Rivals are torch.save, safetensors, torch DCP in its modes, and
torch_checkpointing where it is installed.  The groups of rows:

sharded    2 ranks: a save that waits, a cold load, bytes read.
bytes      4 and 8 ranks: bytes read.
first      2 ranks: the first load of a process, first and later saves in the background, their memory.
single     1 rank: many tensors, small states, warm loads and their memory, a second save with LoRA.
jax        1 process: JAX arrays over eight devices, and many small ones, beside Orbax.
small      2 ranks: loads of many small tensors of FSDP2, their calls and CPU.
trainer    2 ranks: the costs of saves in the background, also to a slow store, for a trainer that computes.
dtensors   4 ranks: thousands of DTensors, saved in the background.
formats    1 rank: folders of DCP and Hugging Face, read in place and imported.
loader     1 rank: the states of data loaders.
sinks      1 rank: sinks of events, and saves beside good and bad ones.
digests    1 rank: the candidates for the digest of a block.
root       the root's computations for thousands of ranks.

Prints the table, and for each row with an aim (benchmarks/aims.py) whether it is met, or else the reason.
`--keep` puts it into benchmarks/results, as JSON, Markdown and a picture, after each group; the rows of
groups that were not measured stay as they were kept.  So a run that was cut goes on with the names of the
groups that are left.  The machine should have nothing else to do; the load average is kept with the figures.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import reports
from benchmarks.ranks import RanksFailedError, launch, options, rank_main, scratch
from benchmarks.reports import RESULTS, chosen, machine, software
from benchmarks.table import picture, root, sizes
from benchmarks.table.rounds import Row
from benchmarks.table.summary import markdown, summary

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

GROUPS: dict[str, tuple[int, ...]] = {
    "sharded": (2,),
    "bytes": (4, 8),
    "first": (2,),
    "single": (1,),
    "jax": (1,),
    "small": (2,),
    "trainer": (2,),
    "dtensors": (4,),
    "formats": (1,),
    "loader": (1,),
    "sinks": (1,),
    "digests": (1,),
    "root": (),
}
"""The numbers of ranks of each group."""
META = "torch_checkpointing"
MODULES = {"bytes": "sharded", "dtensors": "layout", "small": "layout", "jax": "arrays"}
FUNCTIONS = {"bytes": "byte_rows", "small": "load_rows"}


def measured_by_rank(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one group as one rank."""
    from benchmarks.timing import Bench

    bench = Bench(args.dir, repeat=1)
    group, _, name = args.role.partition(".")
    bench.folder = f"{args.dir}/{'load' if group == 'make' else group}"  # loaded from where it was made
    return measured(bench, group, name, size_of(args))


def measured(bench: Any, group: str, name: str, size: sizes.Sizes) -> dict[str, Any]:
    """Return the results of one group of ranks."""
    if group in ("load", "save", "make"):
        from benchmarks.table import first

        os.makedirs(bench.folder, exist_ok=True)
        if group == "make":
            return first.make(bench, size)
        known = first.LOADERS if group == "load" else first.SAVERS
        measured: dict[str, Any] = getattr(first, group)(bench, size, list(known)[int(name)])
        return measured
    return {"rows": [vars(row) for row in rows_of(group)(bench, size)]}


def rows_of(group: str) -> Callable[[Any, sizes.Sizes], list[Row]]:
    """Return the function that measures a group as one rank."""
    module = importlib.import_module(f"benchmarks.table.{MODULES.get(group, group)}")
    found: Callable[[Any, sizes.Sizes], list[Row]] = getattr(module, FUNCTIONS.get(group, "rows"))
    return found


class Run:
    """The processes of one run, and their results."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self.args, self.folder, self.size = args, folder, size_of(args)
        self.failed: dict[str, str] = {}

    def launched(self, role: str, world: int) -> dict[str, Any] | str:
        """Return the results of ranks, or the reason of their failure."""
        try:
            return launch(__file__, role, world, self.folder, self.args.timeout)
        except RanksFailedError as error:  # the other groups are measured all the same
            return str(error)

    def rows(self, group: str) -> Iterator[Row]:
        """Yield the rows of a group."""
        if group == "root":
            yield from root.rows(self.size, self.args.workers)
        elif group == "first":
            yield from self._first()
        else:
            for world in GROUPS[group]:
                found = self.launched(group, world)
                if isinstance(found, str):
                    self.failed[f"{group}, {world} ranks"] = found
                else:
                    yield from (Row(**row) for row in found["rows"])

    def _first(self) -> Iterator[Row]:
        from benchmarks.table import first

        made = self.launched("make", 2)
        if isinstance(made, str):
            self.failed["first"] = made
            return
        yield first.load_row(self._in_turn("load", list(first.LOADERS)), 2)
        yield from first.save_rows(self._in_turn("save", list(first.SAVERS)), self.size)

    def _in_turn(self, role: str, names: list[str]) -> dict[str, list[dict[str, float] | str]]:
        found: dict[str, list[dict[str, float] | str]] = {name: [] for name in names}
        if META in found and importlib.util.find_spec(META) is None:
            found[META].append(f"not installed (pip install {META})")
        for _ in range(self.size.processes):
            for number, name in enumerate(names):
                if not any(isinstance(each, str) for each in found[name]):
                    found[name].append(self.launched(f"{role}.{number}", 2))
                    print(f"{role:8s} {name:50s} {found[name][-1]}", file=sys.stderr, flush=True)
        return found


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """Return the circumstances of a run."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine(),
        "software": software("torch", "reknit"),
        "sizes": "tiny" if args.tiny else "quick" if args.quick else "default",
        "load average before": round(os.getloadavg()[0], 1),
    }


def size_of(args: argparse.Namespace) -> sizes.Sizes:
    known = sizes.TINY if args.tiny else sizes.QUICK if args.quick else sizes.DEFAULT
    return known.with_rounds(args.rounds)


def main() -> int:
    parser = options(__doc__, out="folder in which to keep it instead")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="all without a name")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few minutes")
    parser.add_argument("--tiny", action="store_true", help="the least sizes: does it run?")
    parser.add_argument("--rounds", type=int, help="fewer rounds, or more")
    parser.add_argument("--keep", action="store_true", help="keep the table in benchmarks/results")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes that play ranks of `root`"
    )
    args = parser.parse_args()
    if args.role:
        rank_main(args, lambda: measured_by_rank(args))
    result: dict[str, Any] = {"run": facts(args), "rows": [], "failed": {}, "measured": {}}
    out = args.out or (RESULTS if args.keep else None)
    with scratch(args.dir) as folder:
        run = Run(args, folder)
        for group in chosen(args.groups, GROUPS):
            begin = time.monotonic()
            rows = [summary(row, group) for row in run.rows(group)]
            run.failed |= {row["row"]: row["missing"]["reknit"] for row in rows if "reknit" in row["missing"]}
            result["rows"] += rows
            result["run"]["load average after"] = round(os.getloadavg()[0], 1)
            result["measured"][group] = f"{result['run']['date']}, {time.monotonic() - begin:.0f} s"
            result["failed"] = run.failed
            if out is not None:  # after each, in case a later group does not end
                keep(joined(reports.kept(out / "table.json"), result), out)
    print(markdown(result))
    return 1 if run.failed else 0


def joined(before: dict[str, Any] | None, result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with the rows of groups that it lacks, from the one kept with the same sizes."""
    if before is None or before["run"]["sizes"] != result["run"]["sizes"]:
        return result
    rows = [row for row in before["rows"] if row["group"] not in result["measured"]] + result["rows"]
    rows.sort(key=lambda row: list(GROUPS).index(row["group"]))
    return result | {"rows": rows, "measured": before["measured"] | result["measured"]}


def keep(result: dict[str, Any], out: Path) -> None:
    """Write a table as data, as text and as a picture."""
    reports.keep(result, out / "table.json")
    (out / "table.md").write_text(markdown(result))
    picture.draw(result["rows"], out / "table.png")
    picture.draw_stall(result["rows"], out / "stall.png")


if __name__ == "__main__":
    sys.exit(main())
