"""Figures 14 and 15 of NSDI, and figure 9 of v1: do loss and data go on as if nothing had happened?

Real trainings are saved in the middle, and go on in the same layout and in another one.  The figures are the
largest differences from the training without a break.  The curves are kept as a picture.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from benchmarks.aims import judged
from benchmarks.curves import run as trainings
from benchmarks.dataloader import curve
from benchmarks.paper.results import About, Measured, Row, small

if TYPE_CHECKING:
    from pathlib import Path

ABOUT = About(
    name="curves",
    source="NSDI Figures 14 and 15, v1 Figure 9",
    title="loss and data after resharding",
    paper="loss curves go on smoothly after PP, TP, DP and hybrid resharding and between ZeRO-2 and ZeRO-3; "
    "in the same layout, loss and lengths of samples are equal bit for bit.",
)
NEEDED = {
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
    rows: list[Row] = []
    skipped, every = {}, {}
    for framework in ("fsdp2",) if small() else trainings.FRAMEWORKS:
        if lacking := [name for name in NEEDED[framework] if not _there(name)]:
            skipped[framework] = f"{', '.join(lacking)} is not installed"
            continue
        every[framework] = trainings.trained(framework, 300.0)
        for scenario, lines in every[framework].items():
            whole = lines["uninterrupted"]
            for name, what in (("same layout", f"{scenario}: same layout"), ("resumed", scenario)):
                difference = trainings.apart(whole, lines[name])
                unit = "largest relative difference of the loss"
                rows.append(Row(f"{framework}, {what}", unit, {"reknit": [difference]}))
    rows += _samples()
    if not small() and not skipped:
        aims = [row for framework, curves in every.items() for row in trainings.rows(framework, curves)]
        trainings.keep({"curves": every, "aims": judged(aims)}, trainings.RESULTS)
    return Measured(
        rows,
        skipped,
        [
            "0 is equal bit for bit. In another layout, sums have another order.",
            "The curves: ![losses](../curves.png)",
        ],
    )


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _samples() -> list[Row]:
    """Return the steps whose samples differ from those of a run without a break, as in figure 15."""
    steps = 40 if small() else 200
    whole = curve.run(steps, 0, [curve.SIZE])
    broken = curve.run(steps, 3, [curve.SIZE] * 4)
    differing = sum(a != b for a, b in zip(whole, broken, strict=True))
    return [
        Row("lengths of samples, three restarts", f"differing of {steps} steps", {"reknit": [differing]}),
    ]
