"""Files of torch.save in place: the pickle is read through a table, and tensors are ranges of the archive.

Files of before its archives are a few pickles, one behind another, and then the storages.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import CorruptError, FormatError, StorageNotFoundError, shown
from reknit.integrations.formats.derived import strided_path
from reknit.integrations.formats.entries import MODEL, ForeignEntries, named_states
from reknit.integrations.formats.pickles import MAX_PICKLE_NBYTES, Unreadable, Vocabulary, read_pickle
from reknit.integrations.formats.small_reads import (
    LOCAL_MARK,
    LOCAL_NBYTES,
    Archive,
    content_at,
    do_each,
    part_of,
)
from reknit.integrations.formats.torch_values import (
    TORCH,
    StorageRef,
    TensorView,
    legacy_storage_of,
    storage_of,
)
from reknit.plugins.format import Box, Extent

if TYPE_CHECKING:
    from reknit.plugins.format import Storage

_HEAD_NBYTES = 2 << 10
_GROUPS = {"state_dict": MODEL, "module": MODEL, "optim": "optimizer"}
"""Usual names of the model and the optimizer in files of torch.save, and the items that they become."""
_LISTS = {"optimizer_states": "optimizer", "lr_schedulers": "scheduler", "param_schedulers": "scheduler"}
"""Names of lists of state dicts, of Lightning and MMEngine, and the items that their members become."""
_ALONE = {
    "optimizer": {"state", "param_groups"},
    "scheduler": {"last_epoch", "_step_count"},
    "scaler": {"scale", "growth_factor", "_growth_tracker"},
}
"""Names in a state dict that is a file by itself, and the item that it becomes."""
_STEPS = ("global_step", "step", "iteration")
_HEADS = (64 << 10, 4 << 20, MAX_PICKLE_NBYTES)
"""Bytes that are read for the pickles, until they are whole."""
_PROTOCOL = 1001
_COUNT_NBYTES = 8


class TorchFile:
    """A file of torch.save, or a part of a file that is one."""

    def __init__(
        self, storage: Storage, path: str, start: int, nbytes: int, vocabulary: Vocabulary = TORCH
    ) -> None:
        self._archive = Archive(storage, path, start, nbytes)
        pickles = [name for name in self._archive.members if name.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].count("/") != 1:
            raise FormatError(f"{path} is not a file of torch.save: it has {len(pickles)} pickles")
        self._folder = pickles[0].removesuffix("data.pkl")
        order = f"{self._folder}byteorder"
        if order in self._archive.members and self._archive.read(order, 16) != b"little":
            raise FormatError(f"{path} was saved on a machine with another order of bytes")
        data = self._archive.read(pickles[0], MAX_PICKLE_NBYTES)
        self.value: Any = read_pickle(data, vocabulary, storage_of)
        self.path = path

    @property
    def saved_as(self) -> str:
        """The name under which torch saved the file, without its extension; ``archive`` for a stream."""
        return self._folder[:-1]

    def locate(self, views: list[TensorView]) -> None:
        """Find the places of the storages of these tensors, all at once."""
        for view in views:
            self._member(view)
        self._archive.locate({f"{self._folder}data/{view.storage.key}" for view in views})

    def extent(self, view: TensorView) -> Extent:
        """Return the bytes of a tensor; a tensor with strides becomes a file that the store puts in order."""
        start = self._archive.locate([name := self._member(view)])[name]
        return extent_of(view, self.path, start)

    def _member(self, view: TensorView) -> str:
        name = f"{self._folder}data/{view.storage.key}"
        member = self._archive.members.get(name)
        if member is None or member.method or member.nbytes < view.storage.nbytes:
            raise CorruptError(f"{self.path} has no storage {shown(view.storage.key)} of the right size")
        return name


def extent_of(view: TensorView, path: str, start: int) -> Extent:
    """Return the extent of a tensor whose storage begins at byte `start` of a file."""
    spec = view.spec
    if view.is_dense:
        return Extent(path, start + view.start, spec.nbytes)
    derived = strided_path(path, start + view.start, spec.itemsize, spec.shape, view.strides)
    return Extent(derived, 0, spec.nbytes)


def add_extent(entries: ForeignEntries, item: str, fqn: str, view: TensorView, extent: Extent) -> None:
    """Add a tensor that lies in one piece."""
    entries.size(extent.file)
    entries.tensor(item, fqn, view.spec, [(Box.whole(view.spec.shape), extent)])


def views_in(value: Any, found: list[TensorView], seen: set[int]) -> list[TensorView]:
    """Return the tensors in a nested value."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, TensorView):
            found.append(one)
        elif isinstance(one, dict | list | tuple) and id(one) not in seen:
            seen.add(id(one))
            stack += one.values() if isinstance(one, dict) else one
    return found


