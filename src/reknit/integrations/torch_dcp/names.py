"""Which parts of a checkpoint are the entries of a state dict of torch's DCP?  Names, and nested states.

DCP flattens a state dict to entries such as ``optimizer.state.0.bias.exp_avg``, each with its path of keys.
In reknit, the first key of a path is the item, and the others are levels of its name.
"""

from __future__ import annotations

import io
from collections import UserDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from reknit.errors import StateError
from reknit.frameworks import tree
from reknit.frameworks.custom import Held, Value
from reknit.frameworks.torch import dtensor, mesh_places
from reknit.frameworks.torch.tensor import torch_dtype
from reknit.frameworks.walk.walk import World

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reknit.engine.loading.browse import Checkpoint
    from reknit.types.shard import TensorSpec

    Path = tuple[str | int, ...]

MODEL = "model"
"""The item of a state dict without levels, which is nearly always that of a model."""

STREAM = "~stream"
"""The key of the bytes of a stream, which a state dict of DCP may have as a value."""

_GROUPS, _STATES = "param_groups", "state"


class StateLevel(dict[Any, Any]):
    """A level of a nested state that the paths of entries make, as opposed to a dict that is an entry."""


class Numbered(UserDict[str, Any]):
    """The state dict of an optimizer that numbers its parameters: saved as it is, as it names none."""


def item_for(paths: Iterable[Path], given: str | None, *, tensors: bool) -> str | None:
    """Return the item of the entries without levels, or None if each of them is an item."""
    if given is not None:
        return given
    return MODEL if tensors and all(len(path) == 1 for path in paths) else None


def placed(path: Path, item: str | None) -> Path:
    """Return the path of an entry in the state of reknit, whose first key is an item."""
    return path if item is None or len(path) > 1 else (item, *path)


def nested(values: Mapping[str, Any], paths: Mapping[str, Path], item: str | None) -> dict[str, Any]:
    """Return the state of reknit that has these entries.  Raises `StateError` if two have one place."""
    state = StateLevel()
    for name, value in values.items():
        *above, last = placed(paths.get(name, (name,)), item)
        at: Any = state
        for key in above:
            at = at.setdefault(key, StateLevel()) if isinstance(at, StateLevel) else None
        if not isinstance(at, StateLevel) or last in at:
            raise StateError(f"the state dict has two entries at {name!r}", remedy="rename one of them")
        at[last] = encoded(STREAM, value) if isinstance(value, io.BytesIO) else value
    return {key: _settled(value) for key, value in state.items()}


def _settled(value: Any) -> Any:
    """Return a level as the list or dict that it was, and a state dict of an optimizer in its own form."""
    if not isinstance(value, StateLevel):
        return value
    inner = {key: _settled(one) for key, one in value.items()}
    if inner and list(inner) == list(range(len(inner))):
        return list(inner.values())
    groups = inner.get(_GROUPS)
    if not (inner.keys() <= {_GROUPS, _STATES} and isinstance(groups, list)):
        return inner
    named = [name for group in groups if isinstance(group, dict) for name in group.get("params") or ()]
    if not all(isinstance(name, str) for name in named):
        return Numbered(inner)
    return {_STATES: {}, **inner}  # an optimizer without states is one, too


def found(state: Any, path: Path) -> Any:
    """Return the value at a path of a nested state, in the type that was saved."""
    for key in path:
        state = state[key]
    return live(state)


def live(value: Any) -> Any:
    """Return a loaded value in the type that was saved."""
    return io.BytesIO(value[STREAM]) if isinstance(value, dict) and value.keys() == {STREAM} else value


def put(state: Any, path: Path, value: Any) -> None:
    """Put a value into a state dict of a user.  DCP has numbers that are keys as texts in its paths."""
    *above, last = (key for key in path)
    for key in above:
        state = state[_key(state, key)]
    state[_key(state, last)] = value


def _key(container: Any, key: str | int) -> Any:
    if isinstance(container, dict) and key not in container and str(key).isdecimal():
        return int(key) if int(key) in container else key
    return key


class Entry(NamedTuple):
    """An entry of a checkpoint, by its name in DCP: its place, and the spec of a tensor."""

    path: Path
    spec: TensorSpec | None
    item: str
    fqn: str


