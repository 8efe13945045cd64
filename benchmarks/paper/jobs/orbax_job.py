"""A JAX job on the CPU whose processes save and load with reknit and Orbax by turns, with the same calls.

`run` starts the processes.  Each gets its specification as JSON, and its result is a line of JSON.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.ranks import free_port
from benchmarks.turns import in_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Arrays = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 240.0
AXES = ("data", "fsdp", "tensor")


class Mode(NamedTuple):
    """A contestant: reknit (`share`: reads are shared), or Orbax with these options.

    `chunk_nbytes` cuts shards into smaller chunks when they are saved.  `broadcast` reads one replica only.
    """

    name: str
    reknit: bool = False
    share: str = "auto"
    ocdbt: bool = True
    replica_parallel: bool = True
    chunk_nbytes: int | None = None
    broadcast: bool = False


class Contestant:
    """One mode; `save` returns when training may go on; its result, a function, waits for the end."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self._orbax = None if mode.reknit else _orbax(mode)

    def save(self, path: str, arrays: Arrays) -> Callable[[], object]:
        """Begin to save."""
        if self._orbax is None:
            import reknit

            return reknit.save(path, {"model": arrays}, wait=False).result
        import jax
        import orbax.checkpoint as ocp

        chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=self.mode.chunk_nbytes), arrays)
        self._orbax.save(path, args=ocp.args.PyTreeSave(arrays, save_args=chunks))
        waiting: Callable[[], object] = self._orbax.wait_until_finished
        return waiting

    def load(self, path: str, arrays: Arrays) -> Arrays:
        """Return the saved arrays in the shardings of `arrays`."""
        import jax

        if self._orbax is None:
            import reknit

            options = reknit.LoadOptions(share=self.mode.share)  # type: ignore[arg-type]
            state = {"model": dict(arrays)}
            reknit.load(path, state, options=options)
            loaded: Arrays = state["model"]
        else:
            import orbax.checkpoint as ocp

            kind = (
                ocp.type_handlers.SingleReplicaArrayRestoreArgs
                if self.mode.broadcast
                else ocp.ArrayRestoreArgs
            )
            restored = {
                name: kind(sharding=each.sharding, global_shape=each.shape, dtype=each.dtype)
                for name, each in arrays.items()
            }
            loaded = self._orbax.restore(
                path, args=ocp.args.PyTreeRestore(item=arrays, restore_args=restored)
            )
        jax.block_until_ready(loaded)
        return loaded

    def close(self) -> None:
        """End its threads and processes."""
        if self._orbax is None:
            import reknit

            reknit.close()
        else:
            self._orbax.close()


def _orbax(mode: Mode) -> Any:
    import jax
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers

    if mode.broadcast:
        handler: Any = type_handlers.SingleReplicaArrayHandler(use_replica_parallel=mode.replica_parallel)
    else:
        handler = type_handlers.ArrayHandler(use_replica_parallel=mode.replica_parallel)
    registry = type_handlers.create_type_handler_registry((jax.Array, handler))
    return ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=mode.ocdbt, type_handler_registry=registry)
    )


def run(
    folder: str,
    modes: Sequence[Mode],
    *,
    mib: int,
    arrays: int,
    mesh: Sequence[int],
    meshes: Mapping[str, Sequence[int]],
    rounds: int,
    processes: int = 1,
) -> dict[str, Any]:
    """Return, by contestant and quantity, the figures of each round: the sum or the most of all processes.

    The sizes of a mesh are those of the axes data, fsdp and tensor; its devices are spread over processes.
    """
    folder = os.path.abspath(folder)  # Orbax takes no other paths
    os.makedirs(folder, exist_ok=True)
    devices = max(mesh[0] * mesh[1] * mesh[2], *(a * b * c for a, b, c in meshes.values())) // processes
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    port = free_port()
    spec = {
        "processes": processes,
        "port": port,
        "folder": folder,
        "mib": mib,
        "arrays": arrays,
        "mesh": list(mesh),
        "meshes": {name: list(sizes) for name, sizes in meshes.items()},
        "rounds": rounds,
        "modes": [mode._asdict() for mode in modes],
    }
    with tempfile.TemporaryFile() as log:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.paper.jobs.orbax_job", json.dumps(spec | {"rank": rank})],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            for rank in range(processes)
        ]
        try:
            answers = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        if any(process.returncode for process in started):
            log.seek(0)
            reported = log.read()[-4000:].decode(errors="replace")
            raise RuntimeError(f"the JAX job of {processes} processes failed:\n{reported}")
    return together([json.loads(answer.splitlines()[-1]) for answer in answers])


