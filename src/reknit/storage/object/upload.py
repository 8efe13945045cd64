"""Uploads to an object store: whole or in parts from the caller's memory; remains of dead ones go."""

from __future__ import annotations

import re
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import obstore
from obstore import exceptions

from reknit.errors import (
    MissingExtraError,
    ReknitError,
    StorageError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
)
from reknit.events.phase import Deadline, now
from reknit.storage.base import Dated, Progress, existing, removed
from reknit.storage.object.client import as_ours, moment_of, translated
from reknit.storage.object.conditions import is_own, look, new_mark, put_if
from reknit.storage.paths import kind_of
from reknit.system import dice, start_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from reknit.storage.base import TakenNames
    from reknit.storage.object.client import Bucket, Client, ObjectOptions
    from reknit.storage.object.conditions import Conditions

    Bytes = NDArray[np.uint8]


MAX_PARTS = 10_000
"""The most parts of one file that S3 takes."""
_MIB = 1 << 20
_STARTS, _STARTING_S = 4, 60.0
"""How often, and how long, the start of an upload is repeated."""
_LONGEST_PAUSE_S = 1.0
_PATIENCE_S = 2.0
"""How long a piece waits for a missing earlier piece before it is copied to memory of its own."""
_LETTING_GO_S = 30.0


