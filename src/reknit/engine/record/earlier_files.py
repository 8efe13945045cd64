"""The files of the newest checkpoint beside a path, which a first save of a process may take over."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from reknit.engine import round_messages
from reknit.engine.packed_columns import packed
from reknit.engine.record.at_path import manifest_in
from reknit.engine.record.file_checks import whole_manifest
from reknit.errors import ReknitError
from reknit.format import paths
from reknit.format.checksum import BLOCK_NBYTES
from reknit.storage.base import CopiesFiles, HasFolderAbove, PerHost

if TYPE_CHECKING:
    from reknit.storage.base import Storage
    from reknit.types.manifest import FileEntry, Manifest

logger = logging.getLogger("reknit")

_MOST_LOOKS = 2
"""Folders beside a checkpoint that are looked at for an earlier one."""


def earlier_files(storage: Storage) -> dict[int, round_messages.EarlierFiles]:
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
        rank: round_messages.EarlierFiles(
            folder,
            [file.path for file in files],
            packed([file.nbytes for file in files], "i8"),
            packed([digest for file in files for digest in file.digests], "u8"),
        )
        for rank, files in by_rank.items()
    }


def _newest_beside(storage: Storage) -> tuple[str, Manifest] | None:
    """Return the name and the manifest, with all files, of the newest checkpoint beside a path, or at it."""
    above = storage.above() if isinstance(storage, HasFolderAbove) else None
    if above is None:
        return None
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