def add_file(entries: ForeignEntries, path: str, item: str | None = None) -> None:
    """Add all entries of a file of torch.save; with `item`, its tensors are those of this item."""
    nbytes = entries.size(path)
    if part_of(entries.storage, path, 0, min(len(LOCAL_MARK), nbytes)) == LOCAL_MARK:
        file = TorchFile(entries.storage, path, 0, nbytes)
        file.locate(views_in(file.value, [], set()))
        value, extent = file.value, file.extent
    else:
        old = LegacyFile(entries.storage, path, nbytes)
        value, extent = old.value, lambda view: extent_of(view, path, old.start(view))

    def place(item: str, fqn: str, view: TensorView) -> None:
        add_extent(entries, item, fqn, view, extent(view))

    def inline(view: TensorView) -> bytes:
        found = extent(view)
        return part_of(entries.storage, found.file, found.start, found.nbytes)

    entries.inline = inline
    for name, group in ({item: value} if item is not None else items_of(value)).items():
        entries.nested(name, (), value if item is not None else named_states(group), place)
    if item is None and isinstance(value, dict):
        step = next((value[key] for key in _STEPS if type(value.get(key)) is int), None)
        entries.step = None if step is None or step < 0 else step


def add_rest(entries: ForeignEntries, path: str) -> None:
    """Add the file in which Lightning and Fabric put the entries that are not of a model or an optimizer."""
    try:
        nbytes = entries.storage.size(path)
    except StorageNotFoundError:
        return
    items, step = {*entries.values, *(item for item, _ in entries.tensors)}, entries.step
    try:
        value = TorchFile(entries.storage, path, 0, nbytes).value
        if not isinstance(value, dict) or items & items_of(value).keys():
            raise FormatError("it is not the rest of a checkpoint of Lightning")
        add_file(entries, path)
    except FormatError as error:
        entries.notes[path] = f"it is not read: {error.message}"
    if entries.step is None:
        entries.step = step


def items_of(value: Any) -> dict[str, Any]:
    """Return the items of a saved value: the entries of a dict, or one model if its entries are tensors.

    The names of items are without ``state_dict``.  A list of dicts has its numbers as names.
    """
    if isinstance(value, list | tuple) and value and all(isinstance(one, dict) for one in value):
        return {str(number): one for number, one in enumerate(value)}
    if not isinstance(value, dict) or not all(isinstance(key, str) and key for key in value):
        return {MODEL: value}
    if (alone := next((name for name, keys in _ALONE.items() if keys <= value.keys()), None)) is not None:
        return {alone: value}
    loose = {key: one for key, one in value.items() if isinstance(one, TensorView)}
    items: dict[str, Any] = {}
    for key, one in value.items():
        if key not in loose:
            for name, part in _parts(key, one):
                items[key if name in value or name in items else name] = part
    if MODEL not in items and loose:
        return {**items, MODEL: loose}
    return {**items, **loose}


def _parts(key: str, value: Any) -> list[tuple[str, Any]]:
    """Return the items that an entry of a saved dict becomes, each with its name."""
    if key in _LISTS and isinstance(value, list) and value:
        numbers = [""] if len(value) == 1 else [f"_{number}" for number in range(len(value))]
        return [(f"{_LISTS[key]}{number}", one) for number, one in zip(numbers, value, strict=True)]
    name = _GROUPS.get(key) or key.removesuffix("_state_dict").removeprefix("state_dict_") or key
    return [(name if isinstance(value, dict) else key, value)]


class HeadTensor(NamedTuple):
    """A tensor that is the only content of an archive, and the first byte of its storage in the archive."""

    view: TensorView
    start: int


