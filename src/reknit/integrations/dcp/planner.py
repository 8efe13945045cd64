"""State dicts of torch's DCP as parts of a checkpoint, and the planners' storage writer and reader.

DCP flattens a state dict to entries such as ``optimizer.state.0.bias.exp_avg``, each with its path of keys.
In reknit, the first key of a path is the item, and the others are levels of its name.
"""

from __future__ import annotations

import io
import os
import re
from collections import UserDict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.futures import Future

import reknit
from reknit.errors import MismatchError, StateError, UsageError
from reknit.frameworks.torch import dtensor
from reknit.frameworks.torch import dtensor as mesh_places
from reknit.locations import location_text
from reknit.options import LoadOptions
from reknit.plugins.framework import Held, Value, World, from_neutral, registered, torch_dtype, tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from os import PathLike

    from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan

    from reknit import Checkpoint, PendingSave
    from reknit.options import SaveOptions
    from reknit.plugins.framework import TensorSpec
    from reknit.plugins.trainer import AnyGroup

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


ITEM = "dcp"
"""The entry of a checkpoint's metadata that names the item of the entries without levels."""

RAW = "~bytes"
"""The key of bytes that a planner of the user made of an entry."""

PLANS = ("create_local_plan", "create_global_plan", "finish_plan")
_LOAD_HOOKS = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor", "load_bytes")


