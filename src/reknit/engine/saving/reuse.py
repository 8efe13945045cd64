"""Take over the files whose bytes did not change since the last save, instead of writing them.

The bytes of every save are digested, and compared with the digests in the last committed checkpoint of the
same folder.  Only if all digests are equal does the store link or copy the file (docs/decisions/0016).
"""

from __future__ import annotations

import logging
import re
import threading
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, structs

from reknit.engine import messages
from reknit.engine.memory.workers import run_jobs
from reknit.engine.memory.write import Outgoing, Written, discard
from reknit.engine.stored.at_path import manifest_in
from reknit.errors import ReknitError
from reknit.format import paths
from reknit.format.checksum import BLOCK_NBYTES, digest, num_blocks
from reknit.format.data_file import LABEL_NBYTES, relabelled, write_id_in
from reknit.planner.columns import packed, unpacked
from reknit.storage.base import CopiesFiles, HasFolderAbove, PerHost

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from reknit.engine.memory.workers import Arena
    from reknit.engine.saving.task import SaveTask
    from reknit.storage.base import Storage
    from reknit.types.manifest import FileEntry, Manifest


logger = logging.getLogger("reknit")

_MOST_LOOKS = 2
"""Folders beside a checkpoint that are looked at for an earlier one."""


def earlier_files(storage: Storage) -> dict[int, messages.EarlierFiles]:
    """Return the data files of each rank in the newest checkpoint of the folder of this path.

    That is the checkpoint at this path itself, or else the one beside it whose name differs in its last
    number only, and has the highest.  No other folder is looked at.  It is read for the first save of a
    process, and only to save writes, so without it, or if it cannot be read, all files are written.
    """
    if not isinstance(storage, CopiesFiles) or isinstance(storage, PerHost):
        return {}
    try:
        found = _newest_beside(storage)
    except ReknitError as error:
        logger.warning(
            "%s: the save writes all files and takes none over: the earlier checkpoint cannot be read: %s",
            storage.url,
            error.message,
        )
        return {}
    if found is None:
        return {}
    folder, manifest = found
    by_rank: dict[int, list[FileEntry]] = {}
    for file in manifest.files:
        name = paths.parse_path(file.path)
        if name is not None and name.kind == "data" and name.rank is not None:
            by_rank.setdefault(name.rank, []).append(file)
    return {
        rank: messages.EarlierFiles(
            folder,
            [file.path for file in files],
            packed([file.nbytes for file in files], "i8"),
            packed([one for file in files for one in file.digests], "u8"),
        )
        for rank, files in by_rank.items()
    }


def _newest_beside(storage: Storage) -> tuple[str, Manifest] | None:
    """Return the name and the manifest, with all files, of the newest checkpoint beside a path, or at it."""
    above = storage.above() if isinstance(storage, HasFolderAbove) else None
    if above is None:
        return None
    from reknit.engine.stored.file_checks import whole_manifest  # most saves have one before in this process

    holder, own = above
    begin, _, end = _parted(own)
    others = [
        (number, name)
        for name in (holder.folders() if begin is not None else [])
        if name != own and _parted(name)[::2] == (begin, end) and (number := _parted(name)[1]) is not None
    ]
    for name in [own, *(name for _, name in sorted(others, reverse=True)[:_MOST_LOOKS])]:
        place = holder.sub(name)
        manifest = manifest_in(place)
        if manifest is None or manifest.moved_to is not None or manifest.block_nbytes != BLOCK_NBYTES:
            continue
        return name, whole_manifest(place, manifest)
    return None


def _parted(name: str) -> tuple[str | None, int | None, str]:
    """Return the last number in a name, and the text before and behind it; without a number, None."""
    match = re.fullmatch(r"(.*?)([0-9]+)([^0-9]*)", name, re.DOTALL)
    return (match[1], int(match[2]), match[3]) if match else (None, None, "")


_MOST_COPIES = 16
"""Files that a store copies at once, as each request lasts until the copy is made."""
_LEAST_NBYTES = 1 << 20
"""Smaller files are written: a link or a copy costs as much."""


class _KnownFile(Struct, frozen=True):
    """A file of a committed checkpoint, the write id in its header, and the digest of its sample.

    The last two are None for a file that another process wrote.
    """

    file: Written
    write_id: str | None
    sample: int | None


class _KnownCheckpoint(Struct, frozen=True):
    """The files that a rank has in a committed checkpoint, by item and part."""

    storage: Storage
    files: Mapping[tuple[str, int], _KnownFile]


class Committed:
    """The files of the last checkpoint that a rank committed in each folder; thread-safe.

    Each process has only its own files, which may have been deleted since.
    """

    def __init__(self) -> None:
        self._last: dict[str, _KnownCheckpoint] = {}
        self._lock = threading.Lock()

    def beside(self, storage: Storage) -> _KnownCheckpoint | None:
        """Return the last checkpoint in the same folder as `storage`."""
        with self._lock:
            return self._last.get(_folder(storage))

    def keep(self, storage: Storage, files: Mapping[tuple[str, int], _KnownFile]) -> None:
        """Keep a checkpoint that is committed."""
        with self._lock:
            self._last.pop(_folder(storage), None)
            if files:
                self._last[_folder(storage)] = _KnownCheckpoint(storage, files)

    def keep_found(self, storage: Storage, found: messages.EarlierFiles | None) -> None:
        """Keep the files that the root found beside `storage`, unless this process has committed there."""
        if found is None or not isinstance(storage, HasFolderAbove) or (above := storage.above()) is None:
            return
        nbytes, digests = unpacked(found.nbytes, "i8"), unpacked(found.digests, "u8")
        ends = np.cumsum(num_blocks(nbytes))[:-1]
        files = {}
        for path, size, own in zip(found.paths, nbytes.tolist(), np.split(digests, ends), strict=True):
            name = paths.parse_path(path)
            if name is not None and name.item is not None:
                files[name.item, name.part] = _KnownFile(Written(path, size, own), None, None)
        with self._lock:
            self._last.setdefault(_folder(storage), _KnownCheckpoint(above[0].sub(found.folder), files))


