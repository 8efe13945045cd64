"""The commit: the root makes the checkpoint exist with one atomic write."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reknit.comm.group import SoloGroup
from reknit.engine import messages
from reknit.engine.recognising import find_manifest, is_of_others, manifest_bytes, not_ours
from reknit.engine.saving.manifest_content import list_files
from reknit.engine.saving.marker import Marker, fenced_off, is_last, put_up, take_down
from reknit.engine.small_files import discard, write_bytes
from reknit.errors import (
    CheckpointExistsError,
    CommitError,
    ReknitError,
    StateError,
    StorageError,
    StorageNotFoundError,
)
from reknit.format import paths
from reknit.format.checksum import BLOCK_NBYTES
from reknit.format.manifest_file import decode_record, encode_manifest
from reknit.format.versions import FORMAT_VERSION
from reknit.monitor.phase import now
from reknit.storage.base import PerHost
from reknit.types.manifest import FileEntry, Manifest

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from reknit.comm import group as comm
    from reknit.engine.saving.job import SaveJob
    from reknit.engine.saving.manifest_content import ManifestContent
    from reknit.engine.small_files import Written
    from reknit.storage.base import Storage


def begin(job: SaveJob, write_id: str) -> Marker:
    """Put up the marker with which alone this save can commit, and return it.

    Raises `CheckpointExistsError`, `FencedError`, or `StateError` for what no manifest can hold.  That is
    better said now than after hours of writing.
    """
    check_manifest(job)
    if job.run is not None:
        mine = Marker(job.run.generation, write_id, run=job.run)
        try:  # its record decides which run is newer, and not what was saved to this path before
            return claim(job.storage, mine, overwrite=job.overwrite, newest=True)
        except CheckpointExistsError as error:
            error.remedy = (
                "number the steps of a run upwards; to replace later ones, go on from a step with "
                "resume(state) or load(state, step), or pass Checkpointer(..., later_steps='replace')"
            )
            raise
    # Nobody tells a process that is alone which run it is; its clock may have been set back since.
    alone = isinstance(job.group, SoloGroup) and job.group.given is None
    mine = Marker(job.group.generation, write_id)
    return claim(job.storage, mine, overwrite=job.overwrite, newest=alone)


def claim(storage: Storage, mine: Marker, *, overwrite: bool, newest: bool = False) -> Marker:
    """Put up a marker and return it, as `put_up` does.

    Raises as `check_absent` where there is something that has to stay.
    """
    check_absent(storage, overwrite)  # also before, so that nothing is touched where there is a checkpoint
    mine = put_up(storage, mine, newest=newest)
    try:
        if not overwrite:
            check_absent(storage, overwrite)
    except BaseException:
        take_down(storage, mine)
        raise
    return mine


def check_absent(storage: Storage, overwrite: bool) -> None:
    """Raise `CheckpointExistsError` where there is a checkpoint and none may be.

    Never replaced is what cannot be shown to be one (`UsageError`), nor one of a newer version
    (`VersionError`): nobody here knows which files are part of it.
    """
    if (found := find_manifest(storage)) is None:
        return
    if not found.ours:
        raise not_ours(storage)
    if not overwrite:
        raise CheckpointExistsError(
            "there is a committed checkpoint at this path already",
            path=storage.url,
            remedy="save to another path, or pass overwrite=True to replace it safely",
        )
    found.check_version()


def check_manifest(job: SaveJob) -> None:
    """Raise `StateError` for metadata that no manifest can hold."""
    if not job.metadata:
        return
    some = Marker(0, paths.new_write_id())
    index = FileEntry(paths.index_path(some.write_id), 0, ())
    encode_manifest(replace(_manifest(job, some, ()), files=(index,)))


def commit(
    job: SaveJob, mine: Marker, index: bytes, merged: ManifestContent, warnings: Sequence[str]
) -> messages.CommitOutcome:
    """Write the index, which is encoded, and commit what all ranks told of.

    Raises `StateError` when no rank has an item, and `CommitError` when the parts do not make a whole, or the
    marker of `begin` is gone; that is a `FencedError` where another save took it away.  Nothing exists before
    the manifest is put, everything after.
    """
    if not merged.items:
        raise StateError(
            "the state is empty on every rank, and would be a checkpoint of nothing",
            remedy='pass what is to be saved: {"model": model}',
        )
    storage = job.storage
    _check_files(storage, merged, mine)
    content, manifest = list_files(_manifest(job, mine, merged.items), index, merged.files)
    written = _write_index(storage, mine, content)
    own = FileEntry(written.path, written.nbytes, tuple(written.digests.tolist()))
    manifest = replace(manifest, files=(*manifest.files, own))
    data = encode_manifest(manifest)
    # The commit: before this write there is no checkpoint, after it there is.
    put_manifest(storage, mine, data, overwrite=job.overwrite)
    all_warnings = [*warnings, *merged.warnings, *clear_out(storage, mine, data)]
    return messages.CommitOutcome(manifest.nbytes, all_warnings)


def manifest_exists(storage: Storage) -> bool:
    """Tell whether a checkpoint is committed here; it may be damaged."""
    found = find_manifest(storage)
    return found is not None and found.ours


def is_committed(storage: Storage, write_id: str) -> bool | None:
    """Tell whether the manifest here is that of this save, with its files; None when that cannot be told."""
    try:
        if (data := manifest_bytes(storage)) is None:
            return False
        manifest = decode_record(data)
        return manifest.write_id == write_id and manifest.moved_to is None
    except ReknitError:
        return None


def _manifest(job: SaveJob, mine: Marker, items: tuple[str, ...]) -> Manifest:
    """Return the commit record, without files."""
    return Manifest(
        format_version=FORMAT_VERSION,
        write_id=mine.write_id,
        step=job.step,
        created=now(),
        items=items,
        index_path=paths.index_path(mine.write_id),
        files=(),
        blobs=(),
        block_nbytes=BLOCK_NBYTES,
        uses_pickle=job.options.allow_pickle,
        origin=job.origin,
        metadata=job.metadata,
        generation=mine.generation,
    )


def _check_files(storage: Storage, merged: ManifestContent, mine: Marker) -> None:
    """Raise `CommitError` unless the root sees every file that some rank wrote.

    Of a store that each host has for itself it sees its own host's; for the others the receipts vouch.
    """
    listed = {file.path: file.nbytes for file in storage.list()}
    reported = zip(merged.files.paths, merged.files.nbytes.tolist(), strict=True)
    unseen = [(k, path, nbytes) for k, (path, nbytes) in enumerate(reported) if listed.get(path) != nbytes]
    for number, path, nbytes in unseen:
        if size_of(storage, path) == nbytes:
            continue
        if size_of(storage, mine.path) is None:  # whoever took that away may have cleared away the files
            raise fenced_off(storage, mine)
        if isinstance(storage, PerHost) and size_of(storage, path) is None:
            continue
        rank = int(merged.ranks[number])
        raise CommitError(
            f"rank {rank} wrote {path} to {merged.urls[rank]}, and rank 0 does not find it in "
            f"{storage.url}; nothing was committed",
            rank=rank,
            path=f"{storage.url}/{path}",
            remedy="give every rank the same path, in a folder that all hosts share, and let only one "
            "save at a time write to it",
        )


def _write_index(storage: Storage, mine: Marker, data: bytes) -> Written:
    """Write the index; who finds it cleared away under his hands is told by whom."""
    try:
        return write_bytes(storage, paths.index_path(mine.write_id), data)
    except StorageError as error:
        if size_of(storage, mine.path) is None:
            raise fenced_off(storage, mine) from error
        raise


def size_of(storage: Storage, path: str) -> int | None:
    """Return the size of a file, None where there is none.

    It is looked for by its name: a network file system may list a folder as it was before.
    """
    try:
        return storage.size(path)
    except StorageNotFoundError:
        return None


def put_manifest(storage: Storage, mine: Marker, data: bytes, *, overwrite: bool) -> None:
    """Commit, or raise; after an error only `is_committed` knows.

    Another program may have put a file of that name there since the save began: it is looked just before.
    """
    if mine.run is not None:  # one that began since may have left this marker, at a step that it passed over
        mine.run.check()
    if overwrite:
        check_absent(storage, overwrite)
    try:
        placed = _placed(storage, mine, data, if_absent=not overwrite)
    except ReknitError:
        if not is_committed(storage, mine.write_id):
            raise
        placed = _commit_again(storage, mine, data)
    if not placed and not is_committed(storage, mine.write_id):
        check_absent(storage, overwrite=True)
        raise CheckpointExistsError(
            "another save committed to this path meanwhile",
            path=storage.url,
            remedy="give each save a path of its own",
        )


def _commit_again(storage: Storage, mine: Marker, data: bytes) -> bool:
    """Commit what is committed, though the store did not say so: the answer was lost, or a folder not synced.

    The store has to say that it will stay.  That is one more save of the same files, and begins like one.
    """
    put_up(storage, mine)
    if not is_committed(storage, mine.write_id):
        raise fenced_off(storage, mine)
    return _placed(storage, mine, data, if_absent=False)


def _placed(storage: Storage, mine: Marker, data: bytes, *, if_absent: bool) -> bool:
    """Put the manifest, if the marker is still there; false when nothing may be there, and something is."""
    try:
        return storage.commit(paths.MANIFEST_PATH, data, pending=mine.path, if_absent=if_absent)
    except StorageNotFoundError as error:
        raise fenced_off(storage, mine) from error


def clear_own_host(storage: Storage, group: comm.Group, write_id: str) -> None:
    """After a commit, delete the files of earlier saves on a host of which the root sees nothing.

    There is no marker to look at here: of a store that each host has for itself, a path is one job's.
    """
    if not isinstance(storage, PerHost):
        return
    tree = group.topology
    if tree.leads_host(group.rank) and group.rank != 0:
        own = paths.short_id(write_id)
        for listed in list(storage.list()):
            name = paths.parse_path(listed.path)
            if name is None or name.write_id8 == own or (name.kind == "manifest" and is_of_others(storage)):
                continue
            discard(storage, listed.path)


def clear_out(storage: Storage, mine: Marker, manifest: bytes, needed: Container[str] = ()) -> list[str]:
    """Delete the files of earlier saves to this path; what cannot be deleted is a warning, not a failure.

    Files of an earlier save stay that the manifest names: these are `needed`.  Of what is listed, some may
    belong to a later save.  Where one has begun, all is left to that.
    """
    try:
        names = {listed.path: paths.parse_path(listed.path) for listed in storage.list()}
        own = (None, paths.short_id(mine.write_id))
        old = [
            path
            for path, name in names.items()
            if name is not None
            and name.write_id8 not in own
            and path not in needed
            and name.kind != "copy"  # that goes after what it leads to
        ]
        if old and is_last(storage, mine, manifest):
            for path in old:
                storage.delete(path)
    except ReknitError as error:
        return [f"the checkpoint is committed, but files of an earlier save could not be deleted: {error}"]
    return []
