"""One call in a fresh process, as a rank: ``call.py LIBRARY CALL FOLDER MIB``; the result is a line of JSON.

The state is a model of FSDP2; with one rank, a dict of tensors, and for Orbax and its pair of arrays of JAX.
The framework, with all that it imports for the state, is there before the clock starts (FSDP2 brings many of
the modules that DCP needs).  The import of the library is timed with its first call.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

TENSORS = 8
IDLE_S = 1.0


class OpenedFiles:
    """Counts the files that this process opens until it opens the first one in `folder`."""

    def __init__(self, folder: str) -> None:
        self.names: list[str] = []
        self._folder = os.path.join(folder, "")
        self._counting = True
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: Any) -> None:
        if self._counting and event == "open" and isinstance(arguments[0], str):
            self._counting = not arguments[0].startswith(self._folder)
            self.names.append(arguments[0])


def main(library: str, call: str, folder: str, mib: int) -> dict[str, Any]:
    """Make the state, and time the import of a library with its first call."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    together: Callable[[], object] = int
    if library.endswith("-jax") or library == "orbax":
        state = {"model": _arrays(mib)}
    elif library.endswith("-numpy"):
        state = {"model": _plain(mib)}
    else:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if world > 1 or library.startswith("dcp"):
            dist.init_process_group("gloo", rank=rank, world_size=world)
            together = dist.barrier
        state = {"model": _sharded(mib, world) if world > 1 else _tensors(mib)}
    known = library if library == "dcp-process" else library.partition("-")[0]
    act = _CALLS[known, call.removeprefix("count-")]
    if call == "prepared":
        import reknit

        reknit.prepare(folder, state)
    elif call == "resumed":
        import reknit

        run = reknit.Checkpointer(folder)
        act = partial(lambda step, _, state: run.save(step, state), run.resume(state))
    counted = OpenedFiles(folder) if call.startswith("count-") else None
    loaded = len(sys.modules)
    together()
    begin, cpu = time.perf_counter(), time.process_time()
    pending = act(folder, state)
    result: dict[str, Any] = {
        "s": time.perf_counter() - begin,
        "cpu_s": time.process_time() - cpu,
        "modules": len(sys.modules) - loaded,
        "own_modules": sum(name.partition(".")[0] == "reknit" for name in tuple(sys.modules)),
    }
    if counted is not None:
        result["opened"] = len(counted.names)
    if pending is not None:
        pending.result()
        if library == "reknit":
            result["agent"] = _agent()
    together()
    return result


def _plain(mib: int) -> dict[str, Any]:
    import numpy as np

    return {f"w{k}": np.full((mib << 20) // 4 // TENSORS, k, np.float32) for k in range(TENSORS)}


def _tensors(mib: int) -> dict[str, Any]:
    import torch

    return {f"w{k}": torch.full(((mib << 20) // 4 // TENSORS,), float(k)) for k in range(TENSORS)}


def _sharded(mib: int, world: int) -> dict[str, Any]:
    """Return the shards of this rank, `mib` MiB."""
    import torch
    from torch.distributed.fsdp import fully_shard

    numel = (mib << 20) // 4 // TENSORS
    module = torch.nn.ParameterDict({f"w{k}": torch.full((world, numel), float(k)) for k in range(TENSORS)})
    fully_shard(module)
    return dict(module.state_dict())


def _arrays(mib: int) -> dict[str, Any]:
    import jax.numpy as jnp

    return {f"w{k}": jnp.full(((mib << 20) // 4 // TENSORS,), float(k)) for k in range(TENSORS)}


def _agent() -> dict[str, float] | None:
    """Return the memory in MiB and the threads of this rank's agent while it has nothing to do."""
    import psutil

    time.sleep(IDLE_S)
    for child in psutil.Process().children():
        memory = child.memory_full_info()
        mib = 1 << 20
        return {
            "private_mib": round(memory.uss / mib, 1),
            "proportional_mib": round(memory.pss / mib, 1),
            "threads": child.num_threads(),
        }
    return None


# Each has the import that a user needs for the call.


def _reknit_import(folder: str, state: Any) -> None:
    import reknit  # noqa: F401


def _reknit_save(folder: str, state: Any) -> None:
    import reknit

    reknit.save(folder, state)


def _reknit_load(folder: str, state: Any) -> None:
    import reknit

    reknit.load(folder, state)


def _reknit_background(folder: str, state: Any) -> Any:
    import reknit

    return reknit.save(folder, state, wait=False)


def _dcp_import(folder: str, state: Any) -> None:
    import torch.distributed.checkpoint  # noqa: F401


def _dcp_save(folder: str, state: Any) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=folder)


def _dcp_load(folder: str, state: Any) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(state, checkpoint_id=folder)


def _dcp_background(folder: str, state: Any) -> Any:
    import torch.distributed.checkpoint as dcp

    return dcp.async_save(state, checkpoint_id=folder)


def _dcp_process(folder: str, state: Any) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    kind = AsyncCheckpointerType.PROCESS
    return dcp.async_save(state, checkpoint_id=folder, async_checkpointer_type=kind)


def _torch_save(folder: str, state: Any) -> None:
    import torch

    Path(folder).mkdir()
    with Path(folder, "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _torch_load(folder: str, state: Any) -> None:
    import torch

    for name, tensor in torch.load(Path(folder, "state.pt"))["model"].items():
        state["model"][name].copy_(tensor)


def _safetensors_save(folder: str, state: Any) -> None:
    from safetensors.torch import save_file

    Path(folder).mkdir()
    path = Path(folder, "state.safetensors")
    save_file(state["model"], path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _safetensors_load(folder: str, state: Any) -> None:
    from safetensors.torch import load_file

    for name, tensor in load_file(Path(folder, "state.safetensors")).items():
        state["model"][name].copy_(tensor)


def _orbax_save(folder: str, state: Any) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state)


def _orbax_load(folder: str, state: Any) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.restore(folder, state)


_CALLS: dict[tuple[str, str], Callable[[str, Any], Any]] = {
    ("reknit", "import"): _reknit_import,
    ("reknit", "save"): _reknit_save,
    ("reknit", "load"): _reknit_load,
    ("reknit", "background"): _reknit_background,
    ("reknit", "prepared"): _reknit_background,
    ("reknit", "resumed"): _reknit_background,
    ("dcp", "import"): _dcp_import,
    ("dcp", "save"): _dcp_save,
    ("dcp", "load"): _dcp_load,
    ("dcp", "background"): _dcp_background,
    ("dcp-process", "background"): _dcp_process,
    ("torch", "save"): _torch_save,
    ("torch", "load"): _torch_load,
    ("safetensors", "save"): _safetensors_save,
    ("safetensors", "load"): _safetensors_load,
    ("orbax", "save"): _orbax_save,
    ("orbax", "load"): _orbax_load,
}

if __name__ == "__main__":
    sys.stdout.flush()
    print(json.dumps(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))), flush=True)
    os._exit(0)  # without waiting for the threads of libraries that keep some
