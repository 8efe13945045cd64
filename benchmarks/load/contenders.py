"""Who else loads: every way of torch DCP that there is, and safetensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

State = dict[str, Any]


@dataclass(frozen=True)
class DcpMode:
    """A setting of torch DCP.

    Its own format has no knob for reading but whether the ranks agree first (`no_dist`: each plans alone).
    With `files` it stores each rank's tensors in so many safetensors files, and reads these with as many
    threads; its reader has one thread per file at most.
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
        """Name what is stored: modes of the same store read the same files."""
        return f"dcp-{self.files}"

    def save(self, path: str, state: State, group: Any = None) -> None:
        planner = DefaultSavePlanner()
        writer: FileSystemWriter
        if self.files:
            number = {fqn: 1 + n % self.files for n, fqn in enumerate(sorted(_names(state)))}
            writer = HuggingFaceStorageWriter(path, number, thread_count=2, save_distributed=True)
        else:
            writer = FileSystemWriter(path, thread_count=2)
        save(state, storage_writer=writer, planner=planner, process_group=group)

    def load(self, path: str, state: State, group: Any = None, planner: Any = None) -> None:
        reader = (
            HuggingFaceStorageReader(path, thread_count=self.files) if self.files else FileSystemReader(path)
        )
        load(state, storage_reader=reader, planner=planner, process_group=group, no_dist=self.no_dist)


OWN = DcpMode()
APART = DcpMode(no_dist=True)
SAFETENSORS = tuple(DcpMode(files=files) for files in (1, 2, 4))
ALL_MODES = (OWN, APART, *SAFETENSORS)
QUICK_MODES = (OWN, DcpMode(files=2))


def _names(state: State, above: str = "") -> list[str]:
    """Return the names that DCP gives to what is nested."""
    names = []
    for key, value in state.items():
        names += _names(value, f"{above}{key}.") if isinstance(value, dict) else [f"{above}{key}"]
    return names


class PartPlanner(DefaultLoadPlanner):
    """Loads a part of each tensor: the way that DCP's planner interface leaves for it.

    `low` is where the parts begin; their sizes are those of the tensors that are loaded into.
    """

    def __init__(self, low: tuple[int, ...]) -> None:
        super().__init__()
        self._low = low

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        requests = []
        for fqn, target in self.state_dict.items():
            part = ChunkStorageMetadata(torch_size(self._low), target.size())
            saved: Any = self.metadata.state_dict_metadata[fqn]
            requests += create_read_items_for_chunk_list(fqn, saved, [part])
        return LoadPlan(requests)

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        found: torch.Tensor = self.state_dict[index.fqn]
        return found


def torch_size(sizes: tuple[int, ...]) -> Any:
    import torch

    return torch.Size(sizes)


NEW_TENSORS = "load_file, read, new tensors"


def safetensors_ways(path: str, model: State) -> dict[str, Callable[[], Any]]:
    """Return every way to have a model's tensors from one file: in new memory, or in the model's own.

    Mapping a file into memory reads nothing yet, so that counts only with the copy into the model.
    """
    from safetensors.torch import load_file

    def into_model(backend: str) -> None:
        for name, tensor in load_file(path, backend=backend).items():
            model[name].copy_(tensor)

    return {
        "load_file, mapped, copied into the model": lambda: into_model("mmap"),
        "load_file, read, copied into the model": lambda: into_model("pread"),
        NEW_TENSORS: lambda: load_file(path, backend="pread"),
    }
