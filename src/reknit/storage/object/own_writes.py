"""Recognise objects that this process has written, although the answers to its requests were lost.

The client repeats a request without an answer.  If the first request was carried out, a store may refuse the
second one: the object exists, has another version by now, or its upload in parts is over.  So after a
refusal, and after an error without an answer, the object itself shows the outcome.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import obstore
from obstore import exceptions

from reknit.errors import StorageNotFoundError
from reknit.storage.object.errors import as_ours, translated

if TYPE_CHECKING:
    from obstore import UpdateVersion

    from reknit.storage.object.client import Client

_MARK = "reknitput"
"""Name of the metadata that marks the object of a writer: letters alone, as Azure requires."""
_REFUSED = (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileNotFoundError)


def new_mark() -> dict[str, str]:
    """Return new metadata that marks the object of one write."""
    return {_MARK: uuid.uuid4().hex}


def put_if(
    client: Client, key: str, url: str, data: Any, *, mark: dict[str, str], seen: UpdateVersion | None
) -> bool | None:
    """Write an object if its version is still `seen`, or if it is missing and `seen` is None.

    Returns False for another version, and None if the store refuses the write though the object is as it was.
    Raises the client's error if the endpoint does not support conditions, and else reknit's.
    """
    mode: Any = "create" if seen is None else seen
    try:
        obstore.put(client, key, data, mode=mode, attributes=mark)
    except (exceptions.BaseError, OSError) as error:
        if unsupported(error):
            raise
        failure = as_ours("write", url, error)
        refused = isinstance(error, _REFUSED) and not _is_bucket_missing(error, failure)
        if not refused and not _is_unanswered(error):
            raise failure from None
        if is_own(client, key, url, mark=mark, nbytes=len(data), data=data):
            return True
        if not refused:
            raise failure from None
        return None if look(client, key, url) == seen else False
    return True


def is_own(
    client: Client, key: str, url: str, *, mark: dict[str, str], nbytes: int, data: Any = None
) -> bool:
    """Return whether an object was put there by the write with this mark.

    Some endpoints drop metadata.  Then the bytes decide, if there are any.  Without `data` the size decides:
    the name is for one writer alone, and was free before.
    """
    with translated("read back", url):
        try:
            found = obstore.get(client, key, options={"head": data is None})
            mine = found.attributes.get(_MARK)
            if mine is not None:
                return bool(mine == mark[_MARK])
            if found.meta["size"] != nbytes or not nbytes:
                return False
            return data is None or bytes(found.bytes()) == bytes(data)
        except FileNotFoundError:
            return False


def look(client: Client, key: str, url: str) -> UpdateVersion | None:
    """Return the version of an object; None for a missing object."""
    with translated("find", url):
        try:
            return version(obstore.head(client, key))
        except FileNotFoundError:
            return None


def version(found: Any) -> UpdateVersion:
    """Return the version in a result of `obstore.head` or `obstore.put`, as a condition for `obstore.put`."""
    names = ("e_tag", "version")
    return {name: found[name] for name in names if found[name] is not None}  # type: ignore[return-value]


def unsupported(error: Exception) -> bool:
    """Return whether an endpoint does not support the request that it answered with this error."""
    return isinstance(error, exceptions.NotSupportedError) or "status code: 501" in str(error)


def _is_unanswered(error: Exception) -> bool:
    """Return whether a request has no answer that excludes that it was carried out."""
    return isinstance(error, (exceptions.GenericError, exceptions.JoinError))


def _is_bucket_missing(error: Exception, failure: Exception) -> bool:
    return isinstance(error, FileNotFoundError) and not isinstance(failure, StorageNotFoundError)
