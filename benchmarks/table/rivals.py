"""Who else saves and loads in one call: torch.save, safetensors, torch DCP, torch_checkpointing, a disk."""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.load.measure import PIECE

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.load.measure import LoadBench
    from benchmarks.table.rounds import Kind

State = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A way to save a state to a path and to load it again, on all ranks together."""

    name: str
    save: Callable[[str, State], Any]
    load: Callable[[str, State], Any]
    synced: bool = True

    @property
    def loads_as(self) -> Kind:
        """Return how its loads, and what its saves compute, are compared."""
        return "ours" if self.name == "reknit" else "rival"

    @property
    def saves_as(self) -> Kind:
        """Return how its saves are compared: one whose files a power cut may take promises less."""
        return self.loads_as if self.synced else "beside"


def ours(held: State | None = None, **options: Any) -> Way:
    """Return reknit; with `held` it saves and loads that, in the place of the plain state of its rivals."""
    import reknit

    def load(path: str, state: State) -> None:
        reknit.load(path, held or state, options=reknit.LoadOptions(**options))

    return Way("reknit", lambda path, state: reknit.save(path, held or state, overwrite=True).result(), load)


def rivals(bench: LoadBench) -> list[Way]:
    """Return those who can save this job: all for one rank, those that know of shards for several."""
    sharded = [dcp(), _dcp_safetensors(), _torch_checkpointing()]
    return sharded if bench.world > 1 else [_torch(), _safetensors(), *sharded]


def synced(path: str) -> None:
    """Sync a folder and its files."""
    for each in [*map(str, Path(path).iterdir()), path]:
        fd = os.open(each, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _torch() -> Way:
    import torch

    def save(path: str, state: State) -> None:
        os.makedirs(path, exist_ok=True)
        torch.save(state, f"{path}/state.pt")
        synced(path)

    def load(path: str, state: State) -> None:
        _copied(torch.load(f"{path}/state.pt", mmap=False), state)

    return Way("torch.save + fsync", save, load)


def _safetensors() -> Way:
    from safetensors.torch import load_file, save_file

    def save(path: str, state: State) -> None:
        os.makedirs(path, exist_ok=True)
        save_file(_flat(state), f"{path}/state.safetensors")
        synced(path)

    def load(path: str, state: State) -> None:
        _copied(load_file(f"{path}/state.safetensors", backend="pread"), _flat(state))

    return Way("safetensors + fsync", save, load)


def dcp() -> Way:
    from torch.distributed import checkpoint

    planner = checkpoint.DefaultSavePlanner(enable_plan_caching=True)

    def save(path: str, state: State) -> None:
        writer = checkpoint.FileSystemWriter(path, thread_count=2, sync_files=True, overwrite=True)
        checkpoint.save(state, storage_writer=writer, planner=planner)

    return Way("DCP", save, lambda path, state: checkpoint.load(state, checkpoint_id=path))


def _dcp_safetensors() -> Way:
    from benchmarks.load.contenders import DcpMode

    mode = DcpMode(files=2)
    return Way("DCP, safetensors files", mode.save, mode.load)


def _torch_checkpointing() -> Way:
    """Return torch_checkpointing, which never syncs, and whose ranks load just what the same rank saved."""
    name = "torch_checkpointing, no fsync"
    try:
        package = importlib.import_module("torch_checkpointing")
    except ModuleNotFoundError:

        def absent(path: str, state: State) -> None:
            raise ModuleNotFoundError("not installed (pip install torch_checkpointing)")

        return Way(name, absent, absent)
    config = importlib.import_module("torch_checkpointing.config")
    storage = importlib.import_module("torch_checkpointing.storage.filesystem")
    manager = package.CheckpointManager(
        package.CheckpointManager.Config(
            save=config.SyncCheckpointSaverConfig(),
            storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )
    return Way(name, manager.save, lambda path, state: manager.load(path, into=state), False)


def _flat(state: State, above: str = "") -> State:
    flat: State = {}
    for key, value in state.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return flat


def _copied(loaded: State, into: State) -> None:
    for key, value in into.items():
        if isinstance(value, dict):
            _copied(loaded[key], value)
        else:
            value.copy_(loaded[key])


def raw_write(path: str, data: memoryview, *, direct: bool) -> None:
    """Write and sync a new file, with two threads."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0), 0o644)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda k: os.pwrite(fd, data[k : k + PIECE], k), range(0, len(data), PIECE)))
        os.fsync(fd)
    finally:
        os.close(fd)
