"""The end of a save, as every rank goes through it: its receipt, and the round in which all commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reknit.comm import base as comm
from reknit.engine import messages
from reknit.engine.commit import is_committed
from reknit.engine.write import Written, discard, write_bytes
from reknit.errors import CommError, ReknitError
from reknit.format import paths

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.engine.claims import BlobFile, Copies
    from reknit.engine.commit import Destination
    from reknit.engine.coordinator import Coordinator
    from reknit.monitor.phase import Recorder
    from reknit.options import SaveOptions
    from reknit.storage.base import Storage

_BEFORE_RECEIPT = frozenset({"plan", "stage", "digest", "write"})
"""Phases of a rank's own writing; an error signed with one of them is no lost answer."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a save takes place."""

    group: comm.Group
    to: Destination
    options: SaveOptions
    recorder: Recorder


def write_blobs(
    storage: Storage,
    files: Sequence[BlobFile],
    rank: int,
    write_id: str,
    recorder: Recorder,
    written: list[Written],
) -> list[messages.BlobReceipt]:
    """Write a rank's files of blobs, adding each to `written`, and return what the root is told of them."""
    receipts, own = [], 0
    for file in files:
        number = None
        if file.coordinate is not None:
            number, own = own, own + 1
        path = paths.blob_path(file.item, rank, write_id, own=number)
        with recorder.phase("write", path=f"{storage.url}/{path}", nbytes=len(file.data)):
            written.append(write_bytes(storage, path, file.data))
        receipts.append(messages.BlobReceipt(file.item, path, file.coordinate))
    return receipts


def receipt(
    where: Setting,
    items: Sequence[str],
    written: Sequence[Written],
    plan: bytes,
    columns: messages.Columns | None,
    blobs: list[messages.BlobReceipt],
    copies: Copies,
) -> messages.Receipt:
    """Return what a rank tells the root when its files are written."""
    return messages.Receipt(
        rank=where.group.rank,
        url=where.to.storage.url,
        items=list(items),
        files=[messages.FileReceipt(w.path, w.nbytes, messages.packed(w.digests, "u8")) for w in written],
        plan=plan,
        columns=columns,
        blobs=blobs,
        copies=copies.keys,
        copy_digests=copies.digests,
        copy_names=copies.names,
    )


def commit_round(
    where: Setting,
    coordinator: Coordinator,
    write_id: str,
    write: Callable[[list[Written]], messages.Receipt],
) -> tuple[messages.Outcome, list[Written]]:
    """Let `write` write this rank's files, noting each in the list that it gets, and commit with all ranks.

    Return the outcome and the files.  After an error nothing of them is left, unless they may yet become part
    of a checkpoint.
    """
    written: list[Written] = []
    sent: list[bytes] = []

    def request() -> bytes:
        sent.append(messages.encode(write(written)))
        return sent[0]

    try:
        with where.recorder.phase("commit"):
            answer = comm.round(
                where.group,
                "commit",
                request,
                lambda requests: coordinator.commit(where.to, write_id, requests),
                where.options.timeout_s,
            )
        outcome = messages.decode(answer, messages.Outcome)
    except BaseException as error:  # Ctrl-C too: what was written is part of a checkpoint, or litter
        committed = _clean_up(where, write_id, written, error, sent=bool(sent))
        if not committed or not isinstance(error, CommError):
            raise
        outcome = messages.Outcome(0, ["the checkpoint is committed, but the root's answer was lost"])
    return outcome, written


def _clean_up(
    where: Setting, write_id: str, written: list[Written], error: BaseException, *, sent: bool
) -> bool | None:
    """After an error, delete what this rank wrote, unless it is, or may yet become, part of a checkpoint.

    Tells whether the checkpoint is committed all the same; None when nobody can know.
    """
    # The root decides only when it has the receipts of all ranks.
    committed: bool | None = False
    over = not sent or (isinstance(error, ReknitError) and error.phase in _BEFORE_RECEIPT)
    if not over:
        committed = is_committed(where.to.storage, write_id)
        # A rank that lost the answer, or was interrupted while it waited, cannot know how far the root is.
        told = isinstance(error, ReknitError) or where.group.rank == 0
        over = committed is False and told and not isinstance(error, CommError)
    if over:
        for file in written:
            discard(where.to.storage, file.path)
    return committed
