"""Open a committed checkpoint: manifest, index and values, each checked before it is used."""

from __future__ import annotations

from datetime import datetime, timezone
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, structs

from reknit.engine.memory.workers import run_jobs
from reknit.engine.messages import OwnNames
from reknit.engine.stored.at_path import read_manifest
from reknit.engine.stored.file_checks import UNSOUND, from_replica, read_checked, read_once
from reknit.engine.stored.places import CHANGED, TRIES, changed, files_at, retry_if_changed
from reknit.engine.stored.renaming import Naming, Renamed, names_in, own_names, renamed
from reknit.errors import CheckpointNotFoundError, DroppedError, FormatError, MismatchError
from reknit.format import paths
from reknit.format.blob_codec import decode_blobs
from reknit.format.index import decode_index
from reknit.format.index.checks import check_extents
from reknit.format.manifest_file import decode_record
from reknit.types.manifest import Catalog
from reknit.types.shard import without_forms
from reknit.types.wanted import Terms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from mmap import mmap

    from reknit.errors import ReknitError
    from reknit.options import LoadOptions
    from reknit.storage.base import Storage
    from reknit.types.manifest import BlobFile, FileEntry, Index, Manifest
    from reknit.types.shard import TensorSpec

_Read = TypeVar("_Read")

_MOST_READERS = 64
"""Files of values that are read at once: an object store answers a request in tens of milliseconds."""


class OpenCheckpoint(Struct, eq=False, dict=True):
    """A checkpoint whose metadata is in memory.  `blobs[item][fqn]` are the values that all ranks share.

    `index`, `blobs` and `items` have the state's names; where `renamed` is given these may differ from those
    in the checkpoint, to which `manifest` keeps.  `source` is the store that has the files, which may have
    moved from `storage`; for a checkpoint of another program that is `foreign`.  `replicas` are other
    copies, for files that are damaged.
    """

    storage: Storage
    manifest: Manifest
    index: Index
    blobs: Mapping[str, Mapping[str, Any]]
    items: tuple[str, ...]
    allow_pickle: bool = False
    renamed: Renamed | None = None
    replicas: Sequence[Storage] = ()
    foreign: Storage | None = None

    def __post_init__(self) -> None:
        self.source: Storage = self.foreign or files_at(self.storage, self.manifest.moved_to)
        self.files: dict[str, FileEntry] = {file.path: file for file in self.manifest.files}
        self._own: dict[str, dict[str, Any]] = {}
        self._places: dict[str, dict[Any, list[BlobFile]]] = {}

    def read(self, read: Callable[[Storage], _Read]) -> _Read:
        """Read files of the checkpoint, again if they have moved meanwhile."""
        return retry_if_changed(lambda: self.source, read, lambda _, error: self._follow(error))

    def _follow(self, error: ReknitError) -> bool:
        """Return whether the files have moved, and take their new place as the source."""
        if (now := changed(self.storage, self.manifest, error, self.replicas)) is None:
            return False
        if now.write_id != self.manifest.write_id:
            error.remedy = "another checkpoint has replaced it meanwhile: open it again"
            return False
        self.manifest = structs.replace(self.manifest, moved_to=now.moved_to)
        self.source = files_at(self.storage, now.moved_to)
        return True

    @property
    def stored(self) -> Mapping[str, str]:
        """The names in the checkpoint of entries that have another name in the state."""
        return {} if self.renamed is None else self.renamed.stored

    def shown(self, name: str) -> str:
        """Return a name of the state with the one that it has in the checkpoint, where that differs."""
        return f"{name} (there {self.stored[name]})" if name in self.stored else name

    @property
    def offered(self) -> tuple[str, ...]:
        """All items that the checkpoint has, opened or not."""
        return self.manifest.items if self.renamed is None else self.renamed.items

    def catalog(self, terms: Terms | None = None) -> Catalog:
        """Return the catalog of the opened items for a load on these terms."""
        tensors: dict[str, dict[str, TensorSpec]] = {item: {} for item in self.items}
        for entry in self.index.tensors:
            if entry.item in tensors:
                tensors[entry.item][entry.fqn] = entry.spec
        coordinates = {
            item: tuple(
                dict(place) for place in dict.fromkeys(_place(file) for file in self._own_files(item))
            )
            for item in self.items
        }
        origin = self.manifest.origin
        return Catalog(
            items=self.items,
            tensors=tensors,
            blobs=self.blobs,
            coordinates=coordinates,
            own=self.own,
            terms=terms or Terms(),
            read_ahead=self.read_ahead,
            num_ranks=ranks if isinstance(ranks := origin.get("world_size"), int) else None,
            keys_as_text="Orbax" in (origin.get("format"), origin.get("imported")),
        )

    def blob_names(self) -> list[tuple[str, str]]:
        """Return (item, fqn) of all shared values of the opened items, in an order that all ranks share."""
        return [(item, fqn) for item in self.items for fqn in self.blobs[item]]

    def of_items(self, items: Sequence[str]) -> OpenCheckpoint:
        """Return the part for a rank that wants only these items."""
        index = self.index.of_items(frozenset(items))
        blobs = {item: values if item in items else {} for item, values in self.blobs.items()}
        return structs.replace(self, index=index, blobs=blobs, items=tuple(items))

    def own(self, item: str, coordinate: Mapping[str, int]) -> dict[str, Any]:
        """Read the values that the rank with this coordinate saved for itself; maybe none."""
        found: dict[str, Any] = {}
        for file in self._files_at(item, coordinate):
            if file.path not in self._own:
                self._read_own(file)
            values = self._own[file.path]
            found |= self.renamed.own(item, file.item, values) if self.renamed else values
        return found

    def read_ahead(self, item: str, coordinates: Sequence[Mapping[str, int]]) -> None:
        """Read the files for later calls of `own`, several at once."""
        files = [file for place in coordinates for file in self._files_at(item, place)]
        run_jobs(
            [file for file in files if file.path not in self._own],
            lambda file, _: self._read_own(file),
            threads=min(len(files), _MOST_READERS) or 1,
            arena_nbytes=1,
            budget_nbytes=_MOST_READERS,
        )

    def names_of(self, file: BlobFile) -> list[str]:
        """Read the names of the values in a file; the values stay encoded."""
        entry, nbytes = self.files[file.path], self.manifest.block_nbytes
        return names_in(self.read(lambda source: read_checked(source, entry, nbytes)))

    def _read_own(self, file: BlobFile) -> None:
        data = read_once(self.source, self.files[file.path], self.manifest.block_nbytes, self.replicas)
        self._own[file.path] = decode_blobs(data, allow_pickle=self.allow_pickle, writable=True)

    def _files_at(self, item: str, coordinate: Mapping[str, int]) -> list[BlobFile]:
        """Return the files that the ranks with this coordinate wrote of an item; there may be thousands."""
        if item not in self._places:
            places: dict[Any, list[BlobFile]] = {}
            for file in self._own_files(item):
                places.setdefault(_place(file), []).append(file)
            self._places[item] = places
        return self._places[item].get(tuple(sorted(coordinate.items())), [])

    def _own_files(self, item: str) -> list[BlobFile]:
        """Return the files in which ranks saved values of their own for an item."""
        items = (item,) if self.renamed is None else self.renamed.sources.get(item, ())
        return [file for file in self.manifest.blobs if file.coordinate is not None and file.item in items]


