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
from reknit.storage.object.conditions import new_nonce, seen_nonce, unsupported
from reknit.storage.object.errors import as_ours, translated
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
        if self._conditions.unknown:
            self._put_anyway()
            return
        nonce = new_nonce()
        try:
            obstore.put(self._client, self._key, self._small, mode="create", attributes=nonce)
        except (exceptions.BaseError, OSError) as error:
            if unsupported(error):
                self._conditions.unknown = True
                self._put_anyway()
                return
            refused = isinstance(error, exceptions.AlreadyExistsError)
            if not refused and not isinstance(error, exceptions.GenericError):
                raise as_ours("write", self._url, error) from None
            with translated("read back", self._url):
                found = seen_nonce(self._client, self._key)
            if found == nonce:
                return  # it was this request, whose answer was lost
            if not refused:
                raise as_ours("write", self._url, error) from None
            if found is not None:
                raise existing(self._url) from None
            self._put_anyway()  # the rest of an upload in parts counts as an object on Azure

    def _put_anyway(self) -> None:
        self._check_free()
        with translated("write", self._url):
            obstore.put(self._client, self._key, self._small, use_multipart=False)

    def _check_free(self) -> None:
        """Raise if another writer has written an object of this name meanwhile."""
        with translated("find", self._url):
            try:
                obstore.head(self._client, self._key)
            except FileNotFoundError:
                return
        raise existing(self._url)


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