class Reuse:
    """The data files of one rank in one save, and the earlier files that may have their bytes."""

    def __init__(
        self, task: SaveTask, committed: Committed, write_id: str, listed: Sequence[tuple[str, int, int]]
    ) -> None:
        """Name the files of this save; `listed` has the item, part and size of each."""
        self._task, self._committed, self._write_id = task, committed, write_id
        self.files = [
            Outgoing(paths.data_path(item, task.group.rank, write_id, part), nbytes)
            for item, part, nbytes in listed
        ]
        self._places = [each[:2] for each in listed]
        self._samples: dict[int, int] = {}
        self._taken: dict[int, _KnownFile] = {}
        self._last = committed.beside(task.storage)
        takes_over = task.options.reuse and isinstance(task.storage, CopiesFiles)
        self._known: dict[int, _KnownFile] = {}
        for number, (file, place) in enumerate(zip(self.files, self._places, strict=True)):
            known = self._last.files.get(place) if takes_over and self._last is not None else None
            if known is not None and known.file.nbytes == file.nbytes >= _LEAST_NBYTES:
                self._known[number] = known

    @property
    def nbytes(self) -> int:
        """Bytes of the files that were taken over."""
        return sum(known.file.nbytes for known in self._taken.values())

    @property
    def compares(self) -> bool:
        """Whether there are earlier files that may have the bytes of this save."""
        return bool(self._known)

    def may_equal(self, number: int) -> bool:
        """Return whether there is an earlier file of this size."""
        return number in self._known

    def note_sample(self, number: int, sample: Sequence[NDArray[np.uint8]]) -> bool:
        """Keep the digest of a sample for the next save; return whether an earlier file may have it."""
        self._samples[number] = digest(*sample)
        return number in self._known and self._known[number].sample in (None, self._samples[number])

    def equal(self, number: int, start: int, block: Sequence[NDArray[np.uint8]]) -> bool:
        """Return whether the earlier file has this block, under its own write id."""
        known = self._known[number]
        if not start:
            if (known := self._labelled(number)).write_id is None:
                return False
            begin, *rest = block
            label = relabelled(begin[:LABEL_NBYTES], self._write_id, known.write_id or "")
            block = label, begin[LABEL_NBYTES:], *rest
        return digest(*block) == int(known.file.digests[start // BLOCK_NBYTES])

    def take_over(self, numbers: Sequence[int], taken: dict[int, Written]) -> None:
        """Let the store copy the earlier files of these numbers, unless it refuses a file."""
        storage, last, recorder = self._task.storage, self._last, self._task.recorder
        assert isinstance(storage, CopiesFiles)
        assert last is not None

        def copy(number: int, _: Arena) -> None:
            known, path = self._known[number], self.files[number].path
            try:
                if storage.copy_from(last.storage, known.file.path, path, known.file.nbytes):
                    self._taken[number] = known
                    taken[number] = structs.replace(known.file, path=path)
            except BaseException as error:
                discard(self._task.storage, path)  # it is there perhaps, and only the answer was lost
                if isinstance(error, ReknitError):
                    error.sign(rank=recorder.rank, phase="write", path=f"{self._task.storage.url}/{path}")
                raise

        with recorder.phase("reuse") as running:
            threads = min(_MOST_COPIES, len(numbers))
            run_jobs(numbers, copy, threads=threads, arena_nbytes=1, budget_nbytes=threads)
            running.nbytes = self.nbytes

    def remember(self, written: Sequence[Written]) -> None:
        """Keep the files that were written or taken over, after their commit."""
        by_path = {file.path: file for file in written}
        files = {}
        for number, place in enumerate(self._places):
            taken = self._taken.get(number)
            write_id = self._write_id if taken is None else taken.write_id
            files[place] = _KnownFile(by_path[self.files[number].path], write_id, self._samples.get(number))
        self._committed.keep(self._task.storage, files)

    def _labelled(self, number: int) -> _KnownFile:
        """Return an earlier file with the write id of its header, which is read if it is unknown."""
        known = self._known[number]
        if known.write_id is None and self._last is not None:
            begin = bytearray(min(LABEL_NBYTES, known.file.nbytes))
            try:
                self._last.storage.read_into(known.file.path, 0, [memoryview(begin)])
            except ReknitError:  # deleted meanwhile: then the file is written
                return known
            known = self._known[number] = structs.replace(known, write_id=write_id_in(bytes(begin)))
        return known


def _folder(storage: Storage) -> str:
    """Return the URL of the folder above the checkpoint of a store."""
    return storage.url.rpartition("/")[0]
