"""Copies by an object store: only an existing copy counts, and a missing answer is not a refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reknit.errors import StorageUnavailableError
from reknit.storage.object.client import ObjectOptions, connect, parse_url
from reknit.storage.object.store import ObjectStorage
from reknit.storage.object.upload import copied
from tests.storage.tiny_s3 import TinyS3

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyS3]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with TinyS3("kept") as started:
        yield started


def test_a_service_that_copies_nothing_is_not_believed(server: TinyS3) -> None:
    place, options = parse_url(f"s3://bucket/run?endpoint={server.endpoint}")
    storage = ObjectStorage(place, options)
    server.files["bucket/run/1/old"] = b"12345"
    assert not storage.sub("2").copy_from(storage.sub("1"), "old", "new", 5)
    assert set(server.files) == {"bucket/run/1/old"}


def test_objects_of_other_buckets_and_endpoints_are_not_taken(server: TinyS3) -> None:
    def store(url: str) -> ObjectStorage:
        return ObjectStorage(*parse_url(f"{url}?endpoint={server.endpoint}"))

    here = store("s3://bucket/2")
    assert not here.copy_from(store("s3://other/1"), "old", "new", 5)
    elsewhere = ObjectStorage(*parse_url("s3://bucket/1?endpoint=http://127.0.0.1:1"))
    assert not here.copy_from(elsewhere, "old", "new", 5)
    assert server.files == {}


def test_where_no_answer_comes_the_copy_may_be_there_and_that_is_an_error(server: TinyS3) -> None:
    place, _ = parse_url("s3://bucket/run")
    nowhere = connect(place, ObjectOptions(endpoint="http://127.0.0.1:1", retries=0))
    with pytest.raises(StorageUnavailableError):
        copied(nowhere, "run/1/old", "run/2/new", "s3://bucket/run/2/new", 5)
