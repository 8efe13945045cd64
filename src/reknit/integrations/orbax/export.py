"""Export of a state to a folder of Orbax, written tensor by tensor."""

from __future__ import annotations

import os
import shutil
import warnings
from glob import escape, glob
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.errors import MismatchError, MissingExtraError, ReknitError, StorageError
from reknit.integrations.formats.export import OPTIONS, ExportFolder, require_room, stream
from reknit.integrations.formats.states import Stub, dotted, kept, leaves, mapped, state_of
from reknit.integrations.formats.verify import (
    Named,
    ReadBack,
    StateReport,
    require_equal,
    require_same_values,
)
from reknit.plugins.format import Box, Recorder, TensorSpec, numpy_dtype, read_boxes, typed
from reknit.plugins.framework import tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from reknit.integrations.formats.states import Keys, SavedState
    from reknit.plugins.format import OpenCheckpoint

_LACKING = frozenset({"complex32", "float4_e2m1fn_x2"})
"""Types that the files of Orbax cannot hold."""


def export_orbax(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    items: Sequence[str] | None = None,
    verify: bool = False,
) -> StateReport:
    """Write the checkpoint at `path` as the folder `out`, which ``PyTreeCheckpointer().restore(out)`` reads.

    The tree has the `items` (default: all), in which tensors and values are nested as they were saved: lists,
    tuples, states of optax and of Flax NNX.  So Orbax restores it into the tree of the run.  Typed keys of
    JAX, numbers, texts and None are kept, and other values are left out, as are tensors without elements.
    Memory is bounded by twice the largest tensor, since Orbax writes whole
    arrays.  `verify` restores the folder with Orbax and compares every bit.  It needs the extra ``orbax``.

    `out` is a local folder, empty or absent, and appears whole or not at all.  Raises `UsageError`,
    `MissingExtraError`, `CheckpointNotFoundError`, `CorruptError`, `MismatchError`, `StorageError`.
    """
    orbax = _orbax()
    folder = ExportFolder(out)
    with state_of(path, items) as (checkpoint, whole):
        saved = kept(whole, _why_not)
        stubs = saved.stubs()
        generators = {stubs[name].number: generator for name, generator in saved.generators.items()}
        state = {item: _as_saved(value, (item,), saved) for item, value in saved.state.items()}
        for name, stub in stubs.items():
            if stub.spec.dtype in _LACKING:
                raise MismatchError(
                    f"Orbax has no type for the tensor {name!r}, a {stub.spec}", remedy="leave out its item"
                )
        nbytes = sum(stub.spec.nbytes for stub in stubs.values())
        with folder.filling() as storage:
            require_room(storage.url, nbytes)
            _write(orbax, checkpoint, state, generators, storage.url)
            if verify:
                _verify(orbax, checkpoint, state, storage.url)
    return StateReport(
        path=folder.path,
        format="orbax",
        items=tuple(saved.state),
        num_tensors=len(stubs),
        nbytes=nbytes,
        left_out=saved.left_out,
        verified=verify,
    )


def _orbax() -> Any:
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise MissingExtraError(
            "the export to Orbax needs Orbax, which is not installed", remedy="pip install 'reknit[orbax]'"
        ) from error
    return orbax


def _why_not(value: Any) -> str | None:
    """Return why the export leaves out a value, or None."""
    if isinstance(value, Stub):
        return None if value.spec.numel else "Orbax writes no array without elements"
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return "the integer needs more than 64 bits"
    if type(value) in (int, float, bool, str, type(None)):
        return None
    if type(value) in (dict, list, tuple) and not value:
        return None
    return f"it is a {type(value).__name__}, which Orbax does not keep as it is"


def _as_saved(value: Any, place: Keys, saved: SavedState) -> Any:
    """Return the value at a place of a state in the form of the run, with its lists and boxes."""
    if type(value) in (list, tuple) and not isinstance(value, Stub):
        value = [_as_saved(one, (*place, number), saved) for number, one in enumerate(value)]
    elif isinstance(value, dict):
        inside = {key: _as_saved(one, (*place, key), saved) for key, one in value.items()}
        if place not in saved.numbered and tree.counts(inside):
            value = [inside[number] for number in range(len(inside))]
        elif len({type(key) for key in inside}) > 1:  # Orbax keeps keys as texts, and sorts them
            value = {str(key): one for key, one in inside.items()}
        else:
            value = inside
    for key in reversed(saved.boxes.get(place, [])):
        value = {key: value}
    return value


