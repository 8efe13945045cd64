"""Write new objects: small objects in one request, large objects in parts, copies by the service itself."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import obstore
from obstore import exceptions

from reknit.errors import StorageUnavailableError
from reknit.storage.errors import existing, removed
from reknit.storage.object.errors import as_ours, translated
from reknit.storage.object.own_writes import look, new_mark, put_if
from reknit.storage.object.upload import MultipartUpload, part_size
from reknit.storage.writing import Progress

if TYPE_CHECKING:
    from reknit.storage.object.client import Client, ObjectOptions
    from reknit.storage.object.conditions import Conditions
    from reknit.storage.writing import TakenNames

_ANSWERS = (
    FileNotFoundError,
    exceptions.NotSupportedError,
    exceptions.PermissionDeniedError,
    exceptions.UnauthenticatedError,
)
_REFUSED = re.compile(r"status code: (4\d\d|501)")


class ObjectWriter:
    """A file that is being written; the object does not exist before `finish` returns."""

    def __init__(
        self,
        client: Client,
        key: str,
        url: str,
        nbytes: int,
        *,
        options: ObjectOptions,
        names: TakenNames,
        conditions: Conditions,
    ) -> None:
        self._client, self._key, self._url = client, key, url
        self._names, self._conditions = names, conditions
        self._progress = Progress(url, nbytes)
        part_nbytes = part_size(nbytes, options.part_nbytes)
        self._small = np.empty(0, np.uint8)
        self._upload: MultipartUpload | None = None
        if nbytes <= part_nbytes:
            self._small = np.empty(nbytes, np.uint8)
        else:
            self._upload = MultipartUpload(
                client, key, url, nbytes, part_nbytes=part_nbytes, concurrency=options.concurrency
            )

    def write(self, start: int, data: memoryview) -> None:
        """Copy `data` of a small file; of a large file, upload the filled parts straight from `data`."""
        found = np.frombuffer(data, np.uint8) if data.nbytes else np.empty(0, np.uint8)
        self._progress.check(start, len(found))
        if self._upload is None:
            np.copyto(self._small[start : start + len(found)], found)
        else:
            self._upload.write(start, found)
        self._progress.add(len(found))

    def finish(self) -> None:
        """Make the object; with one request, on the condition that it does not exist."""
        self._progress.check_open("finish")
        self._progress.end()
        try:
            self._progress.check_whole()
            if not self._names.has(self._key, self):
                raise removed(self._url)
            if self._upload is None:
                self._put()
            else:
                self._check_free()
                self._upload.finish()
        except BaseException:
            if self._upload is not None:
                self._upload.give_up()
            raise
        finally:
            self._names.free(self._key, self)
            self._small = np.empty(0, np.uint8)

    def abort(self) -> None:
        """Remove the uploaded parts and release the name; do nothing if the file is finished."""
        if self._progress.end() and self._upload is not None:
            self._upload.give_up()
        self._names.free(self._key, self)

    def _put(self) -> None:
        placed = None
        if not self._conditions.unknown:
            try:
                placed = put_if(self._client, self._key, self._url, self._small, mark=new_mark(), seen=None)
            except exceptions.BaseError:
                self._conditions.unknown = True
        if placed is False:
            raise existing(self._url)
        if placed is None:  # on Azure also because the rest of an upload in parts counts as an object
            self._put_anyway()

    def _put_anyway(self) -> None:
        self._check_free()
        with translated("write", self._url):
            obstore.put(self._client, self._key, self._small, use_multipart=False)

    def _check_free(self) -> None:
        """Raise if another writer has written an object of this name meanwhile."""
        if look(self._client, self._key, self._url) is not None:
            raise existing(self._url)


def copied(client: Client, source: str, key: str, url: str, nbytes: int) -> bool:
    """Copy an object of `nbytes` bytes in its bucket, and return whether the copy exists.

    A refusal is an answer: the object can be written instead.  Without an answer, the object shows whether it
    was made.  If it was not, the copy may still appear and replace an object that was written in its place,
    so this raises an error.
    """
    try:
        obstore.copy(client, source, key)
    except (exceptions.BaseError, OSError, ValueError) as error:
        failure = as_ours("copy to", url, error)
        refused = isinstance(error, _ANSWERS) or _REFUSED.search(str(error))
        if refused and not isinstance(failure, StorageUnavailableError):
            return False
        with suppress(exceptions.BaseError, OSError):
            if _size(client, key) == nbytes:
                return True
        raise failure from None
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
