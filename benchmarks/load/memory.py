"""The memory that a load needs besides the tensors that it fills."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.load.replicated import SHARES, sharing
from benchmarks.load.states import DDP_4, FSDP_4, TP_4, Ranks, model_shapes, nbytes
from benchmarks.rivals import waiting
from benchmarks.timing import PeakMemory, gib_of, own_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.timing import Bench

BUDGET = 256 << 20
"""The memory that a rank may use by default (`LoadOptions.inflight_nbytes`)."""


def part(bench: Bench, gib: float) -> dict[str, Any]:
    """Measure loads into memory that is already mapped, first by reknit and then by DCP.

    Measurements exclude the imports of the first load of a process, and the first barrier of its ranks.
    """
    import reknit

    ranks = Ranks(bench)
    small = ranks.state(FSDP_4, model_shapes(0.001))
    reknit.save(f"{bench.folder}/small", small or {}).result()
    reknit.load(f"{bench.folder}/small", small or {})
    shapes, whole = model_shapes(gib), model_shapes(gib / 4)
    result: dict[str, Any] = {
        "gib_sharded": gib_of(nbytes(shapes)),
        "gib_replicated": gib_of(nbytes(whole)),
        "budget_nbytes": BUDGET,
        "loads": {},
        "dcp": {},
    }
    ours, theirs = f"{bench.folder}/reknit", f"{bench.folder}/dcp"
    state: Any = ranks.state(FSDP_4, shapes)
    reknit.save(ours, state).result()
    waiting.OWN.save(theirs, state)
    for name, layout in (("same layout", FSDP_4), ("FSDP 4 to TP 4", TP_4)):
        state = None  # the next one takes its place
        state = ranks.state(layout, shapes)
        result["loads"][name] = _peak(bench, f"{name}, reknit", ours, partial(reknit.load, ours, state))
        rival = partial(waiting.OWN.load, theirs, state)
        result["dcp"][name] = _peak(bench, f"{name}, DCP", theirs, rival)
    for path in (ours, theirs):
        bench.drop(path)
    result["loads"] |= _replicated(bench, ranks.state(DDP_4, whole), ours)
    return result


def _replicated(bench: Bench, state: Any, path: str) -> dict[str, Any]:
    import reknit

    reknit.save(path, state).result()

    def load(share: str) -> Any:
        return reknit.load(path, state, options=sharing(share))

    found = {}
    for share in SHARES:
        found[f"replicated, share={share}"] = _peak(
            bench, f"replicated, share={share}, reknit", path, partial(load, share)
        )
    bench.drop(path)
    return found


def _peak(bench: Bench, name: str, path: str, load: Callable[[], Any]) -> dict[str, Any]:
    """Return the largest extra memory of any rank during one cold load."""

    def measured() -> dict[str, Any]:
        bench.cold(path)
        with PeakMemory(own_memory, 0.002) as memory:
            bench.together(load)
        extra, shared = (round(value) for value in bench.slowest(*memory.extra))
        bench.say(f"{name:60s} {extra / (1 << 20):8.1f} MiB more than before")
        return {"extra_nbytes": extra, "shared_on_host_nbytes": shared}

    return bench.attempt(name, measured)