class SavedTensor:
    """A tensor in the place of its bytes, which are read when it is written; a leaf of a tree."""

    def __init__(self, checkpoint: OpenCheckpoint, stub: Stub) -> None:
        self._checkpoint, self._stub = checkpoint, stub
        self.shape, self.dtype = stub.spec.shape, numpy_dtype(stub.spec.dtype)
        self.size, self.nbytes, self.ndim = stub.spec.numel, stub.spec.nbytes, len(stub.spec.shape)

    def read(self) -> Any:
        """Return the tensor as a NumPy array."""
        array = np.empty(self.shape, self.dtype)
        if array.size:
            whole = [(self._stub.number, Box.whole(self.shape), array)]
            read_boxes(self._checkpoint, whole, OPTIONS, Recorder("read"))
        return array


def _write(
    orbax: Any, checkpoint: OpenCheckpoint, state: Mapping[str, Any], generators: Mapping[int, str], path: str
) -> None:
    handlers = orbax.type_handlers
    base: Any = handlers.NumpyHandler
    failed: list[ReknitError] = []

    class OneByOne(base):  # type: ignore[misc]
        """Orbax's writer of arrays, which reads each when it is its turn."""

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            """Write the arrays one after another."""
            for value, info, arg in zip(values, infos, args or [orbax.SaveArgs()] * len(values), strict=True):
                try:
                    array = value.read()
                except ReknitError as error:
                    failed.append(error)
                    raise
                for future in await super().serialize([array], [info], [arg]):
                    future.result()
            return []

    from reknit.integrations.jax.filling import KIND, keys_of  # Orbax needs JAX too

    registry = handlers.create_type_handler_registry(
        (SavedTensor, OneByOne(deepcopy_host_arrays=False)),
        (KIND, handlers.get_type_handler(KIND)),
        (int, handlers.ScalarHandler()),
        (float, handlers.ScalarHandler()),
        (str, handlers.StringHandler()),
    )

    def array(_: object, leaf: Any) -> Any:
        if not isinstance(leaf, Stub):
            return leaf
        tensor = SavedTensor(checkpoint, leaf)
        generator = generators.get(leaf.number)
        return tensor if generator is None else keys_of(tensor.read(), generator)

    tree = mapped(dict(state), array)
    handler = orbax.PyTreeCheckpointHandler(type_handler_registry=registry)
    try:
        with orbax.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, orbax.args.PyTreeSave(tree), force=True)
    except OSError as error:
        raise typed(error, "write", path) from error
    except Exception as error:  # of Orbax or tensorstore, of many types
        if failed:
            raise failed[0] from None
        raise StorageError(f"Orbax cannot write {path}: {error}", path=path) from error
    finally:
        for rest in glob(f"{escape(path)}.orbax-checkpoint-tmp*"):
            shutil.rmtree(rest, ignore_errors=True)
    os.makedirs(path, exist_ok=True)


def _verify(orbax: Any, checkpoint: OpenCheckpoint, state: Mapping[str, Any], path: str) -> None:
    """Restore the folder with Orbax, and compare it.  Raises `CorruptError`."""
    from reknit.integrations.jax.filling import host_data, is_array

    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sharding info not provided")  # for typed keys
        tree = checkpointer.restore(path)
    found = {dotted(place): leaf for place, leaf in leaves(tree)}
    stubs = {leaf.number: dotted(place) for place, leaf in leaves(state) if isinstance(leaf, Stub)}
    wanted = {number: Named(name, checkpoint.index.tensors[number].spec) for number, name in stubs.items()}

    def read(number: int) -> ReadBack:
        array = found[stubs[number]]
        array = host_data(array) if is_array(array) else np.asarray(array)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return ReadBack(TensorSpec(array.shape, str(array.dtype)), data)

    require_equal(wanted, stream(checkpoint, list(wanted)), read)
    values = {dotted(place): leaf for place, leaf in leaves(state) if not isinstance(leaf, Stub)}
    require_same_values(values, found)
