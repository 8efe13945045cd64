"""Which of several checkpoints side by side is the newest?"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from reknit.engine.commit import manifest_exists
from reknit.engine.opening import read_manifest
from reknit.errors import CheckpointNotFoundError, FormatError, StorageError, StoragePermissionError
from reknit.format.manifest_file import decode_manifest

if TYPE_CHECKING:
    from reknit.storage.base import Storage

logger = logging.getLogger("reknit")


class _Age(NamedTuple):
    """What orders checkpoints; one without a step is older than all that have one."""

    step: int
    created: float
    url: str


def newest(root: Storage) -> str | None:
    """Return the path of the newest checkpoint directly below a folder, or None.

    A folder that cannot be judged for a reason of its own is passed over with a warning; a store that fails
    is an error, since an older checkpoint in place of the newest would be lost work.
    """
    ages = [age for name in root.folders() if (age := _age(root, name)) is not None]
    return max(ages).url if ages else None


def _age(root: Storage, name: str) -> _Age | None:
    """Return the age of the checkpoint in a folder, if there is one that can be judged."""
    try:
        folder = root.sub(name)
    except StorageError as error:  # a name that no store takes
        logger.warning("passed over %r in %s: %s", name, root.url, error.message)
        return None
    try:
        if not manifest_exists(folder):
            return None
        manifest = decode_manifest(read_manifest(folder))
    except CheckpointNotFoundError:
        return None  # deleted at this moment
    except (FormatError, StoragePermissionError) as error:
        logger.warning("passed over %s: %s", folder.url, error.message)
        return None
    return _Age(-1 if manifest.step is None else manifest.step, manifest.created, folder.url)
