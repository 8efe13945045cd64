"""Section 5.2 of NSDI: the cost of a barrier of all ranks in a tree, and in a star.

Real processes of one machine hold rounds in a tree by hosts and in a star below rank 0, by turns.  The CPU
time of rank 0 of the star for each message then goes into a model of up to 10,000 ranks.  There, each rank
runs the machine of a real rank.
"""

from __future__ import annotations

from math import isclose
from typing import TYPE_CHECKING

from benchmarks.paper.results import About, Measured, Row, small
from benchmarks.tree import rounds
from benchmarks.tree.model import Model, star
from reknit.comm.group import Topology

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.tree.rounds import Taken

ABOUT = About(
    name="barrier",
    source="NSDI section 5.2",
    title="a round of all ranks: tree against star",
    paper="the barrier of torch.distributed stops about 10,000 GPUs for 20 s each time; a tree over gRPC "
    "removes that stop.",
)
TRAVEL_S = 100e-6
"""The assumed time of a message between two hosts of a cluster."""


def measure(scratch: Path) -> Measured:
    """Hold real rounds, then model the rounds of larger jobs."""
    many, few, count = (8, 4, 3) if small() else (64, 16, 20)
    rows, message_s = _real(scratch / "many", many, count, joined=False)
    with_torch, _ = _real(scratch / "few", few, count, joined=True)
    rows += with_torch
    _require_same(message_s)
    for size in (64, 256) if small() else (64, 1_000, 4_800, 10_000):
        rows += _modelled(size, message_s)
    return Measured(
        rows,
        {},
        [
            f"Real ranks share the cores of one machine, so that star and tree take the same CPU time in "
            f"all; on a cluster only the busiest rank counts. On {many} ranks, rank 0 of the star took "
            f"{1e6 * message_s:.0f} µs of CPU for each message.",
            f"The model: that time for each message at each rank, and {1e6 * TRAVEL_S:.0f} µs of travel.",
        ],
    )


def _real(folder: Path, size: int, count: int, *, joined: bool) -> tuple[list[Row], float]:
    """Return the rows of real ranks, and the CPU seconds of rank 0 of the star for each message.

    Ranks that are `joined` have a process group of torch, whose rounds are measured too.
    """
    from tests import ranks

    folder.mkdir()
    found: list[dict[str, Taken]] = ranks.run(size, rounds.turns, str(folder), count, joined=joined)
    slowest = {kind: _slowest([rank[kind] for rank in found]) for kind in found[0]}
    busiest = {kind: [1e3 * max(rank[kind].cpu_s for rank in found) / count] for kind in found[0]}
    named = {("reknit" if kind == "tree" else kind): kind for kind in found[0]}
    others = ("torch gather and scatter", "torch barrier") if joined else ("star",)
    reasons = {
        "star": "on one machine all ranks share the cores",
        "torch barrier": "a barrier carries no bytes and no errors; a round does",
    }
    rows = []
    for other in others:
        for what, figures in (("slowest rank, wall", slowest), ("busiest rank, CPU", busiest)):
            pair = {who: figures[kind] for who, kind in named.items() if who in ("reknit", other)}
            rows.append(Row(f"{size} processes, {what}", "ms", pair, other, why=reasons.get(other, "")))
    return rows, found[0]["star"].cpu_s / count / (2 * (size - 1))


def _slowest(ranks: Sequence[Taken]) -> list[float]:
    """Return the milliseconds of the slowest rank in each round."""
    return [1e3 * max(times) for times in zip(*(rank.seconds for rank in ranks), strict=True)]


def _require_same(message_s: float) -> None:
    """Check the formula of the star against the model."""
    times = {"message_s": message_s, "travel_s": TRAVEL_S}
    for size in (2, 64, 500):
        model, formula = Model(Topology.flat(size, size), **times).round(), star(size, **times)
        assert isclose(model.seconds, formula.seconds), (size, model, formula)
        assert model.most_messages == formula.most_messages, (size, model, formula)


def _modelled(size: int, message_s: float) -> list[Row]:
    hosts = [rank // rounds.PER_HOST for rank in range(size)]
    times = {"message_s": message_s, "travel_s": TRAVEL_S}
    tree = Model(Topology(hosts, rounds.FAN_OUT), **times).round()
    flat = star(size, **times)
    name = f"model of {size:,} ranks"
    return [
        Row(f"{name}: a round", "ms", {"reknit": [1e3 * tree.seconds], "star": [1e3 * flat.seconds]}, "star"),
        Row(
            f"{name}: messages of the busiest rank",
            "messages",
            {"reknit": [tree.most_messages], "star": [flat.most_messages]},
            "star",
        ),
    ]
