"""One process of a JAX job that saves and loads with each contestant by turns; the result is a line of JSON.

The specification is JSON: `processes`, `rank`, `port`, `folder`, `mib`, `arrays`, `rounds` and `modes`.
`mesh` has the sizes of the axes data, fsdp and tensor in the save, `meshes` those of each load by name.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.orbax.contestants import Contestant, Mode

if TYPE_CHECKING:
    from collections.abc import Callable

AXES = ("data", "fsdp", "tensor")


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
        found: dict[str, Any] = {}
        state = self.arrays(self.spec["mesh"], 1)
        targets = {name: self.arrays(sizes, 2) for name, sizes in self.spec["meshes"].items()}
        modes = [Mode(**mode) for mode in self.spec["modes"]]
        contestants = {mode.name: Contestant(mode) for mode in modes}
        for number in range(self.spec["rounds"] + 1):
            for name, contestant in list(contestants.items()):
                try:
                    figures = self._round(contestant, f"{name}-{number}".replace(" ", "-"), state, targets)
                except Exception:  # a mode that this version of Orbax lacks is skipped in the open
                    found[name] = {"failed": traceback.format_exc()[-600:]}
                    del contestants[name]
                    continue
                if number:  # the first round imports modules and starts processes
                    for what, value in figures.items():
                        found.setdefault(name, {}).setdefault(what, []).append(value)
        for contestant in contestants.values():
            contestant.close()
        return found

    def _round(
        self, contestant: Contestant, name: str, state: dict[str, Any], targets: dict[str, Any]
    ) -> dict[str, Any]:
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
