"""Export of a state to a folder of torch.distributed.checkpoint (DCP), written piece by piece."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.futures import Future

from reknit.errors import ReknitError, StorageError
from reknit.integrations.formats.export import (
    OPTIONS,
    PIECE_NBYTES,
    ExportFolder,
    cut_boxes,
    require_room,
    stream,
)
from reknit.integrations.formats.states import Stub, dotted, leaves, mapped, state_of
from reknit.integrations.formats.verify import (
    Named,
    StateReport,
    read_back,
    require_equal,
    require_same_values,
)
from reknit.integrations.torch_save.export import empty_tensor, for_torch, stub_tensors, tensor_of
from reknit.plugins.format import Box, Recorder, numpy_dtype, read_boxes, typed

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator, Mapping, Sequence
    from os import PathLike

    from reknit.integrations.formats.export import StreamPiece
    from reknit.integrations.formats.verify import ReadBack
    from reknit.plugins.format import OpenCheckpoint, TensorSpec

FILE_NBYTES = 256 << 20
"""Bytes of tensors in one file of an export.  DCP keeps the tensors of a file until it is written."""


def export_dcp(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    items: Sequence[str] | None = None,
    verify: bool = False,
) -> StateReport:
    """Write the checkpoint at `path` as a folder `out` for `torch.distributed.checkpoint.load`.

    An entry has the name that DCP gives it in a nested state: ``model.layers.0.weight`` and, for states of
    optimizers, ``optimizer.state.layers.0.weight.exp_avg``, as those of `get_state_dict` of torch.  `items`
    are the items to write (default: all).  Values that `torch.load` refuses are left out, as
    are values that each rank saved for itself.  Memory stays bounded.  `verify` loads the folder with DCP and
    compares every bit.

    `out` is a local folder, empty or absent, and appears whole or not at all.  Raises `UsageError`,
    `CheckpointNotFoundError`, `CorruptError`, `MismatchError`, `StorageError`.
    """
    folder = ExportFolder(out)
    with state_of(path, items) as (checkpoint, whole):
        saved = for_torch(whole)
        saved.stubs()  # DCP joins the keys, so two names may be one
        stubs = stub_tensors(saved)
        nbytes = sum(stub.spec.nbytes for stub in stubs)
        with folder.filling() as storage:
            require_room(storage.url, nbytes)
            _write(checkpoint, saved.state, storage.url)
            if verify:
                _verify(checkpoint, saved.state, storage.url)
    return StateReport(
        path=folder.path,
        format="dcp",
        items=tuple(saved.state),
        num_tensors=len(stubs),
        nbytes=nbytes,
        left_out=saved.left_out,
        verified=verify,
    )


def _write(checkpoint: OpenCheckpoint, state: Mapping[str, Any], path: str) -> None:
    """Save with DCP's own writer, which asks the planner for one piece of a tensor after another."""
    frame, stubs = _framed(state)
    planner = _PiecePlanner(checkpoint, stubs)
    try:
        with _alone():
            dcp.save(frame, storage_writer=_FileByFile(path), planner=planner, no_dist=True)
    except CheckpointException as error:
        raise _meant(error, path) from error


def _framed(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, Stub]]:
    """Return a state with empty tensors in place of stubs, and the stubs by the `id` of these tensors."""
    stubs: dict[int, Stub] = {}

    def tensor(place: tuple[str | int, ...], leaf: Any) -> Any:
        if not isinstance(leaf, Stub):
            return leaf
        made = empty_tensor(dotted(place), leaf.spec, "meta")
        stubs[id(made)] = leaf
        return made

    return {item: mapped(_as_lists(value), tensor, (item,)) for item, value in state.items()}, stubs


def _as_lists(value: Any) -> Any:
    """Return a state with lists in place of tuples that hold tensors, which DCP does not look into."""
    if isinstance(value, dict):
        return {key: _as_lists(one) for key, one in value.items()}
    if type(value) in (list, tuple) and any(isinstance(leaf, Stub) for _, leaf in leaves(value)):
        return [_as_lists(one) for one in value]
    return value


def _meant(error: CheckpointException, path: str) -> ReknitError:
    """Return the error that DCP has wrapped."""
    failures = [failure for failure, _ in error.failures.values()]
    own = next((one for one in failures if isinstance(one, ReknitError)), None)
    of_system = next((one for one in failures if isinstance(one, OSError)), None)
    if own is not None:
        return own
    if of_system is not None:
        return typed(of_system, "write", path)
    return StorageError(f"torch.distributed.checkpoint cannot write {path}: {failures[0]}", path=path)


class _FileByFile(FileSystemWriter):
    """DCP's writer for files of a bounded size."""

    def __init__(self, path: str) -> None:
        # Without a look ahead, pieces are asked for one after another, on machines with accelerators too.
        super().__init__(path, thread_count=1, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: Any) -> Future[Any]:
        """Write one file after another."""
        results: list[Any] = []
        for number, items in enumerate(_files(plan.items)):
            prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            part = replace(plan, items=items, storage_data=prefix)
            results += super().write_data(part, planner).wait()
        done: Future[Any] = Future()
        done.set_result(results)
        return done


