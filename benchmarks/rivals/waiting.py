"""Libraries that save and load in one call: reknit, torch.save, safetensors, DCP, torch_checkpointing."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import reknit

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.table.rounds import Kind
    from benchmarks.timing import Bench

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
        """Return the kind of its loads, and of the computations of its saves."""
        return "ours" if self.name == "reknit" else "rival"

    @property
    def saves_as(self) -> Kind:
        """Return the kind of its saves: a save whose files a power cut may take promises less."""
        return self.loads_as if self.synced else "beside"


def ours(held: State | None = None, **options: Any) -> Way:
    """Return reknit; it saves and loads `held`, if given, in the place of the plain state of its rivals."""

    def load(path: str, state: State) -> None:
        reknit.load(path, held or state, options=reknit.LoadOptions(**options))

    return Way("reknit", lambda path, state: reknit.save(path, held or state, overwrite=True).result(), load)


def rivals(bench: Bench) -> list[Way]:
    """Return the rivals that can save this job: all for one rank, the rivals with shards for several."""
    two_files = DcpMode(files=2)
    safetensors = Way("DCP, safetensors files", two_files.save, two_files.load)
    sharded = [dcp(), safetensors, torch_checkpointing()]
    return sharded if bench.world > 1 else [_torch(), _safetensors(), *sharded]


def sync_all(path: str) -> None:
    """Sync a folder and all in it."""
    for each in [*map(str, Path(path).rglob("*")), path]:
        fd = os.open(each, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _torch() -> Way:
    def save(path: str, state: State) -> None:
        os.makedirs(path, exist_ok=True)
        torch.save(state, f"{path}/state.pt")
        sync_all(path)

    def load(path: str, state: State) -> None:
        _copied(torch.load(f"{path}/state.pt", mmap=False), state)

    return Way("torch.save + fsync", save, load)


def _safetensors() -> Way:
    def save(path: str, state: State) -> None:
        os.makedirs(path, exist_ok=True)
        save_file(_flat(state), f"{path}/state.safetensors")
        sync_all(path)

    def load(path: str, state: State) -> None:
        _copied(load_file(f"{path}/state.safetensors", backend="pread"), _flat(state))

    return Way("safetensors + fsync", save, load)


def dcp(threads: int = 2) -> Way:
    planner = checkpoint.DefaultSavePlanner(enable_plan_caching=True)

    def save(path: str, state: State) -> None:
        writer = checkpoint.FileSystemWriter(path, thread_count=threads, sync_files=True, overwrite=True)
        checkpoint.save(state, storage_writer=writer, planner=planner)

    return Way("DCP", save, lambda path, state: checkpoint.load(state, checkpoint_id=path))


def torch_checkpointing(*, synced: bool = False) -> Way:
    """Return torch_checkpointing, which never syncs, or with syncs after its saves.

    Its ranks load only files of the same rank.
    """
    name = f"torch_checkpointing{' + fsync' if synced else ', no fsync'}"
    try:
        manager = managed("SyncCheckpointSaverConfig")
    except ModuleNotFoundError:

        def absent(path: str, state: State) -> None:
            raise ModuleNotFoundError("not installed (pip install torch_checkpointing)")

        return Way(name, absent, absent)

    def save(path: str, state: State) -> None:
        manager.save(path, state)
        if synced:
            sync_all(path)

    return Way(name, save, lambda path, state: manager.load(path, into=state), synced)


def managed(saver: str, **settings: Any) -> Any:
    """Return the manager of torch_checkpointing.  Its direct I/O is off, because ext4 refuses its writes."""
    package = importlib.import_module("torch_checkpointing")
    config = importlib.import_module("torch_checkpointing.config")
    storage = importlib.import_module("torch_checkpointing.storage.filesystem")
    return package.CheckpointManager(
        package.CheckpointManager.Config(
            save=getattr(config, saver)(**settings),
            storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )


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


@dataclass(frozen=True)
class DcpMode:
    """A setting of torch DCP.

    Its own format has one option for reads: with `no_dist` each rank plans alone.  With `files` it stores
    each rank's tensors in so many safetensors files, and reads them with as many threads, since its reader
    has at most one thread per file.
    """

    files: int = 0
    no_dist: bool = False

    @property
    def name(self) -> str:
        if self.files:
            plural = "s" * (self.files > 1)
            return f"DCP, {self.files} safetensors file{plural} per rank, {self.files} thread{plural}"
        return "DCP, its own format" + (", ranks apart" if self.no_dist else "")

    @property
    def stored(self) -> str:
        """Return the name of the files: modes with the same name read the same files."""
        return f"dcp-{self.files}"

    def save(self, path: str, state: State, group: Any = None) -> None:
        planner = checkpoint.DefaultSavePlanner()
        writer: checkpoint.FileSystemWriter
        if self.files:
            number = {fqn: 1 + n % self.files for n, fqn in enumerate(sorted(_flat(state)))}
            writer = HuggingFaceStorageWriter(path, number, thread_count=2, save_distributed=True)
        else:
            writer = checkpoint.FileSystemWriter(path, thread_count=2)
        checkpoint.save(state, storage_writer=writer, planner=planner, process_group=group)

    def load(self, path: str, state: State, group: Any = None, planner: Any = None) -> None:
        reader: checkpoint.StorageReader
        if self.files:
            reader = HuggingFaceStorageReader(path, thread_count=self.files)
        else:
            reader = checkpoint.FileSystemReader(path)
        checkpoint.load(
            state, storage_reader=reader, planner=planner, process_group=group, no_dist=self.no_dist
        )


OWN = DcpMode()
APART = DcpMode(no_dist=True)
SAFETENSORS = tuple(DcpMode(files=files) for files in (1, 2, 4))
ALL_MODES = (OWN, APART, *SAFETENSORS)
QUICK_MODES = (OWN, DcpMode(files=2))


class PartPlanner(checkpoint.DefaultLoadPlanner):
    """Loads a part of each tensor, through DCP's planner interface.

    `low` has the starts of the parts; their sizes are those of the target tensors.
    """

    def __init__(self, low: tuple[int, ...]) -> None:
        super().__init__()
        self._low = low

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        requests = []
        for fqn, target in self.state_dict.items():
            part = ChunkStorageMetadata(torch.Size(self._low), target.size())
            saved: Any = self.metadata.state_dict_metadata[fqn]
            requests += create_read_items_for_chunk_list(fqn, saved, [part])
        return LoadPlan(requests)

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        found: torch.Tensor = self.state_dict[index.fqn]
        return found


NEW_TENSORS = "load_file, read, new tensors"


def safetensors_ways(path: str, model: State) -> dict[str, Callable[[], Any]]:
    """Return every way to load a model's tensors from one file: into new memory, or into the model's own.

    A mapped file is read only when it is copied, so it counts only with the copy into the model.
    """

    def into_model(backend: str) -> None:
        _copied(load_file(path, backend=backend), model)

    return {
        "load_file, mapped, copied into the model": lambda: into_model("mmap"),
        "load_file, read, copied into the model": lambda: into_model("pread"),
        NEW_TENSORS: lambda: load_file(path, backend="pread"),
    }
