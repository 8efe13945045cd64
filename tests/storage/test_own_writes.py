"""Requests to object stores that are dropped, delayed or doubled, or whose answers are lost: done once."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pytest

pytest.importorskip("obstore", reason="the object stores need obstore")

import obstore
from obstore import exceptions

import reknit
from reknit.errors import StorageError
from reknit.events.phase import retries
from reknit.options import MIB
from reknit.storage.base import CopiesFiles, Sweepable
from reknit.storage.object import client as clients
from reknit.storage.object import conditions, upload
from reknit.storage.registry import open_storage
from reknit.storage.wrappers.forwarding import innermost
from reknit.testing.storage_suite import listed, pattern, read, write
from tests.running.examples import is_night
from tests.servers import environment, new_url, server
from tests.storage.fault_proxy import FaultProxy
from tests.storage.tiny_s3 import TinyS3

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.storage.base import Storage
    from tests.storage.fault_proxy import Fault

OPTIONS = "?part_mib=5&retries=3&timeout_s=20"
LARGE = pattern(5 * MIB + 1000)


@pytest.fixture(scope="module", params=["tiny", "gcs", "azure", *(["s3"] if is_night() else [])])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, FaultProxy]]:
    """Start a proxy before a store: a server of S3 in this process that drops metadata, or a real one."""
    with ExitStack() as stack:
        tiny = request.param == "tiny"
        behind = stack.enter_context(TinyS3("kept")).endpoint if tiny else server(request.param)["endpoint"]
        yield request.param, stack.enter_context(FaultProxy(behind))


@pytest.fixture
def store(served: tuple[str, FaultProxy]) -> str:
    """Return the name of the store."""
    return served[0]


@pytest.fixture
def proxy(served: tuple[str, FaultProxy], monkeypatch: pytest.MonkeyPatch) -> FaultProxy:
    """Lead all requests to the store through its proxy, and repeat them after short pauses."""
    store, proxy = served
    short = timedelta(seconds=0.001)
    monkeypatch.setattr(clients, "_BACKOFF", {"init_backoff": short, "base": 2, "max_backoff": short})
    monkeypatch.setattr(conditions, "_FIRST_PAUSE_S", 0.001)
    tiny = {"AWS_ENDPOINT_URL": proxy.endpoint, "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine"}
    for name, value in (tiny if store == "tiny" else environment(store, proxy.endpoint)).items():
        monkeypatch.setenv(name, value)
    proxy.spoil(None)
    return proxy


def new_folder(store: str) -> str:
    url = f"s3://bucket/{uuid.uuid4().hex}" if store == "tiny" else new_url(store)
    return f"{url}{OPTIONS}"


def folder_with_a_file(proxy: FaultProxy, store: str) -> Storage:
    """Return a new folder, in a bucket whose endpoint has been tested, before any fault."""
    proxy.spoil(None)
    found = open_storage(new_folder(store))
    assert found.put("first", b"1", if_absent=True)
    return found


@pytest.fixture
def storage(proxy: FaultProxy, store: str) -> Storage:
    return folder_with_a_file(proxy, store)


def spoil_each(proxy: FaultProxy, fault: Fault, methods: tuple[str, ...] = ("PUT", "POST", "DELETE")) -> None:
    """Let every request with one of these methods meet a fault when it is sent first."""
    seen = set[str]()

    def is_new(request: str) -> bool:
        new = request.startswith(methods) and request not in seen
        seen.add(request)
        return new

    proxy.spoil_those(is_new, fault, times=1000)


def put_new(storage: Storage) -> None:
    assert storage.put("x", b"new", if_absent=True)
    assert storage.get("x", limit=9) == b"new"


def put_marker(storage: Storage) -> None:
    storage.put("x", b"", if_absent=True)  # without metadata, nothing shows whose an empty file is
    assert storage.size("x") == 0


def put_taken(storage: Storage) -> None:
    assert not storage.put("first", b"2", if_absent=True)
    assert storage.get("first", limit=9) == b"1"


def put_over(storage: Storage) -> None:
    assert storage.put("first", b"2", if_absent=False)
    assert storage.get("first", limit=9) == b"2"


def write_x(storage: Storage, data: bytes) -> None:
    write(storage, "x", data)
    assert read(storage, "x", 0, len(data)) == data


def write_small(storage: Storage) -> None:
    write_x(storage, b"small")


def write_large(storage: Storage) -> None:
    write_x(innermost(storage), LARGE)  # files of some more bytes are not kept to be written anew


def abort_large(storage: Storage) -> None:
    writer = innermost(storage).create("x", len(LARGE))
    writer.write(0, memoryview(LARGE)[: 5 * MIB])
    writer.abort()
    assert listed(storage) == {"first": 1}


def commit(storage: Storage) -> None:
    storage.put("pending", b"", if_absent=True)
    assert storage.commit("x", b"new", pending="pending", if_absent=True)
    assert listed(storage) == {"first": 1, "x": 3}


def commit_over(storage: Storage) -> None:
    storage.put("pending", b"", if_absent=True)
    assert storage.commit("first", b"new", pending="pending", if_absent=False)
    assert storage.get("first", limit=9) == b"new"
    assert listed(storage) == {"first": 3}


def copy(storage: Storage) -> None:
    assert isinstance(storage, CopiesFiles)
    if storage.copy_from(storage, "first", "x", 1):
        assert storage.get("x", limit=1) == b"1"
    else:
        assert storage.url.startswith(("az:", "s3://bucket/")), "the other stores copy"
        assert listed(storage) == {"first": 1}


def delete(storage: Storage) -> None:
    storage.delete("first")
    assert listed(storage) == {}


def ask_the_time(storage: Storage) -> None:
    bucket = innermost(storage)
    assert isinstance(bucket, Sweepable)
    assert bucket.moment() > 1e9


MUTATING = (
    put_new,
    put_marker,
    put_taken,
    put_over,
    write_small,
    write_large,
    abort_large,
    commit,
    commit_over,
    copy,
    delete,
    ask_the_time,
)


@pytest.mark.parametrize("fault", ["delayed", "reset before", "applied then reset", "doubled"])
def test_an_operation_whose_every_request_meets_a_fault_is_done_once(
    proxy: FaultProxy, store: str, fault: Fault
) -> None:
    if fault in ("delayed", "doubled") and store != "tiny" and not is_night():
        pytest.skip("at night: by day the server in this process")
    for operation in MUTATING:
        storage = folder_with_a_file(proxy, store)
        spoil_each(proxy, fault)
        operation(storage)
        assert proxy.unspoilt < 1000 or (operation is copy and store == "azure"), operation


@pytest.mark.parametrize("fault", ["503", "reset before"])
def test_every_attempt_of_a_commit_without_an_answer_is_counted(
    proxy: FaultProxy, storage: Storage, fault: Fault
) -> None:
    """By the count, the caller rules out that the store carries one out later."""

    def writes_it(request: str) -> bool:
        return request.startswith("PUT") and unquote(request).partition("?")[0].endswith(f"/{path}")

    for path, if_absent in (("x", True), ("first", False)):
        storage.put("pending", b"", if_absent=True)
        before = retries.get()
        proxy.spoil_those(writes_it, fault, times=2)
        assert storage.commit(path, b"new", pending="pending", if_absent=if_absent)
        assert retries.get() == before + 2


@pytest.mark.parametrize("fault", ["500", "applied then reset"])
def test_every_attempt_of_a_deletion_without_an_answer_is_counted(
    proxy: FaultProxy, storage: Storage, fault: Fault
) -> None:
    """By the count, the caller keeps other files from taking the name."""
    before = retries.get()
    proxy.spoil_those(lambda request: request.startswith(("DELETE", "POST")), fault, times=2)
    storage.delete("first")
    assert retries.get() == before + 2
    assert listed(storage) == {}


def test_a_folder_whose_every_request_meets_a_fault_is_listed_and_read(
    proxy: FaultProxy, storage: Storage
) -> None:
    faults: tuple[Fault, ...] = ("delayed", "reset before", "truncated", "doubled")
    for fault in faults:
        spoil_each(proxy, fault, ("GET", "HEAD"))
        assert listed(storage) == {"first": 1}
        assert storage.folders() == []
        assert (storage.size("first"), storage.get("first", limit=1)) == (1, b"1")
        assert proxy.unspoilt < 1000, fault


@pytest.mark.parametrize("fault", ["409", "applied then 404"])
def test_a_refusal_of_a_write_for_another_one_at_the_same_moment_is_not_believed(
    proxy: FaultProxy, store: str, fault: Fault
) -> None:
    for operation in (put_new, put_marker, write_small, commit, commit_over):
        storage = folder_with_a_file(proxy, store)
        spoil_each(proxy, fault, ("PUT",))
        operation(storage)


def test_an_upload_that_the_store_no_longer_knows_at_its_end_is_recognised_by_its_object(
    proxy: FaultProxy, storage: Storage, store: str
) -> None:
    at_end = "comp=blocklist" if store == "azure" else "uploadId="
    method = "PUT" if store == "azure" else "POST"
    proxy.spoil_those(lambda request: request.startswith(method) and at_end in request, "applied then 404")
    write_large(storage)
    assert proxy.unspoilt == 0


def test_an_upload_whose_first_request_the_client_does_not_repeat_is_begun_again(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client repeats it to S3, and not to Google."""
    put, failed = obstore.put, list[str]()

    def first_fails(client: Any, key: str, data: Any, **options: Any) -> Any:
        if options.get("use_multipart") and not failed:
            failed.append(key)
            raise exceptions.GenericError("HTTP error: error sending request")
        return put(client, key, data, **options)

    monkeypatch.setattr(upload, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(obstore, "put", first_fails)
    write_large(storage)
    assert failed


def test_an_upload_that_is_gone_without_its_object_is_not_said_to_be_misspelt(
    proxy: FaultProxy, storage: Storage, store: str
) -> None:
    if store == "azure":
        pytest.skip("it has no uploads that can be aborted")
    proxy.spoil_those(lambda request: "partNumber=" in request, "applied then 404", times=1000)
    with pytest.raises(StorageError, match="has ended its upload in parts") as caught:
        write_large(storage)
    assert "spelled" not in str(caught.value)


@pytest.mark.parametrize("fault", ["applied then reset", "doubled", "409"])
def test_the_test_of_an_endpoint_is_not_misled_by_faults(
    proxy: FaultProxy, store: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its requests meets the fault in turn."""
    for number in range(6):
        monkeypatch.setattr(conditions, "ENDPOINTS", {})
        tried: list[str] = []

        def is_next(request: str, tried: list[str] = tried, number: int = number) -> bool:
            if unquote(request).endswith(".tmp") and not request.startswith("GET"):
                tried.append(request)
            return len(tried) == number + 1

        proxy.spoil_those(is_next, fault)
        assert open_storage(new_folder(store)).put("x", b"1", if_absent=True)


def test_an_endpoint_is_tested_once_in_a_process(
    proxy: FaultProxy, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "ENDPOINTS", {})
    for number in range(3):
        proxy.spoil(None)
        reknit.save(new_folder(store), {"x": np.arange(3.0)})
        tried = [request for request in proxy.requests if unquote(request).endswith(".tmp")]
        assert len(tried) in ((0,) if number else (5, 6)), "Azure deletes by another request"
