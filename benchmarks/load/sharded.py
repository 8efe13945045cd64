"""Loads of the same layout, beside the speed of the disk and of memory."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from benchmarks.load.states import build
from benchmarks.rivals import waiting
from benchmarks.timing import Contents, copier, gib_of, io_counts, phases, raw_reads, tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.rivals.waiting import DcpMode
    from benchmarks.timing import Bench


def part(bench: Bench, gib: float, quick: bool) -> dict[str, Any]:
    """Measure a state of which every rank holds an equal part, as with FSDP2."""
    state = build(gib, bench.world)
    owned = tensors(state)
    result: dict[str, Any] = {
        "world": bench.world,
        "gib_per_rank": gib_of(sum(t.nbytes for t in owned)),
        "tensors_per_rank": len(owned),
    }
    result["cold"], result["warm"] = {}, {"memcpy_s": bench.timed("memcpy", copier(owned), repeat=8)}
    contents = Contents(bench, state)
    _reknit(bench, state, contents, result, quick)
    for kind in ("cold", "warm"):
        result[kind]["dcp"] = {}
    stores: dict[str, list[DcpMode]] = {}
    for mode in waiting.QUICK_MODES if quick else waiting.ALL_MODES:
        stores.setdefault(mode.stored, []).append(mode)
    for stored, modes in stores.items():
        _dcp(bench, state, contents, f"{bench.folder}/{stored}", modes=modes, result=result)
    for kind in ("cold", "warm"):
        times = [m["s"] for m in result[kind]["dcp"].values() if "error" not in m]
        result[kind]["dcp_best_s"] = min(times, default=None)
    return result


def both(
    bench: Bench, name: str, path: str, load: Callable[[], Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the seconds of a load, cold and warm, with the bytes that the disk read for it when cold."""
    cold = bench.timed(f"{name}, cold", load, lambda: bench.cold(path))
    bench.cold(path)
    before = io_counts()[1]
    bench.together(load)
    (fetched,) = bench.total(io_counts()[1] - before)
    bench.warm(path)
    warm = bench.timed(f"{name}, warm", load)
    return {"s": cold, "fetched_from_disk_nbytes": fetched}, {"s": warm}


def _reknit(
    bench: Bench, state: dict[str, Any], contents: Contents, result: dict[str, Any], quick: bool
) -> None:
    import reknit

    path = f"{bench.folder}/reknit"
    reknit.save(path, state).result()
    bench.settle()
    raw = raw_reads(bench, path, quick)
    result["cold"] |= {"raw_reads_s": raw, "raw_read_s": min(raw.values())}
    reports: list[Any] = []

    def load(options: reknit.LoadOptions | None = None) -> None:
        reports[:] = [reknit.load(path, state, options=options)]

    ways: dict[str, Callable[[], None]] = {
        "reknit": load,
        "reknit, not verified": lambda: load(reknit.LoadOptions(verify="off")),
    }
    for name, way in ways.items():

        def measured(name: str = name, way: Callable[[], None] = way) -> dict[str, Any]:
            cold, warm = both(bench, name, path, contents.checked(way))
            return {"cold": cold, "warm": warm | {"phases_rank0_s": phases(reports[0])}}

        found = bench.attempt(name, measured)
        for kind in ("cold", "warm"):
            result[kind][name] = found.get(kind, found)
    bench.drop(path)


def _dcp(
    bench: Bench,
    state: dict[str, Any],
    contents: Contents,
    path: str,
    *,
    modes: list[DcpMode],
    result: dict[str, Any],
) -> None:
    """Measure the modes of one store."""

    def save() -> dict[str, Any]:
        modes[0].save(path, state)
        return {}

    saved = bench.attempt(f"{modes[0].name}, saving", save)
    bench.settle()
    for mode in modes:

        def measured(mode: DcpMode = mode) -> dict[str, Any]:
            load = contents.checked(lambda: mode.load(path, state))
            return dict(zip(("cold", "warm"), both(bench, mode.name, path, load), strict=True))

        found = saved or bench.attempt(mode.name, measured)
        for kind in ("cold", "warm"):
            result[kind]["dcp"][mode.name] = found.get(kind, found)
    bench.on_root(lambda: shutil.rmtree(path, ignore_errors=True))
