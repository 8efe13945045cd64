"""Copies of objects, made by the service itself."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

import obstore
from obstore import exceptions

from reknit.errors import StorageUnavailableError
from reknit.storage.object.errors import as_ours, translated

if TYPE_CHECKING:
    from reknit.storage.object.client import Client

_ANSWERS = (
    FileNotFoundError,
    exceptions.NotSupportedError,
    exceptions.PermissionDeniedError,
    exceptions.UnauthenticatedError,
)
_REFUSED = re.compile(r"status code: (4\d\d|501)")


def copied(client: Client, source: str, key: str, url: str, nbytes: int) -> bool:
    """Copy an object of `nbytes` bytes in its bucket, and return whether the copy exists.

    A refusal is an answer: the object can be written instead.  Without an answer, the copy may still appear
    and replace an object that was written in its place, so this raises an error.
    """
    try:
        obstore.copy(client, source, key)
    except (exceptions.BaseError, OSError, ValueError) as error:
        failure = as_ours("copy to", url, error)
        refused = isinstance(error, _ANSWERS) or _REFUSED.search(str(error))
        if not refused or isinstance(failure, StorageUnavailableError):
            raise failure from None
        return False
    with translated("find", url):
        if _size(client, key) == nbytes:
            return True
        with suppress(FileNotFoundError):
            obstore.delete(client, key)
    return False


def _size(client: Client, key: str) -> int | None:
    try:
        return obstore.head(client, key)["size"]
    except FileNotFoundError:
        return None
