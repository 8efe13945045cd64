"""What the root reads once for all ranks of a load, and the part of it that each of them gets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from reknit.engine import messages
from reknit.engine.opening import opened, read_opened
from reknit.errors import MismatchError
from reknit.format.index_file import encode_index
from reknit.format.manifest_file import encode_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.engine.opening import OpenCheckpoint
    from reknit.engine.renaming import Naming
    from reknit.storage.base import Storage


class Metadata(NamedTuple):
    """On the root: all that some rank wants, and the answer to each rank.

    Ranks that asked for the same items have one answer in common, the same object: it is sent once.
    """

    checkpoint: OpenCheckpoint
    answers: list[bytes]


def read_for_all(
    storage: Storage,
    wanted: Sequence[messages.Items],
    *,
    allow_pickle: bool = False,
    naming: Naming | None = None,
    whole_for_all: bool = False,
) -> Metadata:
    """Read what all ranks want; the root alone opens the manifest, the index and the shared values.

    With `naming`, items of any name in the checkpoint may hold what is wanted: everything is read, and goes
    to all ranks.  `whole_for_all` gives them the whole manifest, with the digests of all files.
    Raises `MismatchError` for an item that is not there but is needed, and what `opened` raises.
    """
    items = list(dict.fromkeys(item for rank in wanted for item in rank.names))
    optional = {item for rank in wanted for item in rank.optional}
    message = read_opened(storage, None if naming else items, own=naming is not None)
    whole = opened(storage, message, items, allow_pickle=allow_pickle, naming=naming)
    known = whole.offered
    if absent := [item for item in items if item not in known and item not in optional]:
        raise MismatchError(
            f"the checkpoint has no item {', '.join(map(repr, absent))}",
            path=storage.url,
            remedy=f"its items are {', '.join(map(repr, known))}; leave the others out of `state`, "
            "or name those to load in `items`",
        )
    parts: dict[frozenset[str], bytes] = {}
    for rank in wanted:
        if (asked := frozenset(rank.names)) not in parts:
            part = message if naming or whole_for_all else _part(whole, message, asked)
            parts[asked] = messages.encode(part)
    return Metadata(whole.of_items(items), [parts[frozenset(rank.names)] for rank in wanted])


def _part(whole: OpenCheckpoint, message: messages.Opened, items: frozenset[str]) -> messages.Opened:
    """Return what concerns these items only.

    A checkpoint of ten thousand ranks has a manifest of several megabytes, most of it digests of files.
    """
    manifest = whole.manifest
    if items.issuperset(manifest.items):
        return message
    index = whole.index.of_items(items)
    blobs = tuple(blob for blob in manifest.blobs if blob.item in items)
    named = {manifest.index_path, *index.files, *(blob.path for blob in blobs)}
    files = tuple(file for file in manifest.files if file.path in named)
    return messages.Opened(
        manifest=encode_manifest(replace(manifest, files=files, blobs=blobs)),
        index=message.index if index is whole.index else encode_index(index),
        blobs={path: data for path, data in message.blobs.items() if path in named},
    )