def part_size(nbytes: int, wanted: int) -> int:
    """Return the bytes of one part of a file: the wanted size, or more if there would be too many parts."""
    least = -(-nbytes // MAX_PARTS)
    return wanted if least <= wanted else -(-least // _MIB) * _MIB


class _GivenUpError(Exception):
    """Passes through the client, so that it removes the parts that are up already."""


class _Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory that the client reads until it drops its last reference."""


@dataclass
class _Gathered:
    """A part that has received some of its pieces."""

    whole: Bytes
    missing: int


class MultipartUpload:
    """The parts of one multipart upload, whose thread waits for them in their order.

    The client takes parts one after another, and sends up to `concurrency` of them at once, each from the
    caller's memory.  So the caller waits until the client has released its part.  Pieces that do not fill a
    part are collected in a part with memory of its own.  At most `concurrency` such parts wait to be sent, as
    long as pieces arrive about in order.
    """

    def __init__(
        self, client: Client, key: str, url: str, nbytes: int, *, part_nbytes: int, concurrency: int
    ) -> None:
        self._client, self._key, self._url = client, key, url
        self._nbytes, self._part_nbytes, self._concurrency = nbytes, part_nbytes, concurrency
        self._changed = threading.Condition()
        self._ready: dict[int, Bytes] = {}
        self._gathered: dict[int, _Gathered] = {}
        self._next = 0
        """The part that the client takes next."""
        self._lent: set[int] = set()
        self._own: set[int] = set()
        self._given_up = self._finishing = self._sent = False
        self._mark = new_mark()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def write(self, start: int, data: Bytes) -> None:
        """Write bytes, and return when the caller may reuse their memory."""
        mine, gave, size = set[int](), False, self._part_nbytes
        while len(data):
            part = start // size
            nbytes = min(size, self._nbytes - part * size)
            taken = data[: part * size + nbytes - start]
            if len(taken) == size:
                self._give(part, taken)
                mine.add(part)
            else:  # also the last part, which the client keeps until the upload is to end
                gave |= self._gather(part, start - part * size, taken, nbytes)
            start += len(taken)
            data = data[len(taken) :]
        # Not before all bytes are given: another thread may wait for the part that begins with the last ones.
        self._wait_for(mine, self._concurrency if gave else None)

    def finish(self) -> None:
        """Wait until the object exists.  The caller has written all bytes.

        If the answer to the last request is lost, the client repeats that request, and the store may have
        forgotten the upload.  So after an error of that request, the object itself shows whether it was made.
        """
        self._start()
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
        assert self._thread is not None
        self._thread.join()
        if self._error is not None and self._sent and self._is_made():
            return
        self._check()

    def give_up(self) -> None:
        """Abort: wait until the client has removed the uploaded parts and released all memory."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._let_go()

    def _give(self, part: int, data: Bytes, *, own: bool = False) -> None:
        with self._changed:
            self._ready[part] = data
            self._lent.add(part)
            if own:
                self._own.add(part)
            self._changed.notify_all()
        self._start()

    def _gather(self, part: int, start: int, data: Bytes, nbytes: int) -> bool:
        """Copy a piece into its part, upload a complete part, and return whether it is complete."""
        with self._changed:
            gathered = self._gathered.setdefault(part, _Gathered(np.empty(nbytes, np.uint8), nbytes))
        np.copyto(gathered.whole[start : start + len(data)], data)
        with self._changed:
            gathered.missing -= len(data)
            if gathered.missing:
                return False
            del self._gathered[part]
        self._give(part, gathered.whole, own=True)
        return True

    def _wait_for(self, mine: set[int], most_own: int | None) -> None:
        """Wait until the client has released these parts, and enough of the collected parts."""
        with self._changed:
            while self._error is None and not self._given_up:
                if not mine & self._lent and (most_own is None or len(self._own) <= most_own):
                    return
                before = self._next
                if not self._changed.wait(_PATIENCE_S) and self._next == before:
                    # Nothing goes on, and perhaps nothing will: a single thread may write, from the end.
                    stuck = {part for part in mine if part in self._ready}
                    for part in stuck:
                        self._ready[part] = self._ready[part].copy()
                    self._own |= stuck
                    mine = mine - stuck
                    most_own = None
        self.give_up()
        self._check()

    def _start(self) -> None:
        with self._changed:
            if self._thread is None and not self._given_up:
                self._thread = start_thread("reknit-upload", self._run)

    def _run(self) -> None:
        deadline, tries = Deadline(_STARTING_S), 1
        try:
            while not self._send(again=tries < _STARTS and not deadline.passed()):
                time.sleep(dice.uniform(0, _LONGEST_PAUSE_S))
                tries += 1
        except BaseException as error:  # the threads that wait for their parts raise it again
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _send(self, *, again: bool) -> bool:
        """Upload the parts, and return whether the object exists.

        The client does not repeat the request that starts an upload to every store.  So this returns False if
        that request failed, no part was sent, and the caller tries `again`.
        """
        try:
            obstore.put(
                self._client,
                self._key,
                self._parts(),  # type: ignore[arg-type]  # arrays are buffers, from Python 3.12 on by type
                use_multipart=True,
                chunk_size=self._part_nbytes,
                max_concurrency=self._concurrency,
                attributes=self._mark,
            )
        except exceptions.GenericError as error:
            unreached = isinstance(as_ours("write", self._url, error), StorageUnavailableError)
            if self._next or not unreached or not again:
                raise
            return False
        return True

    def _parts(self) -> Iterator[_Lent]:
        """Yield the parts in order, each as soon as it is complete."""
        for part in range(-(-self._nbytes // self._part_nbytes)):
            with self._changed:
                self._changed.wait_for(lambda part=part: part in self._ready or self._given_up)  # type: ignore[misc]
                if self._given_up:
                    raise _GivenUpError
                lent = self._ready.pop(part).view(_Lent)
                self._next = part + 1
                weakref.finalize(lent, self._returned, part).atexit = False
            yield lent
            del lent
        with self._changed:
            self._changed.wait_for(lambda: self._finishing or self._given_up)
            if self._given_up:
                raise _GivenUpError
            self._sent = True

    def _is_made(self) -> bool:
        """Return whether the object exists although its upload ended with an error."""
        return is_own(self._client, self._key, self._url, mark=self._mark, nbytes=self._nbytes)

    def _returned(self, part: int) -> None:
        """Note that a part is released.  A thread of the client calls this."""
        with self._changed:
            self._lent.discard(part)
            self._own.discard(part)
            self._changed.notify_all()

    def _let_go(self) -> None:
        """After the client's call, wait until it has released the memory of all callers."""
        deadline = Deadline(_LETTING_GO_S)
        with self._changed:
            self._lent -= self._ready.keys()
            self._ready.clear()
            while self._lent - self._own and not deadline.passed():
                self._changed.wait(deadline.remaining())

    def _check(self) -> None:
        """Raise the error of the upload, if there is one."""
        error = self._error
        if isinstance(error, ReknitError):
            raise error
        if error is not None and not isinstance(error, _GivenUpError):
            try:
                with translated("write", self._url):
                    raise error
            except StorageNotFoundError:
                raise _ended(self._url) from None
        if self._given_up:
            raise StorageError(f"cannot write {self._url}: it is aborted", path=self._url)


def _ended(url: str) -> StorageError:
    """Return the error of an upload that the store has ended."""
    return StorageError(
        f"cannot write {url}: the store has ended its upload in parts, and the object does not exist",
        remedy="save again; let no lifecycle rule, and no `reknit gc` with a short age, abort the uploads "
        "of a save that is under way",
        path=url,
    )


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


_UNSEEN = {
    "s3": None,
    "gs": "Uploads in parts that killed saves have left in {url} cannot be listed with these credentials (it "
    "takes HMAC keys); they cost money until a lifecycle rule of the bucket aborts them: "
    "gcloud storage buckets update gs://{bucket} --lifecycle-file=rule.json, where rule.json holds "
    '{{"rule": [{{"action": {{"type": "AbortIncompleteMultipartUpload"}}, "condition": {{"age": 2}}}}]}}',
    "az": "Blocks that killed saves have left in {url} are not listed; Azure removes them by itself, a week "
    "after the last one of a blob was written",
}
# The variables that the client of objects reads, under all their names.
_ENVIRONMENT = {
    "region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None),
    "reknit_endpoint": (None, ["AWS_ENDPOINT_URL", "AWS_ENDPOINT"], None, None),
    "reknit_virtual": (None, ["AWS_VIRTUAL_HOSTED_STYLE_REQUEST"], "false", None),
}


def unseen(place: Bucket) -> str | None:
    """Return the remains of writers that this kind of store does not list, with their remedy."""
    reason = _UNSEEN[place.scheme]
    return None if reason is None else reason.format(url=place.url, bucket=place.bucket)


def dated(client: Client, place: Bucket, options: ObjectOptions) -> Iterator[Dated]:
    """Yield the objects below the prefix, also temporary objects, and on S3 uploads in parts."""
    # First, since a package may be missing.
    uploads = Uploads(place, options) if place.scheme == "s3" else None
    yield from objects(client, place, place.prefix.rstrip("/"), place.url)
    if uploads is not None:
        yield from uploads.under_way()


def objects(client: Client, place: Bucket, folder: str, url: str) -> Iterator[Dated]:
    """Yield the objects below a folder while the bucket lists them."""
    with translated("list", url):
        for chunk in obstore.list(client, folder or None, chunk_size=1000):
            for found in chunk:
                path = found["path"][len(place.prefix) :]
                if (kind := kind_of(path)) is not None:
                    yield Dated(kind, path, found["size"], found["last_modified"].timestamp())


def moment(client: Client, place: Bucket) -> float:
    """Return the present time by the clock of a bucket, that of this host where no object can be written."""
    try:
        with translated("write", place.url):
            return moment_of(client, place.prefix)
    except (StoragePermissionError, StorageFullError):
        return now()


def age_s(client: Client, place: Bucket, key: str, url: str) -> float:
    """Return the seconds since an object was written, by the clock of its bucket."""
    with translated("find", url):
        written: float = obstore.head(client, key)["last_modified"].timestamp()
    return max(0.0, moment(client, place) - written)


def discard(client: Client, place: Bucket, options: ObjectOptions, found: Dated) -> None:
    """Delete a temporary object, or abort an upload."""
    if found.kind == "upload":
        Uploads(place, options).abort(found)
        return
    url = f"{place.scheme}://{place.bucket}/{place.prefix}{found.path}"
    with translated("delete", url), suppress(FileNotFoundError):
        obstore.delete(client, place.prefix + found.path)


class Uploads:
    """Uploads in parts, neither finished nor aborted, to a bucket of S3 or a compatible store.

    The client that reads and writes objects cannot list them.  So botocore does, with the same endpoint,
    region and credentials.
    """

    def __init__(self, place: Bucket, options: ObjectOptions) -> None:
        self._place = place
        self.client = _connect(place, options)

    def under_way(self) -> Iterator[Dated]:
        """Yield all uploads below the prefix, with their uploaded bytes and the date of the last part."""
        query = {"Bucket": self._place.bucket, "Prefix": self._place.prefix}
        with self._answering("list uploads in", self._place.url):
            for page in self.client.get_paginator("list_multipart_uploads").paginate(**query):
                for found in page.get("Uploads", ()):
                    if found["Key"].startswith(self._place.prefix):
                        yield from self._measured(found)

    def abort(self, found: Dated) -> None:
        """Remove the parts of an upload; a missing upload is not an error."""
        key = self._place.prefix + found.path
        with self._answering("abort the upload of", f"s3://{self._place.bucket}/{key}"):
            try:
                self.client.abort_multipart_upload(
                    Bucket=self._place.bucket, Key=key, UploadId=found.upload_id
                )
            except self.client.exceptions.ClientError as error:
                if not _is_gone(error):
                    raise

    def _measured(self, found: dict[str, Any]) -> Iterator[Dated]:
        key, nbytes, modified = found["Key"], 0, found["Initiated"].timestamp()
        query = {"Bucket": self._place.bucket, "Key": key, "UploadId": found["UploadId"]}
        try:
            for page in self.client.get_paginator("list_parts").paginate(**query):
                for part in page.get("Parts", ()):
                    nbytes += part["Size"]
                    modified = max(modified, part["LastModified"].timestamp())
        except self.client.exceptions.ClientError as error:
            if not _is_gone(error):
                raise
            return  # it was finished, or aborted, after it was listed
        yield Dated("upload", key[len(self._place.prefix) :], nbytes, modified, found["UploadId"])

    @contextmanager
    def _answering(self, action: str, url: str) -> Iterator[None]:
        """Translate the errors of botocore to a `StorageError` about `url`."""
        from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]

        try:
            yield
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") in ("NotImplemented", "501"):
                raise StorageError(
                    f"{url}: the endpoint does not list uploads in parts",
                    remedy="configure it to remove abandoned uploads, see its manual",
                    path=url,
                ) from error
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            failure = OSError(f"{error} (status code: {status})")  # in the form of the client of objects
            raise as_ours(action, url, failure) from None
        except BotoCoreError as error:
            raise as_ours(action, url, error) from None


def _is_gone(error: Any) -> bool:
    return error.response.get("Error", {}).get("Code") in ("NoSuchUpload", "404")


def _connect(place: Bucket, options: ObjectOptions) -> Any:
    """Return a client of botocore for the endpoint of the client of objects.  Nothing is sent yet."""
    try:
        from botocore.config import Config  # type: ignore[import-untyped]
        from botocore.session import Session  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError(
            f"listing the unfinished uploads of killed saves to {place.url} needs the package botocore",
            remedy="pip install 'reknit[gc]'",
        ) from error
    session = Session(session_vars=_ENVIRONMENT)
    virtual = str(session.get_config_variable("reknit_virtual")).lower() in ("1", "true", "yes", "on")
    return session.create_client(
        "s3",
        region_name=options.region or session.get_config_variable("region") or "us-east-1",
        endpoint_url=options.endpoint or session.get_config_variable("reknit_endpoint"),
        config=Config(
            connect_timeout=5,
            read_timeout=options.request_s,
            retries={"total_max_attempts": options.retries + 1, "mode": "standard"},
            s3={"addressing_style": "virtual" if virtual else "path"},
        ),
    )
