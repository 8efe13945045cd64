"""The gain by each optimization of a save: the pipeline, the balance of replicas, and kept plans."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.paper.jobs.workloads import Shape, gpt_layout, megatron
from benchmarks.paper.results import About, Measured, Row, small
from benchmarks.timing import Bench
from benchmarks.turns import in_turn
from tests import ranks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ABOUT = About(
    name="saving",
    source="NSDI, Table 5",
    title="a save with its optimizations one after another",
    paper="the pipeline makes a save 1.45 to 1.81 times faster, with the balance of replicas 2.46 to 2.48 "
    "times, with the plan cache 2.50 to 2.52 times.",
)

WORLD, RATE = 4, 40e6
"""The ranks, all of them replicas of the model, and the bytes per second that the limited store takes."""

NONE, PIPELINE, WORST_FIT, BALANCED = ("none", "pipeline", "pipeline, worst fit", "pipeline, one cut line")
NEW, SAME = "new plans", "kept plans"
LADDER = {PIPELINE: (1.45, 1.81), WORST_FIT: (2.46, 2.48), BALANCED: (2.46, 2.48)}
DIVISIONS = {
    NONE: "first replica",
    PIPELINE: "first replica",
    WORST_FIT: "worst fit",
    BALANCED: "one cut line",
}
UNEVEN, EVEN = 1.25, 1.05
"""Bytes of the busiest rank divided by the mean: at least with first replicas, and at most when divided.

The first of four replicas writes the whole model, a seventh of all bytes, and a quarter of the rest: 1.43.
"""
WHY = {
    "disk": "4 ranks share 2 cores and one disk; in the paper each rank has a network connection",
    "limited": "at 4 replicas a rank saves less than at the paper's 8",
}


def measure(scratch: Path) -> Measured:
    """Measure the ladder on the disk and on a store that limits each rank, and then the kept plans."""
    rounds, shape = (1, Shape(64, 1)) if small() else (5, Shape(512, 4))
    found, *_ = ranks.run(
        WORLD, measured_by_rank, str(scratch), shape, rounds, timeout=400.0, warm="megatron"
    )
    rows = []
    for place, figures in found["seconds"].items():
        for step, paper in LADDER.items():
            rows.append(
                Row(
                    f"on {place}: {step}",
                    "s",
                    {who: each for who, each in figures.items() if who in (NONE, step)},
                    NONE,
                    step,
                    paper,
                    WHY["disk" if place == "the disk" else "limited"],
                )
            )
    busiest = {who: [max(each) / (sum(each) / WORLD)] for who, each in found["nbytes"].items()}
    if not small():  # replicas do not divide little bytes
        require_divided({who: each for who, (each,) in busiest.items()})
    rows += [
        Row(f"bytes of the busiest rank / mean: {who}", "x", {who: each}, "", who)
        for who, each in busiest.items()
    ]
    rows.append(
        Row(
            "in the background, a plan again",
            "s",
            found["plans"],
            NEW,
            SAME,
            (1.01, 1.02),
            "a plan of so few ranks takes milliseconds; table `planning` has thousands of ranks",
        )
    )
    mb = sum(found["nbytes"][BALANCED]) / 1e6
    return Measured(
        rows,
        found["failed"],
        [
            f"Megatron-Core, {WORLD} ranks with DP={WORLD} and a distributed optimizer, {mb:.0f} MB.",
            "Without optimizations one thread copies all bytes, and then digests and writes them in turn; "
            "the first replica writes all replicated bytes.",
            f"The limited store takes {RATE / 1e6:.0f} MB/s from each rank, as a network connection would.",
        ],
    )


def require_divided(busiest: Mapping[str, float]) -> None:
    """Raise `AssertionError` unless each step of the ladder wrote the bytes of its own division."""
    for who, each in busiest.items():
        if DIVISIONS[who] == "first replica":
            assert each >= UNEVEN, f"{who}: the first replica does not write more ({each:.3f} of the mean)"
        else:
            assert each <= EVEN, f"{who}: the replicas do not divide the bytes ({each:.3f} of the mean)"


def measured_by_rank(folder: str, shape: Shape, rounds: int) -> dict[str, Any]:
    """Return the seconds of each step of the ladder, the bytes of all ranks, and saves with kept plans."""
    from benchmarks.load.metered_storage import meter, metered

    folder = os.path.abspath(folder)
    bench = Bench(folder)
    state = megatron(gpt_layout(WORLD, shape)).state()
    nbytes: dict[str, list[int]] = {}
    seconds, failed = {}, {}
    meter()  # registers the scheme of the URL
    for place, url in (("the disk", folder), ("a limited store", metered(folder, f"{RATE:.0f}-rank"))):
        ways = {step: partial(_saved, bench, state, nbytes, (step, url)) for step in DIVISIONS}
        taken = in_turn(ways, rounds, bench=bench)
        seconds[place], failed[place] = taken.of("s"), taken.failed
    plans = in_turn(_plans(bench, state), rounds, bench=bench)
    reasons = {f"{who} on {place}": why for place, each in failed.items() for who, why in each.items()}
    return {"seconds": seconds, "nbytes": nbytes, "plans": plans.of("s"), "failed": reasons | plans.failed}


def _saved(
    bench: Bench, state: dict[str, Any], nbytes: dict[str, list[int]], way: tuple[str, str], number: int
) -> Mapping[str, float]:
    """Save with some optimizations, and return the seconds."""
    import reknit
    from benchmarks.paper.jobs import ablations

    step, above = way
    place = list(DIVISIONS).index(step)
    name = f"saved-{place}"
    # New names, since a kept plan would divide the bytes as another step did.
    fresh = {f"{item}-{place}-{number}": value for item, value in state.items()}
    options = reknit.SaveOptions(threads=1 if step == NONE else 2, reuse=False)
    reports: list[Any] = []
    with ExitStack() as switched:
        switched.enter_context(ablations.dividing(ablations.DIVISIONS[DIVISIONS[step]]))
        if step == NONE:
            switched.enter_context(ablations.one_after_another())
        taken = bench.settled(
            lambda: reports.append(reknit.save(f"{above}/{name}", fresh, options=options).result())
        )
    each = [0] * bench.world
    each[bench.rank] = reports[0].nbytes
    nbytes[step] = bench.total(*each)
    bench.drop(f"{bench.folder}/{name}")
    return {"s": taken}


def _plans(bench: Bench, state: dict[str, Any]) -> dict[str, Any]:
    """Return background saves whose plans are new, since their items have new names, or the same again."""
    import reknit

    def saved(number: int, *, new: bool) -> Mapping[str, float]:
        path = f"{bench.folder}/planned"
        options = reknit.SaveOptions(reuse=False)
        named = {f"{name}{number}" if new else name: value for name, value in state.items()}
        taken = bench.settled(lambda: reknit.save(path, named, wait=False, options=options).result())
        bench.drop(path)
        return {"s": taken}

    return {NEW: partial(saved, new=True), SAME: partial(saved, new=False)}
