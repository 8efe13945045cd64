"""Loads of the whole model on every rank: the times that each byte leaves storage, and the seconds."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.load.metered_storage import meter, metered
from benchmarks.load.states import DDP_4, Ranks, model_shapes, nbytes
from benchmarks.timing import Contents, data_files, gib_of, phases

if TYPE_CHECKING:
    from benchmarks.timing import Bench

RATE = 200_000_000
STORAGES = {"disk": "none", "200 MB/s per rank": f"{RATE}-rank", "200 MB/s per host": f"{RATE}-host"}
SHARES = ("always", "never", "auto")


def sharing(share: str) -> Any:
    """Return the options of a load whose ranks share the bytes that they read, or do not.

    Raises `TypeError` if this version of reknit has no such option.
    """
    import reknit

    knobs: dict[str, Any] = {"share": share}
    return reknit.LoadOptions(**knobs)


def part(bench: Bench, sizes: tuple[float, ...]) -> dict[str, Any]:
    """Measure models of some sizes (in GiB) that every rank holds whole, as DDP does."""
    found = {}
    for gib in sizes:
        shapes = model_shapes(gib)
        found[f"{round(gib_of(nbytes(shapes)) * 1024)} MiB"] = _of_size(bench, shapes)
    return found


def _of_size(bench: Bench, shapes: Any) -> dict[str, Any]:
    import reknit

    state = Ranks(bench).state(DDP_4, shapes)
    contents = Contents(bench, state)
    path = f"{bench.folder}/reknit"
    reknit.save(path, state or {}).result()
    bench.settle()
    stored = sum(os.path.getsize(file) for file in data_files(path))
    result: dict[str, Any] = {"unique_nbytes": stored, "storages": {}}
    meter()  # registers the scheme of the URLs
    for storage in STORAGES:
        found = {}
        for share in SHARES:
            load = partial(_load, bench, state, contents, path, storage=storage, share=share)
            found[share] = bench.attempt(f"{storage}, share={share}", load)
        times = [found[share]["s"] for share in ("always", "never") if "s" in found[share]]
        result["storages"][storage] = found | {"quicker_s": min(times) if len(times) == 2 else None}
    bench.drop(path)
    return result


def _load(
    bench: Bench, state: Any, contents: Contents, path: str, *, storage: str, share: str
) -> dict[str, Any]:
    """Return seconds and bytes of a cold load by all ranks."""
    import reknit

    options = sharing(share)
    url = metered(path, STORAGES[storage])
    reports: list[Any] = []

    def load() -> None:
        reports[:] = [reknit.load(url, state, options=options)]

    if storage == "disk":
        contents.checked(load)

    def before() -> None:
        bench.cold(path)
        meter().reset()

    # Once is enough with a throttle, which makes every load equally slow.
    repeat = None if storage == "disk" else 1
    seconds = bench.timed(f"{storage}, share={share}", load, before, repeat)
    read, reported = bench.total(meter().data_nbytes, reports[0].nbytes_read)
    return {
        "s": seconds,
        "read_nbytes": read,
        "reported_nbytes": reported,
        "phases_rank0_s": phases(reports[0]),
    }
