"""Checkpoints of torch.distributed.checkpoint in place, and of programs that write the same metadata.

`.metadata` is a pickle, which is read through a table.  Each chunk of a tensor is an archive of torch.save in
a larger file; its bytes lie there as they are, so a box of a tensor is a range of that file.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import CorruptError, FormatError, shown
from reknit.integrations.formats.entries import (
    MODEL,
    Chunks,
    ForeignEntries,
    named,
    nested_options,
    state_keys,
    tensor_value,
)
from reknit.integrations.formats.pickles import (
    MAX_PICKLE_NBYTES,
    PickledObject,
    UnreadError,
    Vocabulary,
    read_pickle,
)
from reknit.integrations.formats.small_reads import LOCAL_MARK, do_each, part_of
from reknit.integrations.formats.torch_values import TORCH, TensorView, dtype_of
from reknit.integrations.torch_save.files import (
    TorchFile,
    add_extent,
    add_rest,
    extent_of,
    single_tensor,
    views_in,
)
from reknit.plugins.format import Box, Extent, Tagged, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.plugins.format import Storage

METADATA = ".metadata"
_META = "meta.pt"
_OPTIMIZER = "optimizer"
_OF_OPTIMIZERS = ("state", "param_groups")
_FAMILIES = (
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.",
    "megatron.core.dist_checkpointing.",
    "bytecheckpoint.",
)
"""Beginnings of the names of classes whose objects are data in this pickle."""
_WORDS = Vocabulary(TORCH.builders, TORCH.classes, TORCH.names, _FAMILIES)

Path = tuple[Any, ...]


class DcpFolder(NamedTuple):
    """A folder with metadata, and the entries that it adds to.

    `path` ends with a slash if the folder is a part of the checkpoint.  In a `raw` one, the bytes of tensors
    have no archives around them.
    """

    entries: ForeignEntries
    path: str = ""
    raw: bool = False


def read_folder(storage: Storage) -> ForeignEntries:
    """Return the entries of a checkpoint."""
    entries = ForeignEntries(storage)
    add_folder(DcpFolder(entries))
    add_rest(entries, _META)
    return entries


class FolderTable(NamedTuple):
    """The entries of a folder by name: specs, places, keys in the state dict, and notes of Megatron."""

    specs: dict[Any, Any]
    places: dict[Any, list[tuple[Path, PickledObject]]]
    paths: dict[Any, Any]
    of_megatron: dict[Any, Any]


def read_table(folder: DcpFolder) -> FolderTable:
    """Return the entries of a folder.  Raises `FormatError` for metadata of another form."""
    data = folder.entries.storage.get(folder.path + METADATA, limit=MAX_PICKLE_NBYTES)
    metadata = read_pickle(data, _WORDS)
    if not isinstance(metadata, PickledObject):
        raise FormatError(f"{METADATA} is not the metadata of a checkpoint")
    specs, places = metadata.field("state_dict_metadata"), metadata.field("storage_data")
    paths = (metadata.state or {}).get("planner_data")
    if not isinstance(specs, dict) or not isinstance(places, dict):
        raise FormatError(f"{METADATA} has no tables of entries and places")
    stored: dict[str, list[tuple[Path, PickledObject]]] = {}
    for index, place in places.items():
        if not isinstance(index, PickledObject) or not isinstance(place, PickledObject):
            raise FormatError(f"{METADATA} has a place that is not one")
        offsets = (index.state or {}).get("offset")
        stored.setdefault(index.field("fqn"), []).append((() if offsets is None else offsets, place))
    notes = (metadata.state or {}).get("mcore_data")
    tables = (each if isinstance(each, dict) else {} for each in (paths, notes))
    return FolderTable(specs, stored, *tables)


def add_folder(folder: DcpFolder, renamed: Callable[[Path], Path] = lambda keys: keys) -> None:
    """Add all entries of a folder with metadata; `renamed` returns the keys of an entry in reknit."""
    table = read_table(folder)
    keys = _paths(table.specs, table.paths, renamed)
    values: dict[str, Any] = {}
    for name in table.specs:
        if is_tensor(table, name) or not (where := table.places.get(name)):
            continue
        try:
            values[name] = object_at(folder, where[0][1])
        except UnreadError as error:
            item, *rest = keys[name]
            folder.entries.unread(str(item), state_keys(item, rest), error.message)
    options = _add_tensors(folder, table, keys)
    _add_values(folder, values, keys, options)


def is_tensor(table: FolderTable, name: Any) -> bool:
    """Return whether an entry is a tensor."""
    return _is_a(table.specs[name], "TensorStorageMetadata")


def _is_a(value: Any, kind: str) -> bool:
    return isinstance(value, PickledObject) and value.name.rpartition(".")[2] == kind


def _paths(specs: dict[Any, Any], paths: dict[Any, Any], renamed: Callable[[Path], Path]) -> dict[str, Path]:
    """Return the item and the keys of each entry.  The first key is the item, if there are several.

    Tensors at the top are those of a model that was saved without a name, and a flattened state of an
    optimizer may lie beside them.
    """
    found: dict[str, Path] = {}
    for name in specs:
        keys = paths.get(name, (name,))
        if not isinstance(name, str) or not isinstance(keys, tuple) or not keys:
            raise FormatError(f"an entry of the metadata has the name {shown(name)}")
        found[name] = renamed(keys)
    nested = {str(keys[0]) for keys in found.values() if len(keys) > 1}
    top = [name for name, keys in found.items() if len(keys) == 1]
    if any(str(found[name][0]).startswith("param_groups.") for name in top):
        flat = [name for name in top if str(found[name][0]).startswith(("state.", "param_groups."))]
        found.update((name, (_OPTIMIZER, *found[name])) for name in flat)
        top = [name for name in top if name not in {*flat}]
    tensors = [name for name in top if _is_a(specs[name], "TensorStorageMetadata")]
    if MODEL not in nested:
        chosen = _parameters({name: specs[name] for name in tensors}, found, alone=not nested)
        if chosen or not nested:  # a value with a dot, such as an extra state, is that of a module
            chosen |= {name for name in top if name not in tensors and "." in str(found[name][0])}
        found.update((name, (MODEL, *found[name])) for name in top if name in chosen)
    return found


def _parameters(tensors: dict[str, Any], found: dict[str, Path], *, alone: bool) -> set[str]:
    """Return the tensors at the top that are parameters: those with dots, or with an optimizer's states.

    Without such states, all tensors are parameters if they are `alone`.  Otherwise those of floats are,
    which are not counters, if other tensors have dots.
    """
    parts = [".".join(map(str, keys[1:])).split(".") for keys in found.values() if len(keys) > 1]
    of_optimizers = {".".join(each[1:-1]) for each in parts if each[0] in _OF_OPTIMIZERS}
    names = {name: str(found[name][0]) for name in tensors}
    known = {name for name in tensors if names[name] in of_optimizers}
    dotted = {name for name in tensors if "." in names[name]}
    if known:
        return known | dotted
    if alone:
        return {*tensors}
    dtypes = {name: _properties(tensors[name].field("properties")) for name in dotted and tensors}
    return dotted | {name for name, dtype in dtypes.items() if "float" in getattr(dtype, "name", "")}


def _add_tensors(folder: DcpFolder, table: FolderTable, keys: dict[str, Path]) -> dict[Path, Tagged]:
    """Add the tensors, with the ranges of their chunks; return numbers in options of optimizers as values."""
    located = locate(folder, table)
    options: dict[Path, Tagged] = {}
    for name, (spec, chunks) in located.tensors.items():
        item, *rest = keys[name]
        if _is_option(keys[name]) and spec.numel == 1:
            extent = chunks[0][1]
            data = part_of(folder.entries.storage, extent.file, extent.start, extent.nbytes)
            options[keys[name]] = tensor_value(spec, data)
            continue
        folder.entries.tensor(str(item), named(state_keys(item, rest)), spec, chunks)
    for name, why in located.unread.items():
        item, *rest = keys[name]
        folder.entries.unread(str(item), state_keys(item, rest), why)
    return options


def _is_option(path: Path) -> bool:
    """Return whether an entry is an option of a group of an optimizer."""
    return "param_groups" in path[1:] or str(path[-1]).startswith("param_groups.")


class Located(NamedTuple):
    """The tensors of a folder by name, with their chunks; `unread` are reasons, by the names of others."""

    tensors: dict[str, tuple[TensorSpec, Chunks]]
    unread: dict[str, str]


def locate(folder: DcpFolder, table: FolderTable) -> Located:
    """Return all tensors of a folder, with the ranges of their chunks."""
    made: dict[str, tuple[TensorSpec, Chunks]] = {}
    unread: dict[str, str] = {}
    jobs: list[tuple[str, TensorSpec, Box, PickledObject]] = []
    for name in table.specs:
        if not is_tensor(table, name):
            continue
        metadata, where = table.specs[name], table.places.get(name, [])
        try:
            dtype = dtype_of(_properties(metadata.field("properties")))
            paths = [_path(folder, place) for _, place in where]
        except UnreadError as error:
            unread[name] = error.message
            continue
        shape = metadata.field("size")
        lengths = {}
        for chunk in metadata.field("chunks"):
            lengths[tuple(chunk.field("offsets"))] = tuple(chunk.field("sizes"))
        spec = TensorSpec(tuple(shape), dtype)
        made[name] = spec, []
        for path in paths:
            folder.entries.size(path)
        for offsets, place in where:
            at = tuple(offsets) if offsets else (0,) * len(spec.shape)
            if at not in lengths:
                raise FormatError(f"a place of {name[:200]!r} is not that of a chunk")
            jobs.append((name, spec, Box(at, lengths[at]), place))
        if not spec.numel:
            made[name] = spec, []

    def find(job: tuple[str, TensorSpec, Box, PickledObject]) -> None:
        name, spec, box, place = job
        try:
            made[name][1].extend(_chunk(folder, spec, box, place))
        except UnreadError as error:
            unread[name] = error.message

    do_each(jobs, find)
    return Located({name: each for name, each in made.items() if name not in unread}, unread)


def _properties(made: Any) -> Any:
    """Return the dtype among the properties of a tensor."""
    if isinstance(made, PickledObject) and isinstance(made.state, tuple) and made.state:
        return made.state[0]
    return made.field("dtype") if isinstance(made, PickledObject) else None


def _path(folder: DcpFolder, place: PickledObject) -> str:
    path = place.field("relative_path")
    if not isinstance(path, str):
        raise FormatError("a place in the metadata has no path")
    if (place.state or {}).get("transform_descriptors"):
        raise UnreadError(f"{shown(path)} was written through transforms, which reknit does not undo")
    return folder.path + path


def _chunk(folder: DcpFolder, spec: TensorSpec, box: Box, place: PickledObject) -> Chunks:
    """Return the chunk of a box, with the range of its bytes."""
    path, start, nbytes = _bounds(folder, place)
    if folder.raw:
        if nbytes != box.numel * spec.itemsize:
            raise CorruptError(f"{path} has {nbytes} bytes at {start}, the metadata says {spec.dtype}{box}")
        return [(box, Extent(path, start, nbytes))]
    entries = folder.entries
    found = single_tensor(entries.storage, path, start, nbytes)
    if found is not None:
        view, extent = found.view, extent_of(found.view, path, start + found.start)
    else:
        file = TorchFile(entries.storage, path, start, nbytes)
        view = file.value
        if not isinstance(view, TensorView):
            raise CorruptError(f"{path} has something else than a tensor at byte {start}")
        extent = file.extent(view)
    if view.spec.dtype != spec.dtype or view.spec.numel != prod(box.lengths):
        raise CorruptError(f"{path} has {view.spec} at byte {start}, the metadata says {spec.dtype}{box}")
    entries.size(extent.file)
    return [(box, extent)]


def _bounds(folder: DcpFolder, place: PickledObject) -> tuple[str, int, int]:
    """Return the path, the start and the size in bytes of a place."""
    path = _path(folder, place)
    start, nbytes = place.field("offset"), place.field("length")
    if type(start) is not int or type(nbytes) is not int or start < 0 or nbytes < 0:
        raise FormatError(f"{shown(path)} has a place without a range")
    if start + nbytes > folder.entries.size(path):
        raise CorruptError(f"{path} ends before byte {start + nbytes}, where the metadata has an entry")
    return path, start, nbytes


class PickledEntry(NamedTuple):
    """A value of an entry, and its file, None for plain bytes."""

    value: Any
    file: TorchFile | None


def object_at(folder: DcpFolder, place: PickledObject, words: Vocabulary = _WORDS) -> PickledEntry:
    """Return the value at a place.  Raises `UnreadError` for one that needs the code of another program."""
    path, start, nbytes = _bounds(folder, place)
    entries = folder.entries
    if part_of(entries.storage, path, start, min(len(LOCAL_MARK), nbytes)) != LOCAL_MARK:
        if nbytes > MAX_PICKLE_NBYTES:
            raise FormatError(f"{path} has a value of {nbytes} bytes")
        return PickledEntry(part_of(entries.storage, path, start, nbytes), None)
    file = TorchFile(entries.storage, path, start, nbytes, words)
    file.locate(views_in(file.value, [], set()))
    return PickledEntry(file.value, file)


def _add_values(
    folder: DcpFolder, values: dict[str, PickledEntry], keys: dict[str, Path], options: dict[Path, Tagged]
) -> None:
    """Add the values, those of an optimizer under the names of its parameters."""
    entries = folder.entries
    groups: dict[Path, dict[Any, Any]] = {}
    for path, option in options.items():
        groups.setdefault(path[:1], {})[path[1:]] = option
    for name, held in values.items():
        path = keys[name]

        def place(item: str, fqn: str, view: TensorView, held: PickledEntry = held) -> None:
            assert held.file is not None
            add_extent(entries, item, fqn, view, held.file.extent(view))

        if _is_option(path):
            groups.setdefault(path[:1], {})[path[1:]] = held.value
            continue
        entries.nested(str(path[0]), path[1:], held.value, place)
        if path in (("step",), ("train_state", "step")) and type(held.value) is int:
            entries.step = max(held.value, 0)
    for (item,), parts in groups.items():
        entries.nested(str(item), (), nested_options(parts), _refuse)


def _refuse(*_: Any) -> None:
    raise FormatError("the options of an optimizer hold a tensor, which reknit does not read")
