"""Ranks that each hold a part: the bytes that a load reads, a load from a cold disk, a save that waits."""

from __future__ import annotations

import os
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.load.states import build
from benchmarks.rivals.waiting import dcp, ours, rivals, torch_checkpointing
from benchmarks.table.rounds import Contestant, Row, in_turn, read_bytes
from benchmarks.timing import data_files, pinned, raw_read, raw_write, tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.rivals.waiting import Way
    from benchmarks.table.sizes import Sizes
    from benchmarks.timing import Bench


class Trained(NamedTuple):
    """A state of FSDP2 after a step, with a counter for each parameter that is the same on all ranks.

    `plain` has the same tensors as `live` in dictionaries, which do not record that the counters are equal.
    """

    plain: dict[str, Any]
    live: dict[str, Any]


def trained(gib: float, world: int) -> Trained:
    """Return the state of a model with `gib` GiB over all ranks."""
    import torch

    plain = build(gib, world)
    model = {name: torch.nn.Parameter(tensor) for name, tensor in plain["model"].items()}
    optimizer = torch.optim.AdamW(list(model.items()))
    for name, moments in plain["optimizer"]["state"].items():
        moments["step"] = torch.tensor(1.0)
        optimizer.state[model[name]] = moments
    return Trained(plain, {"model": model, "optimizer": optimizer})


def rows(bench: Bench, sizes: Sizes) -> list[Row]:
    """Measure the saves and loads of two ranks."""
    state = trained(sizes.gib, bench.world)
    found = [_saves(bench, state, sizes.repeat)]
    saved = Saved(bench, state.plain, [ours(state.live), *rivals(bench)])
    found += [_cold(bench, state, saved, sizes.repeat), _bytes(bench, state)]
    bench.drop(bench.folder)
    return found


def byte_rows(bench: Bench, sizes: Sizes) -> list[Row]:
    """Measure only the bytes, for more ranks than this machine has cores."""
    found = _bytes(bench, trained(sizes.gib, bench.world))
    bench.drop(bench.folder)
    return [found]


class Saved:
    """A checkpoint by each way that could save one; `failed` has the reasons of the others."""

    def __init__(self, bench: Bench, state: dict[str, Any], ways: list[Way]) -> None:
        self.ways = {way.name: way for way in ways}
        self.failed: dict[str, str] = {}
        self._bench = bench
        os.makedirs(bench.folder, exist_ok=True)
        for way in ways:

            def save(way: Way = way) -> dict[str, Any]:
                bench.together(lambda: way.save(self.path(way), state))
                return {}

            if why := bench.attempt(f"{way.name}, saving", save):
                self.failed[way.name] = why["error"]
        bench.settle()

    def path(self, way: Way) -> str:
        return f"{self._bench.folder}/{list(self.ways).index(way.name)}"

    def row(self, name: str, unit: str) -> Row:
        """Return a new row, in which the ways that could not save have failed."""
        row = Row(name, unit)
        for who, why in self.failed.items():
            row.fail(who, self.ways[who].loads_as, why)
        return row

    def loads(
        self, state: dict[str, Any], before: Callable[[str], Any] = lambda path: None
    ) -> list[Contestant]:
        """Return the contestants of a load; `before` gets the path that is loaded next."""
        return [
            Contestant(
                way.name,
                way.loads_as,
                lambda _, way=way: way.load(self.path(way), state),  # type: ignore[misc]
                lambda _, way=way: before(self.path(way)),  # type: ignore[misc]
            )
            for way in self.ways.values()
            if way.name not in self.failed
        ]


def savers(
    ways: list[Way], path: str, state: dict[str, Any], before: Callable[[int], Any], *, timed: bool = True
) -> list[Contestant]:
    """Return the contestants of a save; if `timed`, a rival that does not sync its files stands beside."""
    return [
        Contestant(
            way.name,
            way.saves_as if timed else way.loads_as,
            partial(lambda way, _: way.save(path, state), way),
            before,
        )
        for way in ways
    ]


def _saves(bench: Bench, state: Trained, repeat: int) -> Row:
    path = f"{bench.folder}/save"
    data = pinned(_nbytes(state))

    def clean(_: int) -> None:
        bench.on_root(lambda: shutil.rmtree(path, ignore_errors=True))
        os.makedirs(f"{bench.folder}/raw", exist_ok=True)

    contestants = savers(
        [ours(state.live), *rivals(bench), torch_checkpointing(synced=True)], path, state.plain, clean
    )
    raw = f"{bench.folder}/raw/{bench.rank}"
    for name, direct in (("raw write + fsync", False), ("raw write + fsync, O_DIRECT", True)):
        write = partial(lambda direct, _: raw_write(raw, data, direct=direct), direct)
        contestants.append(Contestant(name, "limit", write, clean))
    row = in_turn(bench, Row(f"save that waits, {bench.world} ranks", "s"), contestants, repeat)
    clean(0)
    bench.drop(f"{bench.folder}/raw")
    return row


def _cold(bench: Bench, state: Trained, saved: Saved, repeat: int) -> Row:
    path = saved.path(saved.ways["reknit"])
    files = data_files(path)[bench.rank :: bench.world]
    memory = pinned(max((os.path.getsize(file) for file in files), default=0))
    contestants = saved.loads(state.plain, bench.cold)
    for name, direct in (("raw read", False), ("raw read, O_DIRECT", True)):
        read = partial(lambda direct, _: raw_read(files, memory, 2, direct=direct), direct)
        contestants.append(Contestant(name, "limit", read, lambda _: bench.cold(path)))
    return in_turn(bench, saved.row(f"load, {bench.world} ranks, cold", "s"), contestants, repeat)


def _bytes(bench: Bench, state: Trained) -> Row:
    """Measure the bytes of ways that read by system calls, since reads of mapped files cannot be counted."""
    ways = [ours(state.live, share="never"), dcp()]
    saved = Saved(bench, state.plain, ways)
    (needed,) = bench.total(_nbytes(state))
    row = saved.row(f"bytes read / needed, {bench.world} ranks", "x")
    in_turn(bench, row, saved.loads(state.plain), 2, read_bytes)
    row.figures = {who: [round(each / needed, 4) for each in read] for who, read in row.figures.items()}
    row.add("bytes needed", "limit", 1.0)
    return row


def _nbytes(state: Trained) -> int:
    return sum(tensor.nbytes for tensor in tensors(state.plain))
