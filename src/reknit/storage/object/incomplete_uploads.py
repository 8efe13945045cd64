"""Find and remove unfinished uploads and other remains of dead writers in a bucket."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import obstore

from reknit.errors import MissingExtraError, StorageError, StorageFullError, StoragePermissionError
from reknit.monitor.phase import now
from reknit.storage.base import Dated
from reknit.storage.object.client import moment_of
from reknit.storage.object.errors import as_ours, translated
from reknit.storage.paths import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.storage.object.client import Bucket, Client, ObjectOptions

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
