"""Loads into another layout: their bytes, and their seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.load.geometry import BLOCK, needed
from benchmarks.load.metered_storage import meter, metered
from benchmarks.load.states import (
    DDP_4,
    FSDP_2,
    FSDP_2_TP_2,
    FSDP_4,
    TP_2,
    Layout,
    Ranks,
    boxes,
    full,
    model_shapes,
    nbytes,
)
from benchmarks.rivals import waiting
from benchmarks.timing import Contents, gib_of, io_counts

if TYPE_CHECKING:
    from collections.abc import Callable

    import reknit
    from benchmarks.rivals.waiting import DcpMode
    from benchmarks.timing import Bench

MODES = (waiting.OWN, waiting.SAFETENSORS[0])
"""DCP's own format, which reads whole chunks, and safetensors, which maps files into memory."""


class Slice(NamedTuple):
    """A part of one tensor that one process reads."""

    name: str
    fqn: str
    select: Callable[[tuple[int, ...]], tuple[slice, ...]]


CASES: tuple[tuple[Layout, tuple[Layout, ...]], ...] = (
    (FSDP_4, (FSDP_2, TP_2)),
    (FSDP_2, (FSDP_4,)),
    (FSDP_2_TP_2, (FSDP_4,)),
    (DDP_4, (FSDP_4,)),
)
SLICED = (FSDP_4, DDP_4)
"""Layouts from which slices are read.  DCP has four chunks per tensor of the first, and one of the second."""