def single_tensor(storage: Storage, path: str, start: int, nbytes: int) -> HeadTensor | None:
    """Return the tensor that is an archive in a file, from one read of its head; None if that lacks facts."""
    head = part_of(storage, path, start, min(nbytes, _HEAD_NBYTES))
    if not head.startswith(LOCAL_MARK):
        raise CorruptError(f"{path} has no archive at byte {start}")
    name = head[LOCAL_NBYTES : LOCAL_NBYTES + int.from_bytes(head[26:28], "little")]
    if head[8:10] != b"\0\0" or not name.endswith(b"/data.pkl"):
        return None
    stream = io.BytesIO(head)
    stream.seek(content_at(head))
    view = read_pickle(stream, TORCH, storage_of)
    if not isinstance(view, TensorView):
        return None
    wanted, at = name[: -len(b"data.pkl")] + b"data/" + view.storage.key.encode(), stream.tell()
    while (at := head.find(LOCAL_MARK, at)) >= 0:
        is_wanted = head.startswith(wanted, at + LOCAL_NBYTES) and head[at + 8 : at + 10] == b"\0\0"
        if is_wanted and len(wanted) == int.from_bytes(head[at + 26 : at + 28], "little"):
            first = at + content_at(head, at)
            if first + view.storage.nbytes > nbytes:
                raise CorruptError(f"{path} has an archive at byte {start} that does not hold its tensor")
            return HeadTensor(view, first)
        at += 1
    return None


class LegacyFile:
    """A file of torch.save without an archive: its value, and the places of its storages."""

    def __init__(self, storage: Storage, path: str, nbytes: int) -> None:
        self._storage, self.path, self._nbytes = storage, path, nbytes
        self._storages: dict[str, StorageRef] = {}
        for number, most in enumerate(_HEADS):
            stream = io.BytesIO(part_of(storage, path, 0, min(most, nbytes)))
            self._storages.clear()
            try:
                value, keys = self._read(stream)
                break
            except FormatError:
                if nbytes <= most or number == len(_HEADS) - 1:
                    raise
        self.value: Any = value
        self._starts = self._places(keys, stream.tell())

    def _read(self, stream: io.BytesIO) -> tuple[Any, list[Any]]:
        """Return the value, and the keys of the storages in their order."""
        _, protocol, about, value, keys = (
            read_pickle(stream, TORCH, self._storage_of if number == 3 else None) for number in range(5)
        )
        if protocol != _PROTOCOL or not isinstance(about, dict) or not isinstance(keys, list):
            raise FormatError(f"{self.path} is not a file of torch.save of a known kind")
        if about.get("little_endian") is not True:
            raise FormatError(f"{self.path} was saved on a machine with another order of bytes")
        return value, keys

    def _storage_of(self, pid: Any) -> StorageRef:
        found = legacy_storage_of(pid)
        if isinstance(found, Unreadable):  # its size is unknown, and so are the places of those behind it
            raise FormatError(found.why)
        return self._storages.setdefault(found.key, found)

    def _places(self, keys: list[Any], at: int) -> dict[str, int]:
        """Return the first byte of each storage; before it stands its number of elements."""
        starts = {}
        for key in keys:
            ref = self._storages.get(key) if isinstance(key, str) else None
            if ref is None:
                raise CorruptError(f"{self.path} has the storage {shown(key)}, which no tensor uses")
            starts[ref.key] = at + _COUNT_NBYTES
            at += _COUNT_NBYTES + ref.nbytes
        if at > self._nbytes:
            raise CorruptError(f"{self.path} ends before its storages do")

        def check(key: str) -> None:
            count = part_of(self._storage, self.path, starts[key] - _COUNT_NBYTES, _COUNT_NBYTES)
            if int.from_bytes(count, "little") * self._storages[key].itemsize != self._storages[key].nbytes:
                raise CorruptError(f"{self.path} has a storage of another size than its pickle says")

        do_each(list(starts), check)
        return starts

    def start(self, view: TensorView) -> int:
        """Return the first byte of the storage of a tensor."""
        if view.storage.key not in self._starts:
            raise CorruptError(f"{self.path} has no storage {shown(view.storage.key)}")
        return self._starts[view.storage.key]
