"""Optimizers that continue bit for bit after a save and a load: a table of all classes of four packages.

Each optimizer takes some steps, is saved, and goes on.  A new one loads that and takes the same steps: with
its own `state_dict` and `load_state_dict`, and with reknit.  The weights at the end are compared.

python benchmarks/optimizers/run.py [--write] [NAME ...]

prints the table of the optimizers with such names, or writes it into docs/howto/optimizers.md.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.optimizers.makers import Maker, makers  # noqa: E402
from benchmarks.optimizers.trial import Trial, run  # noqa: E402

PAGE = ROOT / "docs" / "howto" / "optimizers.md"
BEGIN, END = "<!-- the table of benchmarks/optimizers -->", "<!-- end of the table -->"


def verdict(trial: Trial) -> str:
    """Return the words for the result of a trial."""
    if trial.ours.ok:
        return "bit for bit" if trial.cuts else "bit for bit, same layout"
    if not trial.own.ok:
        return f"not with its own methods either: {trial.own.why[:80]}"
    return f"**no**: {trial.ours.why[:120]}"


def row(maker: Maker) -> str:
    """Try an optimizer, and return the result in words."""
    if maker.why is not None:
        return f"not tried: {maker.why}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return verdict(run(maker.make, maker.step))
    except Exception as error:  # of the optimizer, before any save
        return f"does not run here: {type(error).__name__}"


def table(names: list[str]) -> list[str]:
    """Return the lines of the table, of the optimizers whose names have one of these in them."""
    lines = ["| optimizer | version | resumes |", "|---|---|---|"]
    for module, version, maker in makers():
        name = f"{module}.{maker.name}"
        if not names or any(one in name for one in names):
            lines.append(f"| `{name}` | {version} | {row(maker)} |")
            print(lines[-1], flush=True)
    return lines


def main() -> int:
    """Print the table, or write it.  Fails for an optimizer that only its own methods resume."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    lines = table(arguments.names)
    if arguments.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text("\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{after}"]))
    return int(any("**no**" in line for line in lines))


if __name__ == "__main__":
    raise SystemExit(main())
