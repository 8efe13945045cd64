"""JAX on the CPU: a large state over eight devices, and many small arrays, beside Orbax."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import os
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.table.first import proportional
from benchmarks.table.rounds import Row, taken_row
from benchmarks.timing import PeakMemory
from benchmarks.turns import in_turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.table.sizes import Sizes
    from benchmarks.timing import Bench

    Arrays = dict[str, Any]
    Save = Callable[[str, Arrays], Callable[[], object]]
    """Begins a save in the background, and returns the function that waits for its end."""

DEVICES = 8
EAGER, LAZY, ORBAX = "reknit", "reknit, lazy", "Orbax"
ROWS = (
    ("waits", "save that waits", EAGER),
    ("blocked", "blocked", EAGER),
    ("blocked", 'blocked, stage="lazy"', LAZY),
    ("whole", "save in the background, end to end", EAGER),
    ("load", "load", EAGER),
    ("reshard", "load into another layout", EAGER),
)
"""The figure, the row's name, and our contestant of each row."""


def rows(bench: Bench, sizes: Sizes) -> list[Row]:
    """Measure saves, with new arrays for each, and loads into the same layout and into another one."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
    os.makedirs(bench.folder, exist_ok=True)
    contestants = _contestants()
    large = f"JAX, {sizes.jax_mb} MB over {DEVICES} devices"
    memory = Row(f"{large}: memory of a save / bytes", "x")
    state = _large(sizes.jax_mb)
    for name in (EAGER, ORBAX):  # before anything else, since agents and their memory stay
        memory.add(name, "ours" if name == EAGER else "rival", _memory(bench, contestants[name].save, state))
    found = [memory, *_measured(bench, contestants, state, large, sizes.repeat)]
    found += _measured(
        bench, contestants, _small(sizes.leaves), f"JAX, {sizes.leaves:,} small leaves", sizes.repeat
    )
    bench.drop(bench.folder)
    return found


def _large(mb: int) -> Arrays:
    import jax
    import numpy as np

    random, cut = np.random.default_rng(0), _sharding("x")  # random, since Orbax compresses its files
    number = max(mb // 4, 1)
    return {
        f"w{k:03d}": jax.device_put(
            random.integers(0, 1 << 31, (1024, 1024 * mb // number // 4), np.int32), cut
        )
        for k in range(number)
    }


def _small(leaves: int) -> Arrays:
    import jax.numpy as jnp
    import numpy as np

    random = np.random.default_rng(0)
    return {f"w{k:04d}": jnp.asarray(random.standard_normal((16, 16), np.float32)) for k in range(leaves)}


def _sharding(*axes: str | None) -> Any:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    return NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec(*axes))


class Way(NamedTuple):
    """A save in the background, a load, and a save that waits."""

    save: Save
    load: Callable[[str, Arrays], Arrays]
    wait: Callable[[str, Arrays], object] | None


def _contestants() -> dict[str, Way]:
    import orbax.checkpoint as ocp

    import reknit

    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

    def ours(stage: Any, path: str, arrays: Arrays) -> Callable[[], object]:
        options = reknit.SaveOptions(stage=stage)
        return reknit.save(path, {"model": arrays}, wait=False, options=options).result

    def our_load(path: str, arrays: Arrays) -> Arrays:
        state = {"model": dict(arrays)}
        reknit.load(path, state)
        return state["model"]

    def theirs(path: str, arrays: Arrays) -> Callable[[], object]:
        checkpointer.save(path, args=ocp.args.PyTreeSave(arrays))
        waiting: Callable[[], object] = checkpointer.wait_until_finished
        return waiting

    def their_load(path: str, arrays: Arrays) -> Arrays:
        how = {
            name: ocp.ArrayRestoreArgs(sharding=each.sharding, global_shape=each.shape, dtype=each.dtype)
            for name, each in arrays.items()
        }
        loaded: Arrays = checkpointer.restore(
            path, args=ocp.args.PyTreeRestore(item=arrays, restore_args=how)
        )
        return loaded

    eager, lazy = partial(ours, "eager"), partial(ours, "lazy")
    return {
        EAGER: Way(eager, our_load, lambda path, arrays: reknit.save(path, {"model": arrays})),
        LAZY: Way(lazy, our_load, None),
        ORBAX: Way(theirs, their_load, lambda path, arrays: theirs(path, arrays)()),
    }


def _measured(bench: Bench, contestants: dict[str, Way], state: Arrays, what: str, repeat: int) -> list[Row]:
    ways = {name: partial(_round, bench, way, [state]) for name, way in contestants.items()}
    taken = in_turn(ways, repeat, bench=bench)
    found = []
    for quantity, name, ours in ROWS:
        row = taken_row(Row(f"{what}: {name}", "s"), taken, quantity, (ours,))
        found += [row] if row.figures else []
    return found


def _round(bench: Bench, way: Way, held: list[Arrays], number: int) -> dict[str, float]:
    """Return the seconds of each call; `held` has the state, which a step of training replaces."""
    import jax

    path = os.path.abspath(f"{bench.folder}/saved")
    figures = {}
    state = held[0] = jax.block_until_ready(jax.jit(_stepped)(held[0]))
    bench.settle()
    begin = time.perf_counter()
    wait = way.save(path, state)
    figures["blocked"] = time.perf_counter() - begin
    wait()
    figures["whole"] = time.perf_counter() - begin
    target = dict(state)
    begin = time.perf_counter()
    jax.block_until_ready(way.load(path, target))
    figures["load"] = time.perf_counter() - begin
    if len(next(iter(state.values())).devices()) > 1:
        across = jax.device_put(state, _sharding(None, "x"))
        begin = time.perf_counter()
        loaded = jax.block_until_ready(way.load(path, across))
        figures["reshard"] = time.perf_counter() - begin
        assert all(bool((loaded[name] == each).all()) for name, each in list(across.items())[:1])
    shutil.rmtree(path)
    if way.wait is not None:
        begin = time.perf_counter()
        way.wait(path, state)
        figures["waits"] = time.perf_counter() - begin
        shutil.rmtree(path)
    return figures


def _stepped(arrays: Arrays) -> Arrays:
    return {name: each + 1 for name, each in arrays.items()}


def _memory(bench: Bench, save: Save, state: Arrays) -> float:
    """Return the most memory of three saves, over the bytes of the state."""
    path = os.path.abspath(f"{bench.folder}/saved")
    memory = PeakMemory(proportional, 0.05)
    with memory:
        for _ in range(3):
            save(path, state)()
            shutil.rmtree(path)
    nbytes: int = sum(each.nbytes for each in state.values())
    return memory.extra[0] / nbytes