def _place(file: BlobFile) -> tuple[tuple[str, int], ...]:
    """Return a coordinate as something to be compared."""
    return tuple(sorted((file.coordinate or {}).items()))


class Contents(Struct, frozen=True):
    """The checked metadata of a checkpoint; `blobs` are files of shared values, by path.

    `opened` gives the memory of the files `once` back, and may be called once then.
    """

    manifest: Manifest
    index: Index
    blobs: Mapping[str, bytes | bytearray | mmap]
    own: OwnNames | None = None
    once: frozenset[str] = frozenset()


def read_opened(
    storage: Storage,
    items: Sequence[str] | None,
    *,
    own: bool = False,
    replicas: Sequence[Storage] = (),
    most_kept: int | None = None,
) -> Contents:
    """Read manifest, index and shared values of `items` (None: all); see `read_manifest` for errors.

    With `own`, find the names of ranks' own values too, of all items.  Of the values' files, the smallest
    ones with `most_kept` bytes in all are kept; `opened` gives the memory of the others back.  A missing or
    damaged file is read from the first of `replicas` that has it: the manifest vouches for itself and all
    others.  If the files move meanwhile, or another checkpoint comes, all is read again.
    """
    try:
        tries = TRIES
        while True:
            tries -= 1
            try:
                manifest = _decoded(read_manifest(storage), storage)
            except UNSOUND as error:
                manifest = from_replica(error, replicas, lambda place: _decoded(read_manifest(place), place))
            place = files_at(storage, manifest.moved_to)
            try:
                return _contents(place, manifest, items, replicas, own=own, most_kept=most_kept)
            except CHANGED as error:
                if not tries or changed(storage, manifest, error, replicas) is None:
                    raise
    except CheckpointNotFoundError as error:
        absent = error
    if (found := _opener().read_foreign(storage)) is None:
        raise absent
    return Contents(found.manifest, found.index, found.blobs, OwnNames([], []) if own else None)


def _opener() -> Any:
    """Return the module that opens the checkpoints of other programs."""
    from reknit.engine.stored.hints import opener  # a load of a checkpoint of reknit needs none

    return opener()


