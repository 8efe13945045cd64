"""Does training go on as if nothing had happened, in another layout too?  Loss curves of real trainings.

Each framework trains a small model without a break, and again with a break in the middle.  The checkpoint is
loaded on the same layout and on another one, and the training goes on.  On the same layout the losses must
be equal, bit for bit; on another one they may differ by the order of additions.

Prints JSON, and the largest differences to stderr; with --plot, draws the curves to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.aims import Row, judged, show
from benchmarks.pictures import draw_both

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = ("megatron", "fsdp1", "fsdp2", "deepspeed", "vescale", "jax")
TOLERANCE = 1e-3
"""The largest relative difference of two losses after some steps with different orders of additions."""
RESULTS = ROOT / "benchmarks" / "results"

Curves = dict[str, dict[str, list[float]]]


def trained(framework: str, timeout_s: float) -> Curves:
    """Return the curves of a framework, whose trainings run in processes of their own."""
    with tempfile.TemporaryDirectory(prefix="reknit-curves-") as folder:
        command = [sys.executable, "-m", f"benchmarks.curves.{framework}", folder]
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, timeout=timeout_s
        )
    if done.returncode:
        raise SystemExit(f"{framework} ended with {done.returncode}")
    curves: Curves = json.loads(done.stdout.splitlines()[-1])
    return curves


def apart(whole: list[float], resumed: list[float]) -> float:
    """Return the largest relative difference between a resumed curve and the end of the whole one."""
    return max(abs(a - b) / abs(a) for a, b in zip(whole[-len(resumed) :], resumed, strict=True))


def rows(framework: str, curves: Curves) -> list[Row]:
    reported: list[Row] = []
    for scenario, lines in curves.items():
        name = f"{framework} {scenario}"
        whole = lines["uninterrupted"]
        reported.append((f"{name}: same layout", apart(whole, lines["same layout"]), "<=", 0.0))
        reported.append((f"{name}: resharded", apart(whole, lines["resumed"]), "<=", TOLERANCE))
        reported.append((f"{name}: last loss / first", whole[-1] / whole[0], "<=", 0.95))
    return reported


def figure_of(every: dict[str, Curves]) -> Figure:
    """Return a figure with the curves of each scenario over each other."""
    from matplotlib import pyplot

    panels = [(f, s, lines) for f, curves in every.items() for s, lines in curves.items()]
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(height, columns, figsize=(4.2 * columns, 3 * height), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (framework, scenario, lines) in zip(axes.flat, panels, strict=False):
        whole = lines["uninterrupted"]
        axis.plot(range(len(whole)), whole, color="0.75", linewidth=5, label="uninterrupted")
        for name, style, label in (("same layout", "-", "same layout"), ("resumed", "--", "other layout")):
            line = lines[name]
            first = len(whole) - len(line)
            axis.plot(range(first, len(whole)), line, style, linewidth=1.4, label=label)
        axis.axvline(len(whole) - len(lines["resumed"]), color="0.5", linewidth=0.6)
        axis.set_title(f"{framework}: {scenario}", fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.set_ylabel("loss", fontsize=8)
    axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frameworks", nargs="*", default=list(FRAMEWORKS), choices=FRAMEWORKS)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each framework")
    parser.add_argument("--plot", action="store_true", help="draw to benchmarks/results/curves.png")
    wanted = parser.parse_args()
    every = {framework: trained(framework, wanted.timeout) for framework in wanted.frameworks}
    judgements = judged([row for framework, curves in every.items() for row in rows(framework, curves)])
    show(judgements)
    reported: dict[str, Any] = {"curves": every, "aims": judgements}
    print(json.dumps(reported))
    if wanted.plot:
        keep(reported, RESULTS)


def keep(reported: dict[str, Any], folder: Path) -> None:
    """Write the curves as data and as a picture."""
    folder.mkdir(exist_ok=True)
    (folder / "curves.json").write_text(json.dumps(reported, indent=1) + "\n")
    draw_both(lambda: figure_of(reported["curves"]), folder / "curves.png", dpi=110)


if __name__ == "__main__":
    main()