SLICES = (
    Slice("1/8 of the rows", "embedding", lambda s: (slice(s[0] // 8, s[0] // 4), slice(0, s[1]))),
    Slice("1/8 of the columns", "embedding", lambda s: (slice(0, s[0]), slice(s[1] // 8, s[1] // 4))),
    Slice("one row", "embedding", lambda s: (slice(s[0] // 3, s[0] // 3 + 1), slice(0, s[1]))),
)


def ways() -> dict[str, reknit.LoadOptions]:
    """Return the ways to load that are measured: by default, and unverified."""
    import reknit

    return {"verified": reknit.LoadOptions(), "unverified": reknit.LoadOptions(verify="off")}


class Target(NamedTuple):
    """The target of a case: `load` fills it by reknit from a URL, `rival` by DCP from a folder."""

    contents: Contents
    load: Callable[[str, reknit.LoadOptions], Any]
    rival: Callable[[DcpMode, str], Any]


def part(bench: Bench, gib: float) -> dict[str, Any]:
    """Measure every case; the same model is saved again for each source layout."""
    shapes = model_shapes(gib)
    ranks = Ranks(bench)
    result: dict[str, Any] = {"gib": gib_of(nbytes(shapes)), "cases": {}}
    for source, targets in CASES:
        result["cases"] |= _from(bench, ranks, source, targets, shapes)
    return result


def _from(
    bench: Bench, ranks: Ranks, source: Layout, targets: tuple[Layout, ...], shapes: Any
) -> dict[str, Any]:
    """Save in one layout, and measure all loads from it."""
    import reknit

    state, group = ranks.state(source, shapes), ranks.group(source.world)
    ours = f"{bench.folder}/reknit"
    theirs = {mode: f"{bench.folder}/{mode.stored}" for mode in MODES}

    def save() -> dict[str, Any]:
        if state is not None:
            reknit.save(ours, state, group=group).result()
            for mode, path in theirs.items():
                mode.save(path, state, group)
        return {}

    failed = bench.attempt(f"saving as {source.name}", save)
    bench.settle()
    found = {}
    for layout in targets:
        name = f"{source.name} to {layout.name}"
        wanted = list(boxes(layout, shapes))
        target = _whole(bench, ranks, layout, shapes)
        found[name] = failed or _case(bench, name, ours, theirs, wanted=wanted, target=target)
    for part in SLICES if source in SLICED else ():
        name = f"{source.name}, {part.name}"
        wanted = [(0, part.fqn, part.select(shapes[part.fqn]))]
        target = _sliced(bench, part, shapes)
        found[name] = failed or _case(bench, name, ours, theirs, wanted=wanted, target=target)
    for path in (ours, *theirs.values()):
        bench.drop(path)
    return found


def _whole(bench: Bench, ranks: Ranks, layout: Layout, shapes: Any) -> Target:
    """Return a target that all ranks of a layout load together."""
    import reknit

    state, group = ranks.state(layout, shapes), ranks.group(layout.world)

    def load(url: str, options: reknit.LoadOptions) -> Any:
        return None if state is None else reknit.load(url, state, options=options, group=group)

    def rival(mode: DcpMode, path: str) -> None:
        if state is not None:
            mode.load(path, state, group)

    return Target(Contents(bench, state or {}), load, rival)


def _sliced(bench: Bench, part: Slice, shapes: Any) -> Target:
    """Return a target that the first rank loads alone: one part of one tensor."""
    import reknit

    box = part.select(shapes[part.fqn])
    state = {f"model.{part.fqn}": full(part.fqn, shapes[part.fqn])[box].clone()} if bench.rank == 0 else {}

    def load(url: str, options: reknit.LoadOptions) -> None:
        if bench.rank != 0:
            return
        with reknit.open(url, options=options) as checkpoint:
            read = checkpoint.read("model", part.fqn, box, framework="torch")
        if url.startswith("metered"):  # not where it is timed, which needs no copy of the new tensor
            state[f"model.{part.fqn}"].copy_(read)

    def rival(mode: DcpMode, path: str) -> None:
        if bench.rank == 0:
            # Into new memory, as by reknit: a reader of a part of a tensor has no memory for it yet.
            fresh = {name: tensor.new_empty(tensor.shape) for name, tensor in state.items()}
            alone = waiting.DcpMode(mode.files, no_dist=True)
            alone.load(path, fresh, planner=waiting.PartPlanner(tuple(s.start for s in box)))
            state.update(fresh)

    return Target(Contents(bench, state), load, rival)


def _case(
    bench: Bench, name: str, ours: str, theirs: dict[DcpMode, str], *, wanted: Any, target: Target
) -> dict[str, Any]:
    """Return bytes and seconds of one load, by reknit in every way and by DCP."""
    need = needed(ours, wanted)
    result: dict[str, Any] = {
        "needed_nbytes": need.nbytes,
        "unique_nbytes": need.unique_nbytes,
        "runs": need.runs,
        "in_blocks_nbytes": need.block_nbytes,
        "verified_bound_nbytes": round(need.nbytes * 1.05) + need.runs * 2 * BLOCK,
    }
    for way, options in ways().items():

        def measured(options: reknit.LoadOptions = options, way: str = way) -> dict[str, Any]:
            found = _counted(bench, ours, target, options)
            seconds = bench.timed(
                f"{name}, reknit, {way}", lambda: target.load(ours, options), lambda: bench.cold(ours)
            )
            return found | {"s": seconds}

        result[way] = bench.attempt(f"{name}, reknit, {way}", measured)
    for key, mode in zip(("dcp", "dcp_safetensors"), MODES, strict=True):

        def rival(mode: DcpMode = mode) -> dict[str, Any]:
            path = theirs[mode]
            load = target.contents.checked(lambda: target.rival(mode, path))
            seconds = bench.timed(f"{name}, {mode.name}", load, lambda: bench.cold(path))
            bench.cold(path)
            before = io_counts()
            bench.together(load)
            read, fetched = bench.total(*(b - a for a, b in zip(before, io_counts(), strict=True)))
            return {"s": seconds, "read_by_calls_nbytes": read, "fetched_from_disk_nbytes": fetched}

        result[key] = bench.attempt(f"{name}, {mode.name}", rival)
    return result


def _counted(bench: Bench, path: str, target: Target, options: reknit.LoadOptions) -> dict[str, int]:
    """Return the bytes that left storage for a load, as counted there and as the report has them."""
    url = metered(path)
    reports: list[Any] = []
    meter()  # registers the scheme of the URL
    load = target.contents.checked(lambda: reports.append(target.load(url, options)))
    bench.cold(path)
    meter().reset()
    before = io_counts()
    bench.together(load)
    by_calls, fetched = (b - a for a, b in zip(before, io_counts(), strict=True))
    reported = getattr(reports[-1], "nbytes_read", 0) or 0
    data, other, reported, by_calls, fetched = bench.total(
        meter().data_nbytes, meter().other_nbytes, reported, by_calls, fetched
    )
    return {
        "read_nbytes": data,
        "read_of_other_files_nbytes": other,
        "reported_nbytes": reported,
        "read_by_calls_nbytes": by_calls,
        "fetched_from_disk_nbytes": fetched,
    }
