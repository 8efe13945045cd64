"""The gain by each optimization of a load: work that overlaps, and bytes that are read once for all ranks."""

from __future__ import annotations

import os
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
    name="loading",
    source="NSDI, Table 6",
    title="a load with its optimizations one after another",
    paper="the asynchronous pipeline makes a load 1.03 to 1.31 times faster, and with the overlap of "
    "reading and communication 1.53 to 1.58 times.",
)

WORLD, RATE = 4, 150_000_000
"""The ranks, all of them replicas of the model, and the bytes per second that a store sends to the host."""

NONE, OVERLAP, SHARING, BOTH = "none", "overlap", "sharing", "both"
WAYS: dict[str, tuple[int, str]] = {
    NONE: (1, "never"),
    OVERLAP: (3, "never"),
    SHARING: (1, "always"),
    BOTH: (3, "always"),
}
"""The threads of a load, and whether the ranks share their reads."""

PAPER = {OVERLAP: (1.03, 1.31), SHARING: (), BOTH: (1.53, 1.58)}
WHY = {
    "the disk": "4 ranks share 2 cores, so that more threads win little, and the page cache is faster than "
    "an exchange between processes",
    "a limited store": "the store is the limit, which more threads cannot raise; only the model is held by "
    "more than one rank, 2 of 14 bytes for a parameter",
}


def measure(scratch: Path) -> Measured:
    """Measure the four ways on the disk and on a store with a limit for the host."""
    rounds, shape = (1, Shape(64, 1)) if small() else (5, Shape(512, 4))
    found, *_ = ranks.run(
        WORLD, measured_by_rank, str(scratch), shape, rounds, timeout=300.0, warm="megatron"
    )
    rows = [
        Row(
            f"from {place}: {way}",
            "s",
            {who: each for who, each in seconds.items() if who in (NONE, way)},
            NONE,
            way,
            paper,
            WHY[place],
        )
        for place, seconds in found["seconds"].items()
        for way, paper in PAPER.items()
    ]
    rows.append(Row("bytes read by all ranks", "bytes", found["nbytes"], NONE, BOTH))
    return Measured(
        rows,
        found["failed"],
        [
            f"Megatron-Core, DP={WORLD} with a distributed optimizer; every byte is checked.",
            "Without overlap one thread of each rank reads, checks and copies one piece after another.",
            f"The limited store sends {RATE / 1e6:.0f} MB/s to all ranks together.",
            "Loads from the disk are cold.",
        ],
    )


def measured_by_rank(folder: str, shape: Shape, rounds: int) -> dict[str, Any]:
    """Return the seconds of each way from each place, and the bytes that left the store."""
    import reknit
    from benchmarks.load.metered_storage import meter, metered

    path = os.path.abspath(f"{folder}/saved")
    bench = Bench(folder)
    state = megatron(gpt_layout(WORLD, shape)).state()
    reknit.save(path, state).result()
    meter()  # registers the scheme of the URLs
    seconds: dict[str, dict[str, list[float]]] = {}
    nbytes: dict[str, list[int]] = {}
    failed: dict[str, str] = {}
    for place, limit in (("the disk", "none"), ("a limited store", f"{RATE}-host")):
        ways = {way: partial(_loaded, bench, state, (path, metered(path, limit)), way) for way in WAYS}
        taken = in_turn(ways, rounds, bench=bench)
        seconds[place] = taken.of("s")
        nbytes |= {who: [round(each[-1])] for who, each in taken.of("nbytes").items()}
        failed |= {f"{who} from {place}": why for who, why in taken.failed.items()}
    return {"seconds": seconds, "nbytes": nbytes, "failed": failed}


def _loaded(
    bench: Bench, state: dict[str, Any], place: tuple[str, str], way: str, number: int
) -> Mapping[str, float]:
    """Load once, and return the seconds and the bytes that left the store."""
    import reknit
    from benchmarks.load.metered_storage import meter

    (path, url), (threads, share) = place, WAYS[way]
    how: dict[str, Any] = {"threads": threads, "share": share}
    bench.cold(path)
    meter().reset()
    seconds = bench.settled(lambda: reknit.load(url, state, options=reknit.LoadOptions(**how)))
    (nbytes,) = bench.total(meter().data_nbytes)
    return {"s": seconds, "nbytes": nbytes}