def together(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the job from those of its processes."""
    found: dict[str, Any] = {}
    for name in answers[0]:
        each = [answer[name] for answer in answers]
        failed = [one["failed"] for one in each if "failed" in one]
        if failed:
            found[name] = {"failed": failed[0]}
            continue
        found[name] = {
            what: [(sum if what.startswith("sum_") else max)(of) for of in zip(*rounds, strict=True)]
            for what in each[0]
            if (rounds := [one[what] for one in each])
        }
    return found


class Worker:
    """A process of the job."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import jax

        if spec["processes"] > 1:
            jax.distributed.initialize(f"127.0.0.1:{spec['port']}", spec["processes"], spec["rank"])
        self.spec, self.rank = spec, spec["rank"]
        self.together: Callable[[str], object] = lambda _: None
        if spec["processes"] > 1:
            from jax.experimental import multihost_utils

            self.together = multihost_utils.sync_global_devices

    def arrays(self, mesh_sizes: list[int], seed: int) -> dict[str, Any]:
        """Return the state: matrices cut by rows over `fsdp` and by columns over `tensor`."""
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        count = int(np.prod(mesh_sizes))
        mesh = Mesh(np.array(jax.devices()[:count]).reshape(mesh_sizes), AXES)
        cut = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
        rows = (self.spec["mib"] << 20) // 4 // self.spec["arrays"] // 1024
        random = np.random.default_rng(seed)
        # Random numbers, since Orbax compresses its files.
        wholes = [random.integers(0, 1 << 31, (rows, 1024), np.int32) for _ in range(self.spec["arrays"])]

        def made(whole: Any) -> Any:
            return jax.make_array_from_callback(whole.shape, cut, lambda where: whole[where])

        return {f"w{number:03d}": made(whole) for number, whole in enumerate(wholes)}

    def measure(self) -> dict[str, Any]:
        """Return, by contestant, figures of each round: the seconds of all calls, and the bytes of loads."""
        state = self.arrays(self.spec["mesh"], 1)
        targets = {name: self.arrays(sizes, 2) for name, sizes in self.spec["meshes"].items()}
        contestants = [Contestant(Mode(**mode)) for mode in self.spec["modes"]]
        ways = {each.mode.name: partial(self._round, each, state, targets) for each in contestants}
        # The first round imports modules and starts processes.  A mode that this Orbax lacks is skipped.
        taken = in_turn(ways, self.spec["rounds"])
        for each in contestants:
            if each.mode.name not in taken.failed:
                each.close()
        return taken.figures | {who: {"failed": why} for who, why in taken.failed.items()}

    def _round(
        self, contestant: Contestant, state: dict[str, Any], targets: dict[str, Any], number: int
    ) -> dict[str, Any]:
        name = f"{contestant.mode.name}-{number}".replace(" ", "-")
        path = f"{self.spec['folder']}/{name}"
        os.sync()
        self.together(f"{name} save")
        begin, wrote = time.perf_counter(), _io()["wchar"]
        wait = contestant.save(path, state)
        blocked = time.perf_counter()
        report = wait()
        figures: dict[str, Any] = {
            "blocking_s": blocked - begin,
            "background_s": time.perf_counter() - blocked,
            "save_s": time.perf_counter() - begin,
        }
        # A save of reknit in the background is written by another process, which reports its bytes.
        figures["most_wrote_nbytes"] = getattr(report, "nbytes", _io()["wchar"] - wrote)
        self.together(f"{name} saved")
        files = [file for file in Path(path).rglob("*") if file.is_file()]
        figures |= {"files": len(files), "nbytes": sum(file.stat().st_size for file in files)}
        for layout, target in targets.items():
            self.together(f"{name} load {layout}")
            begin, read = time.perf_counter(), _io()["rchar"]
            loaded = contestant.load(path, target)
            figures[f"load_s {layout}"] = time.perf_counter() - begin
            figures[f"sum_read_nbytes {layout}"] = _io()["rchar"] - read
            _require_equal(state, loaded)
        self.together(f"{name} loaded")
        if self.rank == 0:
            shutil.rmtree(path)
        return figures


def _require_equal(saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Compare the elements that this process has of both."""
    import numpy as np

    for name in (min(saved), max(saved)):
        whole = _local(saved[name])
        for shard in loaded[name].addressable_shards:
            part = whole[shard.index]
            known = part >= 0
            assert np.array_equal(part[known], np.asarray(shard.data)[known]), name


def _local(array: Any) -> Any:
    """Return the array as far as this process has it, and -1 elsewhere."""
    import numpy as np

    whole = np.full(array.shape, -1, array.dtype)
    for shard in array.addressable_shards:
        whole[shard.index] = np.asarray(shard.data)
    return whole


def _io() -> dict[str, int]:
    """Return the bytes that this process has read and written by system calls so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def main() -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints, too, and not through Python
    result = Worker(json.loads(sys.argv[1])).measure()
    print(json.dumps(result), file=answers, flush=True)
    os._exit(0)  # without waiting for the threads of libraries that keep some


if __name__ == "__main__":
    main()
