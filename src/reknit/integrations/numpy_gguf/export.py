"""Export of a state to a file of `numpy.savez`, written piece by piece."""

from __future__ import annotations

import zipfile
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.errors import MismatchError
from reknit.integrations.formats.export import new_file, require_room, stream
from reknit.integrations.formats.states import Stub, dotted, kept, leaves, state_of
from reknit.integrations.formats.verify import (
    Named,
    ReadBack,
    StateReport,
    require_equal,
    require_same_values,
)
from reknit.plugins.format import TensorSpec, numpy_dtype, translated

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from os import PathLike

    from numpy.typing import NDArray

    from reknit.integrations.formats.export import StreamPiece
    from reknit.plugins.format import OpenCheckpoint

DTYPES = "__dtypes__"
"""The array that names the true types of tensors whose bits are stored as unsigned integers."""

_BITS = {1: "uint8", 2: "uint16", 4: "uint32"}
_TIME = (1980, 1, 1, 0, 0, 0)
"""Of every entry: files of equal content are equal."""


def export_npz(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    items: Sequence[str] | None = None,
    overwrite: bool = False,
    verify: bool = False,
) -> StateReport:
    """Write the checkpoint at `path` as the file `out`, which `numpy.load` reads without pickle.

    The name of an array has the keys that lead to it, joined by dots: ``model.layers.0.weight``.  Numbers and
    texts are arrays without dimensions; other values are left out.  The bits of a type that NumPy lacks
    (bfloat16, 8-bit floats) are stored as unsigned integers, and the array ``__dtypes__`` has pairs of name
    and true type.  Memory stays bounded.  `verify` reads the file with NumPy and compares every bit.

    `out` appears whole or not at all.  Raises `UsageError` if it is taken and `overwrite` is false,
    `CheckpointNotFoundError`, `CorruptError`, `MismatchError`, `StorageError`.
    """
    with new_file(out, overwrite=overwrite) as beside, state_of(path, items) as (checkpoint, whole):
        saved = kept(whole.without_generators(), _why_not)
        stubs = saved.stubs()
        values = {
            dotted(place): np.asarray(leaf)
            for place, leaf in leaves(saved.state)
            if not isinstance(leaf, Stub) and not _is_empty(leaf)
        }
        if taken := next((name for name in (*values, DTYPES) if name in stubs), None):
            raise MismatchError(f"two arrays would be named {taken!r}", remedy="export the items one by one")
        changed = {name: stub.spec.dtype for name, stub in stubs.items() if _is_foreign(stub.spec.dtype)}
        nbytes = sum(stub.spec.nbytes for stub in stubs.values())
        require_room(beside, nbytes)
        with translated("write", beside):
            _write(beside, checkpoint, stubs, {**values, **_types(changed)})
        if verify:
            _verify(beside, checkpoint, stubs, values)
    return StateReport(
        path=str(out),
        format="npz",
        items=tuple(saved.state),
        num_tensors=len(stubs),
        nbytes=nbytes,
        left_out=saved.left_out,
        changed={name: f"{_stored(stubs[name].spec)} (bits of {dtype})" for name, dtype in changed.items()},
        verified=verify,
    )


def _why_not(value: Any) -> str | None:
    """Return why an array cannot hold a value, or None."""
    if isinstance(value, Stub) or _is_empty(value):
        return None
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return "the integer needs more than 64 bits"
    if type(value) is str and value.endswith("\0"):
        return "NumPy drops the zeros at the end of a text"
    if type(value) in (bool, int, float, complex, str):
        return None
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcUS":
        return None
    return f"an array cannot be a {type(value).__name__}"


def _is_empty(value: Any) -> bool:
    return type(value) in (dict, list, tuple) and not value


def _is_foreign(dtype: str) -> bool:
    """Return whether NumPy itself lacks a type."""
    return dtype in ("complex32", "float4_e2m1fn_x2") or numpy_dtype(dtype).isbuiltin != 1


def _stored(spec: TensorSpec) -> str:
    return _BITS[spec.itemsize] if _is_foreign(spec.dtype) else spec.dtype


def _types(changed: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    return {DTYPES: np.array(list(changed.items()))} if changed else {}


def _write(
    path: str, checkpoint: OpenCheckpoint, stubs: Mapping[str, Stub], values: Mapping[str, NDArray[Any]]
) -> None:
    names = {stub.number: name for name, stub in stubs.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, stub in stubs.items():
            if not stub.spec.numel:
                _add(archive, name, stub.spec, ())
        pieces = stream(checkpoint, list(names))
        for number, parts in groupby(pieces, lambda piece: piece.number):
            _add(archive, names[number], checkpoint.index.tensors[number].spec, parts)
        for name, value in values.items():
            with archive.open(_entry(name), "w") as file:
                np.lib.format.write_array(file, value, allow_pickle=False)


def _entry(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(f"{name}.npy", _TIME)


def _add(archive: zipfile.ZipFile, name: str, spec: TensorSpec, parts: Iterable[StreamPiece]) -> None:
    """Write one tensor."""
    descr = np.lib.format.dtype_to_descr(np.dtype(_stored(spec)))
    with archive.open(_entry(name), "w", force_zip64=True) as file:
        header = {"descr": descr, "fortran_order": False, "shape": spec.shape}
        np.lib.format.write_array_header_1_0(file, header)
        for piece in parts:
            file.write(piece.data.view(np.uint8).data)


def _verify(
    path: str, checkpoint: OpenCheckpoint, stubs: Mapping[str, Stub], values: Mapping[str, NDArray[Any]]
) -> None:
    """Read the file with NumPy, and compare it.  Raises `CorruptError`."""
    wanted = {stub.number: Named(name, stub.spec) for name, stub in stubs.items()}
    with np.load(path, allow_pickle=False) as found:
        true = dict(found[DTYPES].tolist()) if DTYPES in found.files else {}

        def read(number: int) -> ReadBack:
            name = wanted[number].name
            array = found[name]
            spec = TensorSpec(array.shape, true.get(name, str(array.dtype)))
            return ReadBack(spec, np.ascontiguousarray(array).reshape(-1).view(np.uint8))

        require_equal(wanted, stream(checkpoint, list(wanted)), read)
        require_same_values(values, {name: found[name] for name in values})
