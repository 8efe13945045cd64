"""What is wrong with the tensors that no set of chunks covers exactly, and which ranks wrote what of them?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reknit.errors import CommitError
from reknit.types.rank_text import spelled
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.planner.tiling import Gap
    from reknit.types.manifest import TensorEntry

    Ints = NDArray[np.int64]

SHOWN = 20
"""How many problems an error lists before it only counts them."""


def untiled_error(
    gaps: Sequence[Gap], entries: Sequence[TensorEntry], tensor: Ints, rank: Ints
) -> CommitError:
    """Return the error for tensors with gaps; `tensor` and `rank` are those of each chunk.

    Ranks that wrote tensors below the name of one with a gap have a tensor there that is made of others.
    """
    parts: list[str] = []
    mixed = False
    for gap in gaps:
        entry = entries[gap.tensor]
        kind = "a hole" if gap.held < gap.numel else "an overlap"
        part = f"{full_name(*entry[:2])} {entry.spec}: {kind}, {gap.held} of {gap.numel} elements written"
        if len(parts) < SHOWN:
            part += f" (by {spelled(rank[tensor == gap.tensor].tolist())})"
            below = [
                number
                for number, other in enumerate(entries)
                if other.item == entry.item and other.fqn.startswith(f"{entry.fqn}/")
            ]
            if others := rank[np.isin(tensor, below)].tolist():
                part += f", and it is made of other tensors on {spelled(others)}"
                mixed = True
        parts.append(part)
    remedy = "a framework's claim about replicas was wrong, or ranks saved different states"
    if mixed:
        remedy = (
            "let it be of one kind on all ranks that hold some of it; libraries leave small parts plain "
            "(torchao those of fewer than 4,096 elements), so shard it over fewer ranks"
        )
    return CommitError(
        f"{len(gaps)} tensors are not covered exactly: {some(parts)}",
        remedy=f"{remedy}; nothing was committed",
    )


def some(names: Sequence[str]) -> str:
    """Return the first names and how many more there are."""
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
