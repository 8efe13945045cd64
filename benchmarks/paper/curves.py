"""Figures 14 and 15 of NSDI, and figure 9 of v1: loss and data of runs that continue from a checkpoint.

Real trainings are saved in the middle, and go on in the same layout and in another one.  The figures are the
largest differences from the training without a break.  The curves are kept as pictures.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from benchmarks import reports
from benchmarks.paper.results import About, Measured, Row, small
from benchmarks.pictures import draw_both

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

    from benchmarks.paper.jobs.trainings import Curves

ABOUT = About(
    name="curves",
    source="NSDI Figures 14 and 15, v1 Figure 9",
    title="loss and data after resharding",
    paper="loss curves go on smoothly after PP, TP, DP and hybrid resharding and between ZeRO-2 and ZeRO-3; "
    "in the same layout, loss and lengths of samples are equal bit for bit.",
)
FRAMEWORKS = {
    "megatron": ("megatron.core",),
    "fsdp1": (),
    "fsdp2": (),
    "deepspeed": ("deepspeed",),
    "vescale": ("vescale", "mmh3"),
    "jax": ("jax", "optax"),
}
"""The packages that each framework needs."""


def measure(scratch: Path) -> Measured:
    """Train with each framework that is installed, and read the data of a token loader."""
    from benchmarks.paper.jobs import trainings

    rows: list[Row] = []
    skipped, every = {}, {}
    for framework in ("fsdp2",) if small() else FRAMEWORKS:
        if lacking := [name for name in FRAMEWORKS[framework] if not _there(name)]:
            skipped[framework] = f"{', '.join(lacking)} is not installed"
            continue
        every[framework] = trainings.curves(framework, scratch / framework)
        rows += _rows(framework, every[framework])
    samples = _samples(40 if small() else 200)
    whole = samples["uninterrupted"]
    differing = sum(a != b for a, b in zip(whole, samples["three restarts"], strict=True))
    unit = f"differing of {len(whole)} steps"
    rows.append(Row("lengths of samples, three restarts", unit, {"reknit": [differing]}))
    return Measured(
        rows,
        skipped,
        [
            "0 is equal bit for bit. In another layout, sums have another order.",
            "The curves: ![losses](../curves.png)",
        ],
        None if skipped else {"curves": every, "samples": samples},
    )


def _rows(framework: str, curves: Curves) -> list[Row]:
    """Return the largest relative differences between a resumed curve and the end of the whole one."""
    rows = []
    for scenario, lines in curves.items():
        whole = lines["uninterrupted"]
        assert whole[-1] < 0.95 * whole[0], f"{framework}, {scenario}: the training did not get better"
        for name, what in (("same layout", f"{scenario}: same layout"), ("resumed", scenario)):
            resumed = lines[name]
            pairs = zip(whole[-len(resumed) :], resumed, strict=True)
            difference = max(abs(a - b) / abs(a) for a, b in pairs)
            unit = "largest relative difference of the loss"
            rows.append(Row(f"{framework}, {what}", unit, {"reknit": [difference]}))
    return rows


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _samples(steps: int) -> dict[str, list[float]]:
    """Return the lengths of samples in each step, as in figure 15."""
    from benchmarks.paper.jobs.samples import lengths

    return {
        "uninterrupted": lengths(steps, [2]),
        "three restarts": lengths(steps, [2, 2, 2, 2]),
        "restarts on 4, 3 and 2 ranks": lengths(steps, [2, 4, 3, 2]),
    }


def keep(found: dict[str, Any], folder: Path) -> None:
    """Write the curves as data and as pictures."""
    curves, samples = found["curves"], found["samples"]
    reports.keep({"curves": curves}, folder / "curves.json")
    draw_both(partial(_losses_of, curves), folder / "curves.png", dpi=110)
    reports.keep(samples, folder / "dataloader_curve.json")
    draw_both(partial(_lengths_of, samples), folder / "dataloader.png", dpi=80)


def _losses_of(every: dict[str, Curves]) -> Figure:
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


def _lengths_of(curves: dict[str, list[float]]) -> Figure:
    """Return a figure of the lengths in each step."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4), constrained_layout=True)
    steps = len(curves["uninterrupted"])
    styles: tuple[dict[str, Any], ...] = ({"lw": 4, "alpha": 0.35}, {"lw": 1}, {"lw": 1, "ls": ":"})
    for (name, values), style in zip(curves.items(), styles, strict=True):
        axes.plot(range(1, len(values) + 1), values, label=name, **style)
    for part in range(1, 4):
        axes.axvline(part * steps // 4 + 0.5, color="0.7", lw=0.8)
    axes.set(xlabel="step", ylabel="mean length of a sample, tokens")
    axes.set_title("samples of each step, through three restarts (grey lines)")
    axes.legend(fontsize=8)
    return figure
