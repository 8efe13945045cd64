"""The report of a run, and its file: the machine, the figures with their aims, as JSON."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import aims

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

RESULTS = Path(__file__).resolve().parent / "results"
"""The results that are kept; pages show some of them."""

Row = tuple[str, float | None]
"""A quantity and its value, None if it was not measured."""


def ratio(over: float | None, under: float | None) -> float | None:
    return round(over / under, 3) if over is not None and under else None


def judged(bench: str, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return every value with its aim, whether the aim is met (None if unknown), and the reason if not."""
    found = []
    for what, value in rows:
        figures = {} if value is None else {"reknit": [value]}
        aim = next(aims.judged(bench, what, figures, ("reknit",)), None)
        row = {"what": what, "value": value, "aim": aim and aim.aim.wanted, "met": aim and aim.met}
        found.append(row | ({"text": aim.text} if aim else {}))
    return found


def show(judgements: list[dict[str, Any]]) -> None:
    """Print every value with its aim to stderr."""
    width = max((len(row["what"]) for row in judgements), default=0)
    for row in judgements:
        print(f"{row['what']:{width}s} {row.get('text', row['value'])}", file=sys.stderr)


def chosen(wanted: Sequence[str], there: Iterable[str]) -> list[str]:
    """Return the names of this run, all without a name.  Ends the process at a name that is none."""
    names = list(there)
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            guess = f"; did you mean {near[0]}?" if near else "."
            sys.exit(f"there is no {name}{guess} There are: {', '.join(names)}")
    return list(wanted) or names


def deliver(result: Mapping[str, Any], out: Path | None) -> None:
    """Print a result as JSON, and write it to a file if one was named."""
    print(json.dumps(result, indent=1), flush=True)
    if out:
        keep(result, out)


def keep(result: Mapping[str, Any], path: Path) -> None:
    """Write a result to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def kept(path: Path) -> dict[str, Any] | None:
    """Return a result that was kept, None without one."""
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


def machine() -> str:
    """Return the cores, the processor and the memory of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return f"{os.cpu_count()} cores, {model or platform.machine()}, {memory:.0f} GiB"


def software(*packages: str) -> str:
    """Return the system and the versions of the packages that are installed."""
    versions = [f"{platform.system()} {platform.release()}", f"Python {platform.python_version()}"]
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(versions)
