"""Unfinished uploads are listed with their sizes, on real servers, and aborted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("obstore", reason="the object stores need obstore")
pytest.importorskip("botocore", reason="uploads are listed with botocore")

from reknit.errors import StorageError, StoragePermissionError, StorageUnavailableError
from reknit.storage.base import Dated
from reknit.storage.object.store import ObjectStorage, open_object
from reknit.storage.object.upload import MultipartUpload
from tests.servers import environment, reach, uploads_left

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "model/00000.0123abcd.safetensors"


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> ObjectStorage:
    return open_object(f"{reach('s3', monkeypatch)}?part_mib=5&retries=1")


def client() -> Any:
    from botocore.session import Session  # type: ignore[import-untyped]

    return Session().create_client("s3", region_name="us-east-1")


def upload_begun(storage: ObjectStorage, path: str) -> Callable[[int, bytes], None]:
    """Begin an upload without reknit, and return a function that uploads one part."""
    name = {"Bucket": storage.place.bucket, "Key": f"{storage.place.prefix}{path}"}
    number = client().create_multipart_upload(**name)["UploadId"]

    def part(at: int, data: bytes) -> None:
        client().upload_part(**name, UploadId=number, PartNumber=at, Body=data)

    return part


def uploads(storage: ObjectStorage) -> list[Dated]:
    return [each for each in storage.dated() if each.kind == "upload"]


def test_an_upload_is_as_large_as_its_parts_and_as_young_as_the_last(storage: ObjectStorage) -> None:
    """So an upload that goes on is never taken for dead, however long it lasts."""
    part = upload_begun(storage, KEY)
    (begun,) = uploads(storage)
    assert (begun.path, begun.nbytes) == (KEY, 0)
    part(1, bytes(5 << 20))
    time.sleep(2.1)  # servers return whole seconds
    part(2, b"abc")
    (found,) = uploads(storage)
    assert found.nbytes == (5 << 20) + 3
    assert found.modified > begun.modified + 1


def test_all_are_found_however_many_answers_that_takes(storage: ObjectStorage) -> None:
    paths = sorted(f"model/{rank:05d}.0123abcd.safetensors" for rank in range(5))
    for path in paths:
        upload_begun(storage, path)
    from reknit.storage.object.upload import Uploads

    reported = Uploads(storage.place, storage.options)
    asked: list[dict[str, Any]] = []

    def two_at_once(params: dict[str, Any], **_: Any) -> None:
        params["MaxUploads"] = 2
        asked.append(params)

    reported.client.meta.events.register("before-parameter-build.s3.ListMultipartUploads", two_at_once)
    assert sorted(each.path for each in reported.under_way()) == paths
    assert len(asked) >= 3


def test_what_is_gone_is_no_error(storage: ObjectStorage) -> None:
    upload_begun(storage, KEY)
    (found,) = uploads(storage)
    for _ in range(2):
        storage.discard(found)
    assert uploads(storage) == []
    storage.discard(Dated("temporary", ".0123.lock.tmp", 0, 0.0))


def test_an_interrupt_while_an_object_is_finished_aborts_its_upload(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = storage.create(KEY, 12 << 20)
    writer.write(0, memoryview(bytes(12 << 20)))
    assert len(uploads_left(storage.url)) == 1

    def interrupted(self: MultipartUpload) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MultipartUpload, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.finish()
    assert uploads_left(storage.url) == []


def test_what_goes_wrong_is_told_as_by_every_store(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reknit.storage.object.upload import Uploads

    cases: list[tuple[str, dict[str, str], type[StorageError]]] = [
        ("s3://no-such-bucket/x", {}, StorageError),
        ("s3://reknit/x", {"AWS_SECRET_ACCESS_KEY": "wrong"}, StoragePermissionError),
        ("s3://reknit/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, StorageUnavailableError),
    ]
    for url, variables, error in cases:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            below = open_object(f"{url}?retries=0")
            with pytest.raises(error, match="s3://") as raised:
                list(Uploads(below.place, below.options).under_way())
        assert "wrong" not in str(raised.value)


def test_the_endpoint_is_found_by_the_names_that_the_other_client_knows(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    from reknit.storage.object.upload import Uploads

    endpoint = environment("s3")["AWS_ENDPOINT_URL"]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_ENDPOINT", endpoint)
    monkeypatch.setenv("AWS_REGION", "eu-west-7")
    meta = Uploads(storage.place, storage.options).client.meta
    assert (meta.endpoint_url, meta.region_name) == (endpoint, "eu-west-7")
    below = open_object(f"{storage.url}?endpoint=http://127.0.0.1:9&region=us-west-2")
    meta = Uploads(below.place, below.options).client.meta
    assert (meta.endpoint_url, meta.region_name) == ("http://127.0.0.1:9", "us-west-2")
