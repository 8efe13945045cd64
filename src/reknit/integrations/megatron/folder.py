"""Checkpoints of Megatron (torch_dist) in place, under the names of a model in one process.

Megatron puts the layers of a model, and the experts of a layer, into one tensor each; here they have numbers
in their names, as in the models that reknit saves.  So any layout loads any layout.
"""

from __future__ import annotations

import json
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from reknit.errors import CorruptError, FormatError, StorageNotFoundError, shown
from reknit.integrations.dcp.folder import DcpFolder, is_tensor, locate, object_at, read_table
from reknit.integrations.formats.entries import MODEL, Chunks, ForeignEntries, named
from reknit.integrations.formats.pickles import PickledObject, UnreadError
from reknit.integrations.formats.small_reads import part_of
from reknit.integrations.formats.torch_values import TensorView, Whole, more_words
from reknit.integrations.megatron import names
from reknit.integrations.torch_save.files import TorchFile, add_extent, views_in
from reknit.plugins.format import Box, Extent, TensorSpec, flat_range_boxes

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.integrations.dcp.folder import PickledEntry
    from reknit.plugins.format import Storage

    Place = Callable[[str, str, TensorView], None]

_SETTINGS = "metadata.json"
_COMMON = "common.pt"
_COMMON_ITEM = "common"
_OPTIMIZER = "optimizer"
_WORDS = more_words(("signal.Signals",))._replace(
    families=("megatron.", "torch._C._nn.", "torch.nn.functional.", "torch.distributed.checkpoint.")
)
"""Names of enumerations, and of functions, which become texts."""
_SHAPE = "nd_reformulated_orig_global_shape"
"""Key in Megatron's notes about a tensor that was saved in another shape than its own."""
_MAX_SETTINGS_NBYTES = 1 << 20


def read_folder(storage: Storage) -> ForeignEntries:
    """Return the entries of a checkpoint; the common state of all ranks is the item ``common``."""
    _require_torch_dist(storage)
    entries = ForeignEntries(storage)
    folder = DcpFolder(entries)
    table = read_table(folder)
    located = locate(folder, table)
    found = _ModelTensors(entries)
    for key, (spec, chunks) in located.tensors.items():
        notes = table.of_megatron.get(key)
        shape = notes.get(_SHAPE) if isinstance(notes, dict) else None
        found.tensor(key, *((spec, chunks) if shape is None else regridded(key, spec, chunks, shape)))
    for key, why in located.unread.items():
        item, fqn = _name_of(key)
        entries.unread(item, fqn.split("/"), why)
    found.finish()
    for key in table.specs:
        if is_tensor(table, key):
            continue
        if not (places := table.places.get(key)):
            raise CorruptError(f".metadata names no place for {shown(key)}")
        _add_object(entries, key, partial(object_at, folder, places[0][1], _WORDS))
    _add_common(entries)
    return entries


def _require_torch_dist(storage: Storage) -> None:
    """Raise `FormatError` unless the file that Megatron writes last names the format that is read here."""
    try:
        settings = json.loads(storage.get(_SETTINGS, limit=_MAX_SETTINGS_NBYTES))
        backend = settings["sharded_backend"]
    except StorageNotFoundError:
        raise _unfinished(f"{_SETTINGS} is missing") from None
    except (ValueError, KeyError, TypeError):
        raise _unfinished(f"{_SETTINGS} does not name a format") from None
    if backend != "torch_dist":
        raise FormatError(
            f"{_SETTINGS} names the format {shown(backend)}, and reknit reads torch_dist",
            remedy="load it with a version of Megatron-Core that has this format, and save it as torch_dist",
        )


def _unfinished(what: str) -> FormatError:
    return FormatError(
        f"{what}: Megatron writes this file last, so the save did not end, or the file was lost",
        remedy="open another checkpoint of the run, or copy the folder again",
    )


class _ModelTensors:
    """The tensors of a folder, one layer and one expert at a time."""

    def __init__(self, entries: ForeignEntries) -> None:
        self._entries = entries
        self._halves: dict[tuple[str, str], tuple[TensorSpec, Chunks]] = {}

    def tensor(self, key: str, spec: TensorSpec, chunks: Chunks) -> None:
        """Add a tensor of Megatron's: as it is, or as those of its layers and experts."""
        if (flat := names.flat_name(key)) is not None:
            self._entries.tensor(_OPTIMIZER, flat, spec, chunks)
            return
        state = names.state_of(key)
        for name, one, parts in _divided(key.removeprefix(state[0]) if state else key, spec, chunks):
            item = _OPTIMIZER if state else MODEL
            below = ("state", "{}", state[1]) if state else ("{}",)
            if (half := names.half(name)) is not None and one.shape:
                one, parts = _as_half(one, parts, second=half[1])
                name = half[0]
                place = item, _below(below, name)
                _, known = self._halves.setdefault(place, (one, []))
                known.extend(parts)
            else:
                self._entries.tensor(item, _below(below, name), one, parts)

    def finish(self) -> None:
        """Add the tensors whose halves have keys of their own."""
        for (item, fqn), (spec, chunks) in self._halves.items():
            self._entries.tensor(item, fqn, spec, chunks)


