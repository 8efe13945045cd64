"""One rank: many tensors, a small state, a warm load, and a second save of few changes."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.load.states import full, model_shapes
from benchmarks.rivals.waiting import ours, rivals, torch_checkpointing
from benchmarks.table.rounds import Contestant, Row, cpu_seconds, in_turn, peak_memory, seconds
from benchmarks.table.sharded import Saved, savers
from benchmarks.timing import pinned, raw_read, raw_write, tensors

if TYPE_CHECKING:
    from benchmarks.rivals.waiting import Way
    from benchmarks.table.rounds import Meter
    from benchmarks.table.sizes import Sizes
    from benchmarks.timing import Bench


def rows(bench: Bench, sizes: Sizes) -> list[Row]:
    """Measure all saves and loads of one process."""
    many = _state(sizes.tensors, 4 << 10)
    small = _state(16, sizes.small_mb * 1_000_000 // 16)
    warm = _state(50, sizes.warm_mb * 1_000_000 // 50)
    model = {"model": {fqn: full(fqn, shape) for fqn, shape in model_shapes(sizes.warm_gib).items()}}
    count, gib = f"{sizes.tensors:,} tensors", f"{sizes.warm_gib:g} GiB, 1 rank"
    found = [
        _peaks(bench, model, f"{gib}: peak memory of a load / bytes owned"),  # before any memory was freed
        _saves(bench, many, Row(f"{count}: CPU of a save", "s"), sizes.repeat, cpu_seconds),
        _loads(bench, many, f"{count}: CPU of a load", sizes.repeat, cpu_seconds),
        _saves(bench, small, Row(f"{sizes.small_mb} MB, 1 rank: save that waits", "s"), 3 * sizes.repeat),
        _loads(bench, warm, f"{sizes.warm_mb} MB, 1 rank: warm load", 3 * sizes.repeat),
        _loads(bench, model, f"{gib}: warm load", sizes.repeat),
        *_lora(bench, sizes),
    ]
    bench.drop(bench.folder)
    return found


def _state(tensors: int, nbytes: int) -> dict[str, Any]:
    """Return so many tensors, of so many bytes each."""
    import torch

    return {"model": {f"layers.{n}.weight": torch.full((nbytes // 4,), float(n)) for n in range(tensors)}}


def _raw(bench: Bench, nbytes: int) -> tuple[str, memoryview]:
    """Return a path and as much memory as a state has, for plain input and output."""
    folder = f"{bench.folder}/raw"
    os.makedirs(folder, exist_ok=True)
    return f"{folder}/file", pinned(nbytes)[:nbytes]


def _peaks(bench: Bench, state: dict[str, Any], name: str) -> Row:
    """Measure the first load of a state, after a small one that imports modules."""
    tiny, owned = _state(1, 64), sum(tensor.nbytes for tensor in tensors(state))
    row = Row(name, "x")
    row.add("bytes owned", "limit", 1.0)
    for way in (ours(), *rivals(bench)[1:3]):  # safetensors and DCP
        for each in (tiny, state):
            saved = Saved(bench, each, [way])
            path = saved.path(way)
            peak = peak_memory(bench, partial(way.load, path, each))
            bench.drop(bench.folder)
        row.add(way.name, way.loads_as, 1 + peak / owned)
    return row


def _saves(bench: Bench, state: dict[str, Any], row: Row, repeat: int, meter: Meter = seconds) -> Row:
    path = f"{bench.folder}/save"
    raw, data = _raw(bench, sum(tensor.nbytes for tensor in tensors(state)))

    def clean(_: int) -> None:
        shutil.rmtree(path, ignore_errors=True)
        Path(raw).unlink(missing_ok=True)

    ways, timed = [ours(), *rivals(bench)], meter is seconds
    contestants = savers(
        [*ways, torch_checkpointing(synced=True)] if timed else ways, path, state, clean, timed=timed
    )
    write = Contestant("raw write + fsync", "limit", lambda _: raw_write(raw, data, direct=False), clean)
    in_turn(bench, row, [*contestants, write], repeat, meter, seldom=None if timed else "DCP")
    clean(0)
    return row


def _loads(bench: Bench, state: dict[str, Any], name: str, repeat: int, meter: Meter = seconds) -> Row:
    saved = Saved(bench, state, [ours(), *rivals(bench)])
    raw, data = _raw(bench, sum(tensor.nbytes for tensor in tensors(state)))
    raw_write(raw, data, direct=False)
    read = Contestant("raw read", "limit", lambda _: raw_read([raw], data, 2, direct=False))
    contestants, seldom = [*saved.loads(state, bench.warm), read], None if meter is seconds else "DCP"
    row = in_turn(bench, saved.row(name, "s"), contestants, repeat, meter, seldom=seldom)
    bench.drop(bench.folder)
    return row


LORA = 0.01
"""The part of a model that is trained."""


class Adapted:
    """A frozen model with a trained part, which changes before each save."""

    def __init__(self, gib: float) -> None:
        import torch

        rows = max(64, round(gib * (1 << 30) / 16 / 4096))
        self.model = torch.nn.Module()
        for name, count, trained in (("base", 16, False), ("lora", 1, True)):
            height = max(1, round(rows * 16 * LORA)) if trained else rows
            weights = [torch.nn.Parameter(torch.randn(height, 1024), trained) for _ in range(count)]
            self.model.register_module(name, torch.nn.ParameterList(weights))
        self.whole = sum(each.nbytes for each in self.model.parameters())
        self.trained = sum(each.nbytes for each in self.model.parameters() if each.requires_grad)

    def step(self) -> None:
        """Change the trained part."""
        import torch

        with torch.no_grad():
            for each in self.model.parameters():
                if each.requires_grad:
                    each.add_(1.0)


def _lora(bench: Bench, sizes: Sizes) -> list[Row]:
    """Measure the second save of a model of which a small part is trained, each in a folder of its own."""
    import reknit

    adapted = Adapted(sizes.lora_gib)
    raw, data = _raw(bench, adapted.trained)
    plain = {"model": dict(adapted.model.state_dict())}
    state = {"model": adapted.model}
    written: list[float] = []

    def first(way: Way, held: Any, number: int) -> None:
        shutil.rmtree(f"{bench.folder}/run", ignore_errors=True)
        way.save(f"{bench.folder}/run/first", held)
        adapted.step()

    def second(_: int) -> None:
        report = reknit.save(f"{bench.folder}/run/second", state).result()
        written.append((report.total_nbytes - report.reused_nbytes) / report.total_nbytes)

    contestants = [Contestant("reknit", "ours", second, partial(first, ours(), state))]
    for way in rivals(bench):
        save = partial(lambda way, _: way.save(f"{bench.folder}/run/second", plain), way)
        contestants.append(Contestant(way.name, way.saves_as, save, partial(first, way, plain)))
    write = Contestant(
        "raw write + fsync of what changed", "limit", lambda _: raw_write(raw, data, direct=False)
    )
    name = f"{sizes.lora_gib:g} GiB with {LORA:.0%} LoRA, second save"
    time = in_turn(bench, Row(f"{name}: time", "s"), [*contestants, write], sizes.repeat)
    nbytes = Row(f"{name}: bytes written / all", "x")
    nbytes.add("reknit", "ours", *written)
    for way in rivals(bench):
        nbytes.add(way.name, way.saves_as, 1.0)
    nbytes.add("bytes that changed", "limit", adapted.trained / adapted.whole)
    return [time, nbytes]
