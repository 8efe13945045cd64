"""The part of the root: begin a save with a marker, and commit it by the index and the manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from reknit.comm.group import SoloGroup
from reknit.engine import messages
from reknit.engine.memory.write import write_bytes
from reknit.engine.stored.at_path import size_of
from reknit.engine.stored.commit import clear_out, put_manifest, refuse_pinned
from reknit.engine.stored.manifest_content import list_files
from reknit.engine.stored.marker import Marker, fenced_off, take_marker
from reknit.errors import CheckpointExistsError, CommitError, StateError, StorageError
from reknit.events.phase import now
from reknit.format import paths
from reknit.format.checksum import BLOCK_NBYTES, FORMAT_VERSION
from reknit.format.manifest_file import encode_manifest
from reknit.storage.base import PerHost
from reknit.types.manifest import FileEntry, Manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.engine.saving.task import SaveTask
    from reknit.engine.stored.manifest_content import ManifestContent
    from reknit.storage.base import Storage


def begin(task: SaveTask, write_id: str) -> Marker:
    """Put the marker without which this save cannot commit, and return it.

    Raises `CheckpointExistsError` and `FencedError`, and `StateError` for metadata that no manifest can hold,
    before any data is written.
    """
    check_manifest(task)
    if task.run is not None:
        mine = Marker(task.run.generation, write_id, run=task.run)
        if task.overwrite:
            refuse_pinned(task.storage)
        try:  # the record of the run decides which run is newer, not an earlier save to this path
            return take_marker(task.storage, mine, overwrite=task.overwrite, newest=True)
        except CheckpointExistsError as error:
            error.remedy = (
                "number the steps of a run upwards; to replace later ones, go on from a step with "
                "resume(state) or load(state, step), or pass Checkpointer(..., later_steps='replace')"
            )
            raise
    # A single process without a given generation uses its clock, which may have been set back.
    alone = isinstance(task.group, SoloGroup) and task.group.given is None
    mine = Marker(task.group.generation, write_id)
    return take_marker(task.storage, mine, overwrite=task.overwrite, newest=alone)


def check_manifest(task: SaveTask) -> None:
    """Raise `StateError` for metadata that no manifest can hold."""
    if not task.metadata:
        return
    some = Marker(0, paths.new_write_id())
    index = FileEntry(paths.index_path(some.write_id), 0, ())
    encode_manifest(replace(_manifest(task, some, ()), files=(index,)))


def commit(
    task: SaveTask, mine: Marker, index: bytes, merged: ManifestContent, warnings: Sequence[str]
) -> messages.CommitOutcome:
    """Write the encoded `index`, and commit the files in the receipts of all ranks.

    The checkpoint exists from the moment when the manifest is put.  Raises `StateError` when no rank has an
    item, and `CommitError` when the parts do not make a whole, or the marker of `begin` is gone.  If another
    save removed the marker, that is a `FencedError`.
    """
    if not merged.items:
        raise StateError(
            "the state is empty on every rank, and would be a checkpoint of nothing",
            remedy='pass the objects to save: {"model": model}',
        )
    storage = task.storage
    _check_files(storage, merged, mine)
    content, manifest = list_files(_manifest(task, mine, merged.items), index, merged.files)
    try:
        written = write_bytes(storage, paths.index_path(mine.write_id), content)
    except StorageError as error:
        if size_of(storage, mine.path) is None:
            raise fenced_off(storage, mine) from error  # another save has removed the index meanwhile
        raise
    own = FileEntry(written.path, written.nbytes, tuple(written.digests.tolist()))
    manifest = replace(manifest, files=(*manifest.files, own))
    data = encode_manifest(manifest)
    # The commit: this write makes the checkpoint exist.
    mine, data = put_manifest(storage, mine, data, overwrite=task.overwrite)
    all_warnings = [*warnings, *merged.warnings, *clear_out(storage, mine, data)]
    return messages.CommitOutcome(manifest.nbytes, all_warnings)


def _manifest(task: SaveTask, mine: Marker, items: tuple[str, ...]) -> Manifest:
    """Return the commit record, without files."""
    return Manifest(
        format_version=FORMAT_VERSION,
        write_id=mine.write_id,
        step=task.step,
        created=now(),
        items=items,
        index_path=paths.index_path(mine.write_id),
        files=(),
        blobs=(),
        block_nbytes=BLOCK_NBYTES,
        uses_pickle=task.options.allow_pickle,
        origin=task.origin,
        metadata=task.metadata,
        generation=mine.generation,
    )


def _check_files(storage: Storage, merged: ManifestContent, mine: Marker) -> None:
    """Raise `CommitError` unless the root sees all files that ranks wrote.

    In a store with a part per host, it sees only the files of its host, and trusts the receipts for others.
    """
    listed = {file.path: file.nbytes for file in storage.list()}
    reported = zip(merged.files.paths, merged.files.nbytes.tolist(), strict=True)
    unseen = [(k, path, nbytes) for k, (path, nbytes) in enumerate(reported) if listed.get(path) != nbytes]
    for number, path, nbytes in unseen:
        if size_of(storage, path) == nbytes:
            continue
        # The save that removed the marker may have cleared away the files.
        if size_of(storage, mine.path) is None:
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