class EntryNames(dict[str, Any]):
    """The metadata of the entries by name.  It also has names that only the load can decide about.

    These are values around tensors, options of an optimizer, which reknit stores by parameter, and values
    that differed between ranks.
    """

    def __init__(self, entries: Mapping[str, Entry], checkpoint: Checkpoint) -> None:
        super().__init__({name: _metadata(entry.spec) for name, entry in entries.items()})
        self._around: set[str] = set()
        self._below: tuple[str, ...] = ()
        for entry in entries.values():
            for number in range(1, len(entry.path)):
                self._around.add(dotted(entry.path[:number]))
            if _GROUPS in entry.path[:-1]:
                above = entry.path[: entry.path.index(_GROUPS)]
                self._below += tuple(f"{dotted((*above, part))}." for part in (_GROUPS, _STATES))
        manifest = checkpoint.manifest
        own = {file.item for file in manifest.blobs if file.coordinate}
        for item in checkpoint.items if manifest.table is not None else own:
            self._around.add(item)
            self._below += (f"{item}.",)
        self._below = tuple(dict.fromkeys(self._below))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._around or str(name).startswith(self._below or "\0")

    def __missing__(self, name: str) -> BytesStorageMetadata:
        if name in self:
            return BytesStorageMetadata()
        raise KeyError(name)


def entries_of(checkpoint: Checkpoint, item: str | None) -> dict[str, Entry]:
    """Return the entries of a checkpoint by their names in DCP; those of `item` are without its name."""
    entries: dict[str, Entry] = {}
    for held in checkpoint.items:
        specs: dict[str, TensorSpec | None] = dict(checkpoint.tensors[held])
        values = {fqn: None for fqn, value in checkpoint.values[held].items() if value != {}}
        for fqn, spec in {**values, **specs}.items():
            path: Path = (held, *_keys(fqn))
            if held == item and len(path) == 2:
                path = path[1:]
            entries.setdefault(dotted(path), Entry(path, spec, held, fqn))
    return entries


def metadata_of(checkpoint: Checkpoint, entries: Mapping[str, Entry]) -> Metadata:
    """Return the metadata of a checkpoint as DCP's planners take it: each tensor as one chunk."""
    paths = {name: entry.path for name, entry in entries.items()}
    return Metadata(EntryNames(entries, checkpoint), planner_data=paths)


def dotted(path: Path) -> str:
    """Return the name of an entry in DCP."""
    return ".".join(map(str, path))


def _keys(fqn: str) -> list[str | int]:
    parts = fqn.split("/") if fqn else []
    return [tree.unescape(part) for part in parts if part != tree.SKELETON]


def _metadata(spec: TensorSpec | None) -> Any:
    if spec is None:
        return BytesStorageMetadata()
    shape = torch.Size(spec.shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return TensorStorageMetadata(TensorProperties(torch_dtype(spec.dtype)), shape, [whole])


@dataclass(eq=False)
class PlannedPieces:
    """Boxes of one tensor, or one value, as an item of a plan of DCP names them.

    `refused` is the error for a tensor whose boxes in the plan are wrong; the walk raises it for all ranks.
    """

    held: list[Held | Value] = field(default_factory=list)
    refused: StateError | None = None

    def add(self, shape: Sequence[int], offsets: Sequence[int], memory: torch.Tensor) -> None:
        """Add a box, with its memory."""
        dtype = str(memory.dtype).removeprefix("torch.")
        self.held.append(Held("", tuple(shape), dtype, tuple(offsets), tuple(memory.shape), memory))


def misplaced(planner: Any, name: str) -> StateError | None:
    """Return the error for a tensor whose boxes in the plans of DCP are those of other ranks, or None.

    DCP takes them from the coordinate in the mesh, and torch cuts by the place in the process group.
    """
    tensor: Any = getattr(planner, "state_dict", {}).get(name)
    if not dtensor.is_dtensor(tensor) or tensor.device_mesh.get_coordinate() is None:
        return None
    on_mesh = mesh_places.on_mesh(tensor.device_mesh, World(0, 1, (0,)))
    if not any(on_mesh.place[dim] != on_mesh.coordinate[dim] for dim in dtensor.cutting(tensor.placements)):
        return None
    return StateError(
        f"{name} is a DTensor on a mesh whose ranks do not ascend, for which the plans of DCP have the boxes "
        "of other ranks",
        remedy=f"leave out the planner, or {mesh_places.ORDER_REMEDY}",
    )


def encoded(key: str, stream: io.BytesIO) -> PlannedPieces:
    """Return the bytes of a stream as one value."""
    return PlannedPieces([Value("", {key: stream.getvalue()})])


class PieceFramework:
    """The adapter of `PlannedPieces`."""

    def matches(self, value: Any) -> bool:
        """Return whether this is `PlannedPieces`."""
        return isinstance(value, PlannedPieces)

    def holdings(self, value: Any, rank: int, size: int) -> Iterable[Held | Value]:
        """Return the boxes and values."""
        if value.refused is not None:
            raise value.refused
        held: list[Held | Value] = value.held
        return held

    def restore(self, value: Any, held: Sequence[Held], values: Mapping[str, Any]) -> None:
        """Do nothing: the memory is the target's own."""