def regridded(key: str, spec: TensorSpec, chunks: Chunks, shape: Any) -> tuple[TensorSpec, Chunks]:
    """Return a tensor in its own shape that was saved as flat ranges of the parts of a grid.

    Megatron before 0.16 saved states so (`fully_sharded_model_space`).  The last dimension of `spec` numbers
    the elements of a part, and the others number the parts.
    """
    grid, numel = spec.shape[:-1], spec.shape[-1] if spec.shape else 0
    good = isinstance(shape, tuple) and len(shape) == len(grid) and all(type(n) is int for n in shape)
    if not good or any(parts < 1 or n % parts for n, parts in zip(shape, grid, strict=True)):
        raise CorruptError(f"{shown(key)} was saved in a grid of {spec.shape}, and not of its shape {shape}")
    part = tuple(n // parts for n, parts in zip(shape, grid, strict=True))
    if prod(part) != numel:
        raise CorruptError(f"{shown(key)} has parts of {numel} elements, and not of {part}")
    found: Chunks = []
    for box, extent in chunks:
        if any(length != 1 for length in box.lengths[:-1]):
            raise CorruptError(f"{shown(key)} has a range in more than one part of its grid")
        corner, start = [at * n for at, n in zip(box.offsets, part, strict=False)], extent.start
        for inside in flat_range_boxes(part, box.offsets[-1], box.lengths[-1]):
            at = tuple(low + offset for low, offset in zip(corner, inside.offsets, strict=True))
            nbytes = inside.numel * spec.itemsize
            found.append((Box(at, inside.lengths), Extent(extent.file, start, nbytes)))
            start += nbytes
    return TensorSpec(shape, spec.dtype), found


def _below(keys: tuple[str, ...], name: str) -> str:
    return named(name if key == "{}" else key for key in keys)


def _divided(key: str, spec: TensorSpec, chunks: Chunks) -> list[tuple[str, TensorSpec, Chunks]]:
    """Return the tensors of layers and experts in one of Megatron's."""
    found = [(key, spec, chunks)]
    for stacks, name in ((names.stacks_layers, names.with_layer), (names.stacks_experts, names.with_expert)):
        if stacks(key) and all(map(_is_numbered, found)):
            found = [part for one in found for part in _along_first(*one, name)]
            key = found[0][0] if found else key
    return [(names.plain(name), one, parts) for name, one, parts in found]


def _is_numbered(one: tuple[str, TensorSpec, Chunks]) -> bool:
    """Return whether the first dimension only numbers parts: each chunk belongs to one of them."""
    _, spec, chunks = one
    return bool(spec.shape) and spec.numel > 0 and all(box.lengths[0] == 1 for box, _ in chunks)


def _along_first(
    key: str, spec: TensorSpec, chunks: Chunks, name: Callable[[str, int], str]
) -> list[tuple[str, TensorSpec, Chunks]]:
    """Return the tensors along the first dimension, without that dimension."""
    inner = TensorSpec(spec.shape[1:], spec.dtype)
    parts: list[Chunks] = [[] for _ in range(spec.shape[0])]
    for box, extent in chunks:
        parts[box.offsets[0]].append((Box(box.offsets[1:], box.lengths[1:]), extent))
    return [(name(key, number), inner, part) for number, part in enumerate(parts)]


def _as_half(spec: TensorSpec, chunks: Chunks, *, second: bool) -> tuple[TensorSpec, Chunks]:
    """Return one half of a gated layer as a part of the whole."""
    rows, *rest = spec.shape
    start = rows if second else 0
    moved = [(Box((box.offsets[0] + start, *box.offsets[1:]), box.lengths), extent) for box, extent in chunks]
    return TensorSpec((2 * rows, *rest), spec.dtype), moved


def _name_of(key: str) -> tuple[str, str]:
    """Return the item and the name of an entry that is one of Megatron's as a whole."""
    if (flat := names.flat_name(key)) is not None:
        return _OPTIMIZER, flat
    if (state := names.state_of(key)) is not None:
        return _OPTIMIZER, named(("state", key.removeprefix(state[0]), state[1]))
    return MODEL, named((key,))


def _add_object(entries: ForeignEntries, key: str, read: Callable[[], PickledEntry]) -> None:
    """Add one of Megatron's objects, each of which is the only member of a list."""
    found = names.saved_object_of(key)
    item, keys = _place_of(found)
    try:
        entry = read()
    except UnreadError as error:
        entries.unread(item, keys, error.message)
        return
    value = entry.value
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if found.is_extra and _is_empty(value):
        return
    if (flat := names.flat_name(found.name)) is not None:
        if not flat.endswith("/param_state"):
            value = Whole(value)
        elif isinstance(value, dict):
            value = {
                f"gbuf_idx_{key}" if type(key) is int else key: _renamed(one) for key, one in value.items()
            }
    elif not isinstance(value, TensorView):
        value = Whole(value)
    with_file = entry.file

    def place(item: str, fqn: str, view: TensorView) -> None:
        assert with_file is not None
        add_extent(entries, item, fqn, view, with_file.extent(view))

    def inline(view: TensorView) -> bytes:
        assert with_file is not None
        extent = with_file.extent(view)
        return part_of(entries.storage, extent.file, extent.start, extent.nbytes)

    entries.inline = inline
    entries.nested(item, keys, value, place)


def _place_of(found: names.GridPlace) -> tuple[str, list[str]]:
    """Return the item and the keys of an object: beside the model, unless it is a state of something else."""
    if (flat := names.flat_name(found.name)) is not None:
        item, keys = _OPTIMIZER, flat.split("/")
    else:
        item, keys = MODEL if "." in found.name else found.name, [found.name]
    return item, keys if found.is_alone else [*keys, found.shard]


def _is_empty(value: Any) -> bool:
    """Return whether the extra state of a module holds nothing."""
    if isinstance(value, PickledObject) and value.name == "_io.BytesIO":
        return isinstance(value.state, tuple) and not value.state[0]
    return value is None or value == b"" or (isinstance(value, TensorView) and not value.spec.numel)


def _renamed(buffer: Any) -> Any:
    """Return the states of a buffer by their names in reknit."""
    if not isinstance(buffer, dict):
        return buffer
    return {
        dtypes: {names.state_name(name): one for name, one in states.items()}
        if isinstance(states, dict)
        else states
        for dtypes, states in buffer.items()
    }


def _add_common(entries: ForeignEntries) -> None:
    """Add the common state of all ranks, and the options of the optimizer that are in it."""
    storage = entries.storage
    try:
        file = TorchFile(storage, _COMMON, 0, entries.size(_COMMON), _WORDS)
    except StorageNotFoundError:
        entries.unread(_COMMON_ITEM, (), f"{_COMMON} is missing")
        return
    except UnreadError as error:
        entries.unread(_COMMON_ITEM, (), error.message)
        return
    file.locate(views_in(file.value, [], set()))

    def place(item: str, fqn: str, view: TensorView) -> None:
        add_extent(entries, item, fqn, view, file.extent(view))

    def inline(view: TensorView) -> bytes:
        extent = file.extent(view)
        return part_of(storage, extent.file, extent.start, extent.nbytes)

    entries.inline = inline
    if not isinstance(file.value, dict):
        entries.nested(_COMMON_ITEM, (), file.value, place)
        return
    for key, value in file.value.items():
        entries.nested(_COMMON_ITEM, (key,), Whole(value), place)
    step = file.value.get("iteration")
    entries.step = step if type(step) is int and step >= 0 else None
    _add_options(entries, file.value.get(_OPTIMIZER), place)


def _add_options(entries: ForeignEntries, saved: Any, place: Place) -> None:
    """Add the options of an optimizer, or of a chain, that all ranks share."""
    parts = [saved] if isinstance(saved, dict) and not _is_chain(saved) else list((saved or {}).values())
    groups: list[Any] = []
    for part in filter(lambda part: isinstance(part, dict), parts):
        inner = part.get(_OPTIMIZER, part)
        listed = inner.get("param_groups") if isinstance(inner, dict) else None
        if isinstance(listed, list):
            step = _common_step(inner)
            groups += [_group(group, step) for group in listed]
        if "grad_scaler" in part and "shared/grad_scaler" not in entries.values.get(_OPTIMIZER, {}):
            entries.nested(_OPTIMIZER, ("shared", "grad_scaler"), Whole(part["grad_scaler"]), place)
    if groups:
        entries.nested(_OPTIMIZER, (names.GROUPS,), Whole(groups), place)


def _is_chain(saved: dict[Any, Any]) -> bool:
    return bool(saved) and all(type(key) is int for key in saved)


def _common_step(inner: dict[Any, Any]) -> Any:
    state = inner.get("state")
    return state.get("common_step") if isinstance(state, dict) else None


def _group(group: Any, step: Any) -> Any:
    """Return the options of a group with its number of steps, and without its numbers of parameters."""
    if not isinstance(group, dict):
        return group
    kept = {key: one for key, one in group.items() if key != "params"}
    return kept if step is None else {**kept, "step": step}
