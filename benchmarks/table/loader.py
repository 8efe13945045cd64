"""The cost of a data loader at a save: its state is collected, and many small files are written."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

import reknit
from benchmarks.corpus import Repeated
from benchmarks.slow_store import SlowStorage
from benchmarks.table.rounds import Contestant, Row, in_turn
from reknit.dataloader import TokenLoader, TokenSet
from reknit.storage.registry import register
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from benchmarks.table.sizes import Sizes
    from benchmarks.timing import Bench

WORKERS, SAMPLE = 4, 65_536
SETTLE_S = 30.0
"""A step of training, during which workers encode buffers of 256 MiB."""
SMALL_NBYTES, LATENCY_S = 200_000, 0.02
ANNOUNCED, UNANNOUNCED = "reknit", "not announced"


def rows(bench: Bench, sizes: Sizes) -> list[Row]:
    """Measure loaders with large states, and with many small ones."""
    found = [*_collected(bench, sizes), *_small_files(bench, sizes)]
    bench.drop(bench.folder)
    return found


def _collected(bench: Bench, sizes: Sizes) -> list[Row]:
    """Save the token buffers of all workers; a save is announced in advance, or not."""
    tokens = (sizes.loader_mib << 20) // 4
    num_samples = 4 * WORKERS * (tokens // SAMPLE + 8)
    arguments = {"num_samples": num_samples, "length": SAMPLE}
    one = TokenLoader(
        [TokenSet(name="large", open=Repeated, arguments=arguments, num_partitions=WORKERS)],
        token_budget=SAMPLE,
        num_workers=WORKERS,
        buffer_tokens=tokens,
        epochs=None,
        prefetch=1,
    )
    name = f"a loader's {WORKERS} x {sizes.loader_mib} MiB, saved in the background"
    collect, stop = Row(f"{name}: collecting", "s"), Row(f"{name}: training stops", "s")
    for _ in range(WORKERS):
        next(one)
    reknit.prepare(f"{bench.folder}/a", {"loader": one})
    for who in (ANNOUNCED, UNANNOUNCED) * min(sizes.repeat, 3):
        if who == ANNOUNCED:
            one.expect_save(WORKERS)
        for _ in range(WORKERS):
            next(one)
        time.sleep(SETTLE_S * sizes.loader_mib / 256)
        path = f"{bench.folder}/saved"
        begin = time.perf_counter()
        pending = reknit.save(path, {"loader": one}, wait=False)
        stopped = time.perf_counter() - begin
        phases = pending.result().phases
        kind: Any = "ours" if who == ANNOUNCED else "beside"
        collect.add(who, kind, sum(record.seconds for record in phases if record.phase == "collect"))
        stop.add(who, kind, stopped)
        bench.drop(path)
    one.close()
    return [collect, stop]


def _small_files(bench: Bench, sizes: Sizes) -> list[Row]:
    """Save one item of each of many sources, in files of their own, to a store that answers late."""
    register("late", lambda url, _: SlowStorage(ProcessMemory(url.partition("://")[2]), LATENCY_S, LATENCY_S))
    one = _shards(sizes.loader_files, num_workers=1, prefetch=0)
    one.expect_save(1)
    next(one)
    time.sleep(SETTLE_S * sizes.loader_files / 3000)  # the step goes on, and the worker has time
    weights = {f"w{number}": np.zeros(1000) for number in range(10)}
    target = _shards(sizes.loader_files)
    name = f"{sizes.loader_files} files of a loader, {1000 * LATENCY_S:g} ms a request"
    with_files: dict[str, Any] = {**weights, "loader": one}
    saves = [
        Contestant("reknit", "ours", lambda number: reknit.save(f"late://with-{number}", with_files)),
        Contestant("without", "limit", lambda number: reknit.save(f"late://without-{number}", weights)),
    ]
    load = Contestant("reknit", "ours", lambda _: reknit.load("late://with-0", {"loader": target}))
    repeat = min(sizes.repeat, 3)
    found = [in_turn(bench, Row(f"{name}: save", "s"), saves, repeat)]
    found.append(in_turn(bench, Row(f"{name}: load", "s"), [load], repeat))
    one.close()
    return found


def _shards(files: int, **more: Any) -> TokenLoader:
    """Return a loader whose token buffer has one item of each source."""
    length = SMALL_NBYTES // 4
    arguments = {"num_samples": 2 * files, "length": length}
    sets = [TokenSet(name="small", open=Repeated, arguments=arguments, num_partitions=files)]
    return TokenLoader(sets, token_budget=length, buffer_tokens=files * length, **more)
