"""Export of a state to a file of `torch.save`, written piece by piece."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch._subclasses import FakeTensorMode

from reknit.errors import FormatError, MismatchError, StorageError
from reknit.integrations.formats.export import new_file, require_room, stream, tied_names
from reknit.integrations.formats.states import SavedState, Stub, dotted, kept, leaves, mapped, state_of
from reknit.integrations.formats.verify import (
    Named,
    StateReport,
    read_back,
    require_equal,
    require_same_values,
)
from reknit.plugins.format import translated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from io import BufferedRandom
    from os import PathLike

    from numpy.typing import NDArray

    from reknit.plugins.format import OpenCheckpoint, TensorSpec


_SAFE = frozenset({type(None), bool, int, float, str, Stub})
"""Types of most leaves, which need no trial."""


_HOW = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Options of optimizers that decide only how torch computes; a checkpoint does not have them."""


def for_torch(saved: SavedState) -> SavedState:
    """Return a state without the values that ``torch.load(weights_only=True)`` refuses.

    The groups of optimizers have all options that DCP asks for.
    """
    safe = kept(saved.without_generators(), _why_not)
    return SavedState(_with_options(safe.state), safe.left_out)


def _with_options(state: Any) -> Any:
    """Return a state in which groups of optimizers have torch's defaults of options that are not saved."""
    if type(state) is not dict:
        return state
    groups = state.get("param_groups")
    state = {key: _with_options(value) for key, value in state.items()}
    if type(groups) is list and all(type(group) is dict and "params" in group for group in groups):
        state["param_groups"] = [_HOW | group for group in groups]
    return state


def _why_not(value: Any) -> str | None:
    """Return why `torch.load` refuses a value, or None."""
    if type(value) in _SAFE:
        return None
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception:  # pickle, torch and the class of the value have errors of their own
        return f"torch.load(weights_only=True) does not read a {type(value).__name__}"
    return None


def torch_dtype(name: str, spec: TensorSpec) -> torch.dtype:
    """Return the dtype of a spec.  Raises `MismatchError`, with the name, if this torch lacks it."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise MismatchError(
            f"torch {torch.__version__} has no dtype for the tensor {name!r}, a {spec}",
            remedy="update torch, or leave out its item",
        )
    return dtype


def empty_tensor(name: str, spec: TensorSpec, device: str = "cpu") -> torch.Tensor:
    """Return a tensor without values.  Raises `MismatchError` if this torch lacks its dtype."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        return torch.empty(spec.shape, dtype=torch_dtype(name, spec), device=device)