def unknown_items(
    absent: Sequence[str], items: Sequence[str], manifest: Manifest, url: str, remedy: str = ""
) -> MismatchError:
    """Return the error of items that a checkpoint, which offers `items`, does not have."""
    if gone := [(item, manifest.dropped[item]) for item in absent if item in manifest.dropped]:
        days = [(item, datetime.fromtimestamp(at, timezone.utc)) for item, at in gone]
        when = ", ".join(f"{item!r} on {day:%Y-%m-%d}" for item, day in days)
        return DroppedError(
            f"the checkpoint has no longer all items: to save space, it was dropped {when}",
            path=url,
            remedy=f"load another step, or only {', '.join(map(repr, items))}",
        )
    return MismatchError(
        f"the checkpoint has no item {', '.join(map(repr, absent))}",
        path=url,
        remedy=f"its items are {', '.join(map(repr, items))}" + (f"; {remedy}" if remedy else ""),
    )


def _contents(
    storage: Storage,
    manifest: Manifest,
    items: Sequence[str] | None,
    replicas: Sequence[Storage],
    *,
    own: bool,
    most_kept: int | None,
) -> Contents:
    """Read the files that the manifest lists."""
    data = read_checked(storage, manifest.index, manifest.block_nbytes, replicas)
    if manifest.table is not None:  # the index lists the files of many ranks
        from reknit.format.file_table import with_table

        manifest = with_table(manifest, data)
    files = {file.path: file for file in manifest.files}
    shared = [
        files[blob.path]
        for blob in manifest.blobs
        if blob.coordinate is None and (items is None or blob.item in items)
    ]
    once = frozenset[str]() if most_kept is None else _beyond(most_kept, shared)
    blobs: dict[str, bytes | bytearray | mmap] = {}
    for file in shared:
        read = read_once if file.path in once else read_checked
        blobs[file.path] = read(storage, file, manifest.block_nbytes, replicas)
    index = decode_index(data)
    check_extents(index, {file.path: file.nbytes for file in manifest.files})
    return Contents(manifest, index, blobs, own_names(storage, manifest, replicas) if own else None, once)


def _beyond(most: int, files: Sequence[FileEntry]) -> frozenset[str]:
    """Return the paths of the files without the smallest ones, which have at most so many bytes in all."""
    by_size = sorted(files, key=lambda file: file.nbytes)
    sums = accumulate(file.nbytes for file in by_size)
    return frozenset(file.path for file, total in zip(by_size, sums, strict=True) if total > most)


def opened(
    storage: Storage,
    contents: Contents,
    items: Sequence[str] | None,
    options: LoadOptions,
    replicas: Sequence[Storage] = (),
    *,
    writable: bool = False,
) -> OpenCheckpoint:
    """Return a checkpoint with `items` (None: all) of the contents of `read_opened`, or of the root's part.

    `writable` is as for `decode_blobs`.  The state's names are given here, once, if the options have others
    than the checkpoint; then everything must have been read.
    """
    manifest = contents.manifest
    wanted = manifest.items if items is None else tuple(items)
    blobs: dict[str, dict[str, Any]] = {item: {} for item in (*manifest.items, *wanted)}
    for file in manifest.blobs:
        if file.path in contents.blobs:
            data = contents.blobs[file.path]
            values = decode_blobs(data, allow_pickle=options.allow_pickle, writable=writable)
            blobs[file.item].update(without_forms(values))
    foreign = None if manifest.other is None else _opener().store_of(storage, manifest.other)
    whole = OpenCheckpoint(
        storage=storage,
        manifest=manifest,
        index=contents.index,
        blobs=blobs,
        items=wanted,
        allow_pickle=options.allow_pickle,
        replicas=replicas,
        foreign=foreign,
    )
    if (naming := Naming.of(options)) is None:
        return whole
    assert contents.own is not None  # it is read where names are to be changed
    return _renamed(whole, naming, items, contents.own)


def _renamed(
    whole: OpenCheckpoint, naming: Naming, items: Sequence[str] | None, own: OwnNames
) -> OpenCheckpoint:
    """Return a checkpoint under the state's names."""
    names = renamed(
        naming=naming,
        items=whole.manifest.items,
        index=whole.index,
        blobs=whole.blobs,
        own=own.names,
        unknown=own.unknown,
    )
    wanted = names.items if items is None else tuple(items)
    blobs = {item: names.blobs.get(item, {}) for item in (*names.items, *wanted)}
    return structs.replace(whole, index=names.index, blobs=blobs, items=wanted, renamed=names)


def _decoded(data: bytes, storage: Storage) -> Manifest:
    """Return the manifest; errors say of which checkpoint."""
    try:
        return decode_record(data)
    except FormatError as error:
        error.path = f"{storage.url}/{paths.MANIFEST_PATH}"
        error.remedy = error.remedy or "restore the file, or load another checkpoint"
        raise