def _files(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Cut the entries of a plan into files."""
    file: list[WriteItem] = []
    held = 0
    for item in items:
        data = item.tensor_data
        size = 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
        if file and held + size > FILE_NBYTES:
            yield file
            file, held = [], 0
        file.append(item)
        held += size
    if file:
        yield file


class _PiecePlanner(DefaultSavePlanner):
    """The planner of a state whose tensors are read when they are written.

    `stubs` are the tensors of the checkpoint by the `id` of the tensor in their place.
    """

    def __init__(self, checkpoint: OpenCheckpoint, stubs: Mapping[int, Stub]) -> None:
        super().__init__()
        self._stubs = stubs
        self._named: dict[str, Stub] = {}
        self._pieces = _Pieces(checkpoint)

    def create_local_plan(self) -> SavePlan:
        """Return the plan: each tensor as the boxes in which the checkpoint is read."""
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            if (stub := self._stubs.get(id(value))) is None:
                items += create_default_local_save_plan({name: value}, is_coordinator=True).items
                continue
            self._named[name] = stub
            items += _items(name, stub, value.dtype)
        self._pieces.order = list(dict.fromkeys(stub.number for stub in self._named.values()))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the bytes of one entry of the plan."""
        stub, data = self._named.get(write_item.index.fqn), write_item.tensor_data
        if stub is None or data is None:
            return super().resolve_data(write_item)
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        return tensor_of(self._pieces.take(stub, box), data.properties.dtype, box.lengths)


class _OldProperties(TensorProperties):
    """Properties of a tensor as every version of DCP reads them; torch 2.15 writes one field more."""

    def __reduce__(self) -> tuple[Any, ...]:
        untyped: Any = self
        return TensorProperties, (), untyped.__getstate__()[:5]


def _items(name: str, stub: Stub, dtype: torch.dtype) -> Iterator[WriteItem]:
    """Yield the entries of a plan for one tensor."""
    boxes = list(cut_boxes(stub.spec, PIECE_NBYTES)) or [Box.whole(stub.spec.shape)]
    for number, box in enumerate(boxes):
        offsets = torch.Size(box.offsets)
        chunk = ChunkStorageMetadata(offsets, torch.Size(box.lengths))
        data = TensorWriteData(chunk, _OldProperties(dtype=dtype), torch.Size(stub.spec.shape))
        yield WriteItem(MetadataIndex(name, offsets, number), WriteItemType.SHARD, tensor_data=data)


class _Pieces:
    """The pieces of tensors, read in the order of the plan; a piece out of turn is read alone."""

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.order: list[int] = []
        self._stream: Iterator[StreamPiece] | None = None
        self._next: StreamPiece | None = None
        self._taken: dict[int, int] = {}

    def take(self, stub: Stub, box: Box) -> Any:
        """Return the elements of a box."""
        if self._stream is None:
            self._stream = stream(self._checkpoint, self.order)
            self._next = next(self._stream, None)
        piece, first = self._next, self._taken.get(stub.number, 0)
        in_turn = piece is not None and piece.number == stub.number and piece.data.size == box.numel
        if in_turn and piece is not None and _first_element(stub.spec.shape, box) == first:
            self._taken[stub.number] = first + box.numel
            self._next = next(self._stream, None)
            return piece.data
        array = np.empty(box.lengths, numpy_dtype(stub.spec.dtype))
        if box.numel:
            read_boxes(self._checkpoint, [(stub.number, box, array)], OPTIONS, Recorder("read"))
        return array


def _first_element(shape: Sequence[int], box: Box) -> int:
    number = 0
    for size, offset in zip(shape, box.offsets, strict=True):
        number = number * size + offset
    return number


def _verify(checkpoint: OpenCheckpoint, state: Mapping[str, Any], path: str) -> None:
    """Load the folder with DCP, one tensor after another, and compare it.  Raises `CorruptError`."""
    tensors = {leaf.number: dotted(place) for place, leaf in leaves(state) if isinstance(leaf, Stub)}
    specs = {number: checkpoint.index.tensors[number].spec for number in tensors}

    batches = {number: batch for batch in _batches(specs) for number in batch}
    held: dict[int, torch.Tensor] = {}

    def read(number: int) -> ReadBack:
        if number not in held:
            held.clear()
            held.update({one: empty_tensor(tensors[one], specs[one]) for one in batches[number]})
            with _alone():
                dcp.load({tensors[one]: held[one] for one in held}, checkpoint_id=path, no_dist=True)
        return read_back(held[number])

    wanted = {number: Named(tensors[number], specs[number]) for number in tensors}
    require_equal(wanted, stream(checkpoint, list(wanted)), read)
    frame, stubs = _framed(state)
    planner = DefaultSavePlanner()
    planner.set_up_planner(frame, is_coordinator=True)
    values = {name: value for name, value in planner.state_dict.items() if id(value) not in stubs}
    found: dict[str, Any] = dict.fromkeys(values)
    with _alone():
        dcp.load(found, checkpoint_id=path, no_dist=True)
    require_same_values(values, found)


@contextmanager
def _alone() -> Iterator[None]:
    """Keep DCP from warning that one process works alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _batches(specs: Mapping[int, TensorSpec]) -> Iterator[list[int]]:
    """Cut tensors into groups that are loaded together, so that DCP reads its metadata a few times only."""
    batch: list[int] = []
    held = 0
    for number, spec in specs.items():
        if batch and held + spec.nbytes > FILE_NBYTES:
            yield batch
            batch, held = [], 0
        batch.append(number)
        held += spec.nbytes
    yield batch