def tensor_of(data: NDArray[Any], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return an array of these elements as a tensor with the same memory."""
    return torch.from_numpy(data.reshape(-1).view(np.uint8)).view(dtype).reshape(tuple(shape))


def stub_tensors(saved: SavedState) -> list[Stub]:
    """Return the tensors of a state.  Raises `MismatchError` for one that torch cannot hold."""
    stubs = saved.tensors()
    for path, stub in stubs.items():
        torch_dtype(dotted(path), stub.spec)
    return list(stubs.values())


_CENTRAL, _LOCAL, _AFTER = b"PK\x01\x02", b"PK\x03\x04", b"PK\x07\x08"
"""Signatures of a zip file: of an entry in its list, of a header, and of the sizes after the bytes."""


def export_torch(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    items: Sequence[str] | None = None,
    overwrite: bool = False,
    verify: bool = False,
) -> StateReport:
    """Write the checkpoint at `path` as the file `out`, which ``torch.load(out, weights_only=True)`` reads.

    The file has a dict with the `items` (default: all), in which tensors and values are nested as they were
    saved; states of optimizers are under the names of their parameters.  Tied tensors share their memory.
    Values that `torch.load` refuses are left out, as are values that each rank saved for itself.  Memory
    stays bounded.  `verify` reads the file with torch and compares every bit.

    `out` appears whole or not at all.  Raises `UsageError` if it is taken and `overwrite` is false,
    `CheckpointNotFoundError`, `CorruptError`, `MismatchError`, `StorageError`.
    """
    with new_file(out, overwrite=overwrite) as beside, state_of(path, items) as (checkpoint, whole):
        saved = for_torch(whole)
        stubs = stub_tensors(saved)
        nbytes = sum(stub.spec.nbytes for stub in stubs)
        require_room(beside, nbytes)
        tied = tied_names(checkpoint, sorted({stub.number for stub in stubs}))
        order = list(dict.fromkeys(tied.get(stub.number, stub.number) for stub in stubs))
        _write_frame(saved.state, tied, beside)
        with translated("write", beside), open(beside, "r+b") as file:
            _fill(file, checkpoint, order)
        if verify:
            _verify(checkpoint, saved.state, beside)
    return StateReport(
        path=str(out),
        format="torch",
        items=tuple(saved.state),
        num_tensors=len(stubs),
        nbytes=nbytes,
        left_out=saved.left_out,
        verified=verify,
    )


def _write_frame(state: Mapping[str, Any], tied: Mapping[int, int], path: str) -> None:
    """Write a file in which all tensors have their places, but not their bytes."""
    made: dict[int, torch.Tensor] = {}

    def tensor(place: tuple[str | int, ...], leaf: Any) -> Any:
        if not isinstance(leaf, Stub):
            return leaf
        number = tied.get(leaf.number, leaf.number)
        if number not in made:
            with FakeTensorMode():
                made[number] = empty_tensor(dotted(place), leaf.spec)
        return made[number]

    frame = mapped(dict(state), tensor)
    try:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(frame, path)
    except RuntimeError as error:  # torch's, for an error of the operating system
        raise StorageError(f"cannot write {path}: {error}", path=path) from error


class _Place(NamedTuple):
    """The place of an entry of a zip file: of its bytes, and of its entry in the list."""

    start: int
    nbytes: int
    listed: int


def _fill(file: BufferedRandom, checkpoint: OpenCheckpoint, order: Sequence[int]) -> None:
    """Write the bytes of the tensors, in the order in which the file has them, and their checksums."""
    places = _places(file)
    wide = [checkpoint.index.tensors[number].spec.nbytes for number in order]
    if wide != [place.nbytes for place in places]:
        raise FormatError(
            f"torch {torch.__version__} gave the tensors other places than expected",
            remedy="export to dcp instead, or report this",
        )
    place_of = dict(zip(order, places, strict=True))
    written: dict[int, int] = dict.fromkeys(order, 0)
    sums: dict[int, int] = dict.fromkeys(order, 0)
    for number, data in stream(checkpoint, order):
        piece = data.view(np.uint8).data
        file.seek(place_of[number].start + written[number])
        file.write(piece)
        written[number] += len(piece)
        sums[number] = zlib.crc32(piece, sums[number])
    for number, place in place_of.items():
        checksum = struct.pack("<I", sums[number])
        file.seek(place.listed + 16)
        file.write(checksum)
        file.seek(place.start + place.nbytes)
        if file.read(4) == _AFTER:
            file.seek(place.start + place.nbytes + 4)
            file.write(checksum)


def _places(file: BufferedRandom) -> list[_Place]:
    """Return the places of the tensors, in the order of their numbers."""
    with zipfile.ZipFile(file) as archive:
        entries, listed = archive.infolist(), archive.start_dir
    found: dict[int, _Place] = {}
    for entry in entries:
        file.seek(entry.header_offset)
        header = file.read(30)
        start = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        file.seek(listed)
        item = file.read(46)
        if header[:4] != _LOCAL or item[:4] != _CENTRAL:
            raise FormatError(f"torch {torch.__version__} wrote an unexpected zip file")
        *_, folder, name = entry.filename.split("/")
        if folder == "data" and name.isdecimal():
            found[int(name)] = _Place(start, entry.file_size, listed)
        listed += 46 + sum(struct.unpack("<HHH", item[28:34]))
    return [found[number] for number in sorted(found)]


def _verify(checkpoint: OpenCheckpoint, state: Mapping[str, Any], path: str) -> None:
    """Read the file with torch, and compare it.  Raises `CorruptError`."""
    with zipfile.ZipFile(path) as archive:
        archive.testzip()
    found = dict(leaves(torch.load(path, weights_only=True, mmap=True)))
    tensors = {leaf.number: place for place, leaf in leaves(state) if isinstance(leaf, Stub)}
    wanted = {
        number: Named(dotted(place), checkpoint.index.tensors[number].spec)
        for number, place in tensors.items()
    }
    require_equal(wanted, stream(checkpoint, list(wanted)), lambda number: read_back(found[tensors[number]]))
    values = {str(place): leaf for place, leaf in leaves(state) if not isinstance(leaf, Stub)}
    require_same_values(values, {str(place): leaf for place, leaf in found.items()})
