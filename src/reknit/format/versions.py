"""The format versions that this reknit writes and reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.errors import VersionError

if TYPE_CHECKING:
    from collections.abc import Iterable

FORMAT_VERSION = 1
"""The version that is written."""

OLDEST_READABLE = 1
"""Versions from this one up to `FORMAT_VERSION` are read, for ever."""

FILE_TABLE = "file_table"
"""The manifest lists the index only, and the index lists all other files."""

MOVED = "moved"
"""All files but the manifest are at another place, which the manifest names."""

TOMBSTONE = "tombstone"
"""There is no checkpoint: the file only keeps a late commit from making one."""

FEATURES = frozenset({FILE_TABLE, MOVED})
"""Names in ``requires`` of a manifest: features that a reader must support to read the checkpoint."""


def check_version(version: int, requires: Iterable[str] = ()) -> None:
    """Raise `VersionError` when this reknit cannot read a checkpoint of `version` that needs `requires`."""
    if not OLDEST_READABLE <= version <= FORMAT_VERSION:
        raise VersionError(
            f"the checkpoint has format version {version}; "
            f"this reknit reads {OLDEST_READABLE} to {FORMAT_VERSION}",
            remedy="install a newer reknit: every later one reads every earlier version",
        )
    unknown = sorted(set(requires) - FEATURES)
    if unknown:
        raise VersionError(
            f"the checkpoint needs features that this reknit does not support: {', '.join(unknown)}",
            remedy="install the reknit that wrote it, or a newer one",
        )