class DcpReader(StorageReader):
    """The storage reader for `dcp.load`: any checkpoint of reknit, of any layout and number of ranks.

    A name of DCP is the item and the name in it, with dots: ``model.layers.0.weight``.  With `item` the names
    of that item are without it, as in ``model.state_dict()``; by default that is the item of a `Writer`.
    Tensors are converted to the dtype of the target.  The other arguments are those of `reknit.load`.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        item: str | None = None,
        options: LoadOptions | None = None,
        group: AnyGroup | None = None,
    ) -> None:
        self.checkpoint_id, self._given, self._group = path, item, group
        self._options = LoadOptions(cast=True) if options is None else options
        self._item: str | None = None
        self._entries: dict[str, Entry] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Return whether this is a path or a URL."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Take the path of the next checkpoint."""
        self.checkpoint_id = self.checkpoint_id if checkpoint_id is None else checkpoint_id

    def read_metadata(self) -> Metadata:
        """Return the names and specs of the checkpoint."""
        with reknit.open(self._path()) as checkpoint:
            own = checkpoint.metadata.get(ITEM)
            self._item = (own or {}).get("item") if self._given is None else self._given
            self._entries = entries_of(checkpoint, self._item)
            return metadata_of(checkpoint, self._entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: `read_metadata` comes first."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is: reknit makes its own."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Record in each plan the number of ranks, and whether any of them reads a tensor."""
        reads = [read for plan in plans for read in plan.items]
        any_tensor = any(read.type == LoadItemType.TENSOR or not self._is_value(read) for read in reads)
        return [replace(plan, storage_data=(len(plans), any_tensor)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        """Load the entries of the plan together with the other ranks."""
        num_ranks, any_tensor = plan.storage_data or (None, True)
        group = group_of(self._group, num_ranks)
        if overrides(planner, DefaultLoadPlanner, (*PLANS, *_LOAD_HOOKS)) or not any_tensor:
            self._load_pieces(plan, planner, group, any_tensor=any_tensor)
        else:
            self._load_state(plan, planner, group)
        return done(None)

    def _load_state(self, plan: LoadPlan, planner: Any, group: AnyGroup | None) -> None:
        """Fill the state dict of DCP's own planner as reknit fills a state."""
        known, paths = planner.metadata.state_dict_metadata, planner.mappings
        values = {
            name: "" if isinstance(value, BytesStorageMetadata | io.BytesIO) else value
            for name, value in planner.state_dict.items()
            if name in known
        }
        state = nested(values, paths, self._item)
        self._load(state, group)
        for read in plan.items:
            if read.type == LoadItemType.BYTE_IO:
                path = paths.get(read.dest_index.fqn, (read.dest_index.fqn,))
                value = found(state, placed(path, self._item))
                if isinstance(value, dict) and RAW in value:
                    raise self._foreign(read.dest_index.fqn)
                put(planner.original_state_dict, path, value)

    def _load_pieces(self, plan: LoadPlan, planner: Any, group: AnyGroup | None, *, any_tensor: bool) -> None:
        """Give a planner the entries that its plan names."""
        pieces: dict[str, PlannedPieces] = {}
        filled: list[tuple[Any, torch.Tensor]] = []
        for read in plan.items:
            if read.type == LoadItemType.BYTE_IO:
                continue
            name = read.storage_index.fqn
            spec = self._entries[name].spec
            if (refused := misplaced(planner, read.dest_index.fqn)) is not None:
                pieces[name] = PlannedPieces(refused=refused)
                continue
            target = planner.resolve_tensor(read).detach()
            if spec is not None:
                pieces.setdefault(name, PlannedPieces()).add(spec.shape, read.storage_offsets, target)
            filled.append((read, target))
        if any_tensor:
            paths = {name: entry.path for name, entry in self._entries.items()}
            with registered(PieceFramework()):
                self._load(nested(pieces, paths, self._item), group)
        for read, target in filled:
            planner.commit_tensor(read, target)
        self._give_values(plan, planner)

    def _give_values(self, plan: LoadPlan, planner: Any) -> None:
        """Give a planner the values of its plan as bytes, which it decodes."""
        reads = [read for read in plan.items if read.type == LoadItemType.BYTE_IO]
        if not reads:
            return
        own_bytes = bool(overrides(planner, DefaultLoadPlanner, ("load_bytes",)))
        with reknit.open(self._path()) as checkpoint:
            for read in reads:
                name = read.storage_index.fqn
                entry = self._entries.get(name)
                if entry is None or entry.fqn not in checkpoint.values[entry.item]:
                    raise MismatchError(
                        f"{name} is not one value in the checkpoint",
                        path=location_text(self._path()),
                        remedy="load it with DCP's own planner, together with the tensors beside it",
                    )
                value = live(from_neutral(checkpoint.values[entry.item][entry.fqn]))
                if isinstance(value, dict) and RAW in value:
                    if not own_bytes:
                        raise self._foreign(name)
                    planner.load_bytes(read, io.BytesIO(value[RAW]))
                    continue
                buffer = io.BytesIO()  # in memory only: no checkpoint has pickled bytes of it
                torch.save(value, buffer)
                buffer.seek(0)
                planner.load_bytes(read, buffer)

    def _is_value(self, read: ReadItem) -> bool:
        """Return whether the checkpoint has this entry as one value, without tensors in it."""
        entry = self._entries.get(read.storage_index.fqn)
        return entry is not None and entry.spec is None

    def _load(self, state: dict[str, Any], group: AnyGroup | None) -> None:
        """Load all entries of a state; DCP accepts further entries of the checkpoint."""
        report = reknit.load(self._path(), state, strict=False, options=self._options, group=group)
        wrong = [f"{name}: {why}" for name, why in report.mismatched.items()]
        wrong += [
            f"{name}: {report.notes.get(name, 'the checkpoint does not have it for this rank')}"
            for name in report.missing
        ]
        if wrong:
            raise MismatchError(
                "entries of the state dict were not loaded:\n  " + "\n  ".join(wrong),
                path=report.path,
                remedy="leave them out of the state dict, or mend their names, shapes or dtypes",
            )

    def _foreign(self, name: str) -> MismatchError:
        return MismatchError(
            f"{name} was encoded by a planner with a format of its own",
            path=location_text(self._path()),
            remedy="load it with the planner that decodes it in load_bytes",
        )

    def _path(self) -> str | PathLike[str]:
        return required(self.checkpoint_id, "Reader")


def overrides(planner: Any, base: type[Any], hooks: Sequence[str]) -> list[str]:
    """Return the hooks that a planner has of its own, and not from DCP's own planner."""
    kind = type(planner)
    return [hook for hook in hooks if getattr(kind, hook, None) is not getattr(base, hook)]


def required(path: str | PathLike[str] | None, what: str) -> str | PathLike[str]:
    """Return the path of a checkpoint.  Raises `UsageError` if the user named none."""
    if path is None:
        raise UsageError(f"{what} has no path", remedy=f"write {what}(path), or pass checkpoint_id")
    return path


def group_of(given: AnyGroup | None, num_ranks: int | None) -> AnyGroup | None:
    """Return the ranks of a call of DCP, of which its storage receives the number only."""
    if given is not None or num_ranks is None:
        return given
    if not dist.is_initialized():
        return reknit.alone()
    if num_ranks == dist.get_world_size():
        return None
    if num_ranks == 1:
        return reknit.alone()
    raise UsageError(
        f"this call of DCP has a process_group of {num_ranks} ranks, which it does not pass on",
        remedy="pass the same process group to Writer or Reader, as group=",
    )


def done(value: Any) -> Any:
    """Return a future that is done, as DCP waits for one."""
    future: Any = Future()
    future.set_result(value)
    return future


_SAVE_HOOKS = ("resolve_data", "lookup_object", "transform_object")
_NUMBER = re.compile(r"(?:[A-Za-z_]+[-_])?(\d+)")


class DcpWriter(StorageWriter):
    """The storage writer for `dcp.save` and `dcp.async_save`: each call makes one checkpoint at `path`.

    Every rank makes one with the same arguments.  `step` is by default the number at the end of a name such
    as ``step-100``.  `item` is the item of entries without levels (tensors directly in the state dict); by
    default that is ``model`` for a state dict of nothing else, and otherwise each is an item.  `group` is the
    `process_group` of the call, if that has one.  The other arguments are those of `reknit.save`.

    `async_save` copies the state by agents, which commit even if the trainer dies.
    """

    _synchronize_after_execute = False
    should_synchronize_after_execute = False

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        step: int | None = None,
        item: str | None = None,
        overwrite: bool = True,
        metadata: Mapping[str, Any] | None = None,
        options: SaveOptions | None = None,
        group: AnyGroup | None = None,
    ) -> None:
        self.checkpoint_id = path
        self._step, self._item, self._overwrite = step, item, overwrite
        self._metadata, self._options, self._group = dict(metadata or {}), options, group
        self._staged: deque[PendingSave | None] = deque()
        self._collective = True

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process; saves that agents write end first, in this process."""
        for pending in self._staged:
            if pending is not None:
                pending.result()
        return {**vars(self), "_staged": deque([None] * len(self._staged)), "_group": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Return whether this is a path or a URL."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Take the path of the next checkpoint."""
        if checkpoint_id is None:
            return
        if self._staged:  # from the path that `stage` has required
            now, new = location_text(self._path()), location_text(checkpoint_id)
            if new != now:
                raise UsageError(
                    f"this save is already written to {now}, not to {new}",
                    remedy="pass the path to Writer alone",
                )
        self.checkpoint_id = checkpoint_id

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state, which agents then write; DCP has nothing left to plan and to copy."""
        if self.checkpoint_id is None:
            raise UsageError("async_save copies a state before it names a path", remedy="write Writer(path)")
        planner = DefaultSavePlanner()
        planner.set_up_planner(state_dict)
        state, paths = planner.state_dict, planner.mappings
        tensors = any(isinstance(value, torch.Tensor) for value in state.values())
        held = item_for(paths.values(), self._item, tensors=tensors)
        self._staged.append(self._save(state, paths, held, self._group, wait=False))
        return {}

    def synchronize_staging(self) -> None:
        """Do nothing: the state is copied when `stage` returns."""

    def close(self) -> None:
        """Do nothing: agents end with the process."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note whether the ranks of this save plan together."""
        self._collective = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is: reknit makes its own."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Record in each plan the number of ranks, and the item of entries without levels."""
        paths = [
            (plan.planner_data or {}).get(item.index.fqn, (item.index.fqn,))
            for plan in plans
            for item in plan.items
        ]
        tensors = any(item.type != WriteItemType.BYTE_IO for plan in plans for item in plan.items)
        held = item_for(paths, self._item, tensors=tensors)
        return [replace(plan, storage_data=(len(plans), held)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        """Save the state together with the other ranks, or wait for the save that `stage` began."""
        own = overrides(planner, DefaultSavePlanner, (*PLANS, *_SAVE_HOOKS))
        if self._staged:
            if own:
                raise UsageError(
                    f"the state was copied before {type(planner).__name__} could plan it",
                    # Without these options it needs an accelerator.
                    remedy="pass async_stager=DefaultStager(StagingOptions(False, False, False, False)) to "
                    "async_save, or leave planner out",
                )
            pending = self._staged.popleft()
            if pending is not None:
                pending.result()
            return done([])
        num_ranks, held = plan.storage_data or (None, self._item)
        group = group_of(self._group, num_ranks if self._collective else None)
        values = self._pieces(plan, planner) if own else planner.state_dict
        self._save(values, getattr(planner, "mappings", {}), held, group, wait=True).result()
        return done([])

    def _pieces(self, plan: SavePlan, planner: Any) -> dict[str, Any]:
        """Return the entries that a planner's plan names, as the planner resolves them."""
        entries: dict[str, Any] = {}
        for item in plan.items:
            name, resolved = item.index.fqn, planner.resolve_data(item)
            if item.tensor_data is not None:
                piece = entries.setdefault(name, PlannedPieces(refused=misplaced(planner, name)))
                piece.add(item.tensor_data.size, item.tensor_data.chunk.offsets, resolved.detach())
                continue
            entries[name] = encoded(RAW, resolved)
            if isinstance(planner, DefaultSavePlanner):
                value = planner.lookup_object(item.index)
                usual: Any = DefaultSavePlanner.transform_object(planner, item, value)
                if usual.getvalue() == resolved.getvalue():  # reknit encodes it without pickle
                    entries[name] = value
        return entries

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Fill the metadata of a save that DCP did not plan; the checkpoint is committed already."""
        if not metadata.state_dict_metadata:
            whole = DcpReader(self._path()).read_metadata()
            metadata.state_dict_metadata, metadata.planner_data = (
                whole.state_dict_metadata,
                whole.planner_data,
            )

    def _save(
        self,
        values: Mapping[str, Any],
        paths: Mapping[str, Any],
        item: str | None,
        group: AnyGroup | None,
        *,
        wait: bool,
    ) -> PendingSave:
        path = self._path()
        number = _NUMBER.fullmatch(location_text(path).rstrip("/").rpartition("/")[2])
        with registered(PieceFramework()):
            return reknit.save(
                path,
                nested(values, paths, item),
                step=int(number[1]) if self._step is None and number else self._step,
                wait=wait,
                overwrite=self._overwrite,
                metadata={**self._metadata, ITEM: {"item": item}},
                options=self._options,
                group=group,
            )

    def _path(self) -> str | PathLike[str]:
        return required(self.checkpoint_id, "Writer")
