"""Do the tables of the papers come out the same way here?  Each is repeated at the size of this machine.

A table is a module of this folder with `ABOUT`, and with `measure`, which returns its rows.  Rivals run in
the same run and take turns with reknit, in fresh folders.  A rival that is not installed is skipped in the
open.  Each table has a fresh process and a deadline.  A module imports torch only in its functions, starts
its ranks by `tests.ranks.run`, and takes its least sizes if `small()`.  With a function `figure`, a picture
is drawn of its results; a function `keep` writes its data for other pages.  The results are kept in
benchmarks/results/paper: NAME.json for each table, and summary.md, overview.md and factors.png for all.

Run: scripts/bench paper [TABLE ...] [--list] [--small] [--summary] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper.jobs.picture import draw_factors
from benchmarks.paper.results import SMALL, aims_of, as_json, line_of, overview, small, summary
from benchmarks.pictures import draw_both
from benchmarks.ranks import scratch
from benchmarks.reports import RESULTS, chosen, keep, kept, machine, software

if TYPE_CHECKING:
    from benchmarks.paper.results import About, Measured

HERE = Path(__file__).resolve().parent
KEPT = RESULTS / "paper"
NOT_TABLES = ("run", "results")
PACKAGES = ("torch", "megatron-core", "orbax-checkpoint", "jax", "numpy", "hdfs-native", "reknit")
DEADLINE_S = 420.0


def names() -> list[str]:
    """Return the names of all tables, in the order of the alphabet."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_TABLES)


def table(name: str) -> Any:
    """Return the module of a table."""
    return importlib.import_module(f"benchmarks.paper.{name}")


def abouts() -> list[About]:
    return [table(name).ABOUT for name in names()]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="all without a name")
    parser.add_argument("--list", action="store_true", help="print the names of the tables and their sources")
    parser.add_argument("--summary", action="store_true", help="only write the pages anew from the results")
    parser.add_argument("--small", action="store_true", help="the least sizes: does it run?")
    parser.add_argument("--dir", default=".", help="folder on the disk to measure")
    parser.add_argument("--out", type=Path, help="folder for the results instead of benchmarks/results/paper")
    parser.add_argument("--timeout", type=float, default=DEADLINE_S, help="seconds for each table")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measured_here(name: str, folder: Path, out: Path) -> None:
    """Measure a table in this process, and keep it."""
    module = table(name)
    before, begin = os.getloadavg()[0], time.monotonic()
    found: Measured = module.measure(folder)
    run = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - begin, 1),
        "machine": machine(),
        "software": software(*PACKAGES),
        "sizes": "small" if small() else "default",
        "load_before": round(before, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }
    result = as_json(module.ABOUT, found, run)
    keep(result, out / f"{name}.json")
    if hasattr(module, "figure"):
        draw_both(lambda: module.figure(result), out / f"{name}.png", dpi=100)
    if found.data is not None and not (small() and out == KEPT):  # which pages show
        module.keep(found.data, RESULTS if out == KEPT else out / "pages")


def measured(name: str, args: argparse.Namespace, out: Path) -> str:
    """Measure a table in a fresh process, and return the reason if it failed."""
    command = [sys.executable, __file__, name, "--here", "--out", str(out)]
    environment = {**os.environ, **({SMALL: "1"} if args.small else {})}
    with scratch(args.dir) as folder:
        command += ["--dir", folder]
        process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=sys.stderr)
        try:
            code = process.wait(args.timeout)
        except subprocess.TimeoutExpired:
            return f"not done after {args.timeout:g} s"
        finally:
            _end(process)
    return f"its process ended with {code}" if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the ranks of a table together with its process."""
    try:
        os.killpg(process.pid, signal.SIGTERM if process.poll() is None else signal.SIGKILL)
        process.wait(5)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        process.kill()
    process.wait()


def show(name: str, out: Path) -> None:
    """Print the rows of a table."""
    found = kept(out / f"{name}.json")
    assert found is not None
    print(f"{name}: {found['title']} ({found['source']})")
    for row in found["rows"]:
        print("   " + " | ".join(line_of(row)), flush=True)
    for line in aims_of(found):
        print(f"   {line}", flush=True)
    for what, why in found["skipped"].items():
        print(f"   skipped: {what}: {why}", flush=True)


def summarise(out: Path) -> None:
    """Write the summary of all tables that are kept in a folder, as a page and as a picture."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.md").write_text(summary(abouts(), out))
    (out / "overview.md").write_text(overview(abouts(), out))
    draw_factors([found for name in names() if (found := kept(out / f"{name}.json"))], out / "factors.png")


def main() -> int:
    args = arguments()
    wanted = chosen(args.tables, names())
    out: Path = args.out or KEPT
    if args.list:
        for about in abouts():
            print(f"{about.name:12s} {about.source}: {about.title}")
        return 0
    if args.summary:
        summarise(out)
        return 0
    if args.here:
        measured_here(wanted[0], Path(args.dir), out)
        return 0
    failed = {}
    for name in wanted:
        if why := measured(name, args, out):
            failed[name] = why
            print(f"{name}: {why}", file=sys.stderr, flush=True)
        else:
            show(name, out)
        summarise(out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
