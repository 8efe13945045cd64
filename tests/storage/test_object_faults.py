"""Every request of a save or a load may fail: a save commits once or not at all, and stays readable."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("obstore", reason="the object stores need obstore")

import reknit
from reknit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FencedError,
    ReknitError,
    StorageError,
)
from reknit.options import MIB
from reknit.storage.object.client import ObjectOptions, parse_url
from reknit.storage.object.store import ObjectStorage
from reknit.storage.registry import open_storage
from tests.running.examples import is_night, thinned
from tests.servers import new_url, raw_get, reach, uploads_left
from tests.storage.fault_proxy import FAULTS, FaultProxy, before

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.storage.fault_proxy import Fault

QUICK = "?retries=2&timeout_s=0.5"


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with before("s3") as proxy:
        yield proxy


def state(value: int) -> dict[str, object]:
    return {"x": np.full(1000, value)}


def loaded(url: str) -> int:
    """Return the one value of all elements of a checkpoint."""
    target = np.zeros(1000, int)
    reknit.load(url, {"x": target})
    (value,) = set(target.tolist())
    return int(value)


def requests_of(proxy: FaultProxy, call: object) -> int:
    proxy.spoil(None)
    assert callable(call)
    call()
    return len(proxy.requests)


@pytest.mark.parametrize("shift", thinned([0, 4], 2))
def test_a_save_that_meets_a_fault_is_committed_once_or_not(proxy: FaultProxy, shift: int) -> None:
    """Every request meets two of the faults; a save that returns can be loaded."""
    total = requests_of(proxy, lambda: reknit.save(new_url("s3") + QUICK, state(1)))
    assert total > 15
    for at in range(total):
        url, fault = new_url("s3"), FAULTS[(at + shift) % len(FAULTS)]
        proxy.spoil(at, fault)
        try:
            reknit.save(url + QUICK, state(at))
            error = None
        except ReknitError as caught:
            error = caught
        proxy.spoil(None)
        try:
            assert loaded(url) == at
        except CheckpointNotFoundError:
            # Refusals are retried for a while, but a request that may have been carried out is not repeated.
            assert error is not None, f"{fault} at request {at} of {total}"
            assert fault not in ("500", "503"), f"{fault} at request {at} of {total}: {error}"


def test_a_load_that_meets_a_fault_loads_all_or_says_why(proxy: FaultProxy) -> None:
    """Every request meets all faults, by day a third of them."""
    url = new_url("s3")
    reknit.save(url, state(7))
    total = requests_of(proxy, lambda: loaded(url + QUICK))
    for at in range(total):
        for fault in FAULTS if is_night() else FAULTS[at % 3 :: 3]:
            proxy.spoil(at, fault)
            try:
                assert loaded(url + QUICK) == 7
            except ReknitError:
                assert fault not in ("500", "503", "reset before", "reset mid"), f"{fault} at {at} of {total}"


def test_an_overwrite_that_meets_a_fault_leaves_the_old_or_the_new(proxy: FaultProxy) -> None:
    url, value = new_url("s3"), 0
    reknit.save(url, state(0))
    total = requests_of(proxy, lambda: reknit.save(url + QUICK, state(0), overwrite=True))
    every = 2 if is_night() else 5
    for at in range(0, total, every):
        proxy.spoil(at, FAULTS[at // every % len(FAULTS)])
        try:
            reknit.save(url + QUICK, state(at + 1), overwrite=True)
            allowed = {at + 1}
        except ReknitError:
            allowed = {value, at + 1}
        proxy.spoil(None)
        value = loaded(url)
        assert value in allowed


@pytest.mark.parametrize("fault", ["applied then reset", "applied then 500"])
def test_a_write_whose_answer_was_lost_is_recognised_as_ones_own(proxy: FaultProxy, fault: Fault) -> None:
    """The client may have repeated the write, which then fails because the file exists, or may not have."""
    url = new_url("s3")
    storage = open_storage(url)
    assert storage.put("first", b"", if_absent=True)  # tests the endpoint's conditions

    def write(path: str) -> None:
        writer = storage.create(path, 1)
        writer.write(0, memoryview(b"1"))
        writer.finish()

    def commit(path: str) -> bool:
        return storage.commit(path, b"2", pending=f"{path}.pending", if_absent=True)

    def put(path: str) -> bool:
        return storage.put(path, b"", if_absent=True)

    for call in (write, commit, put):
        for path in ("dry", "wet"):
            storage.put(f"{path}.pending", b"", if_absent=True)
        proxy.spoil(None)
        call("dry")
        written = [request.startswith("PUT") for request in proxy.requests]
        proxy.spoil(written.index(True), fault)
        assert call("wet") in (True, None)
        assert storage.size("wet") == (0 if call is put else 1)
        for path in ("dry", "wet"):
            storage.delete(path)


def test_a_part_that_meets_a_fault_goes_up_again(proxy: FaultProxy) -> None:
    """Parts may be sent twice; so may the requests around them."""
    data = np.random.default_rng(1).integers(0, 256, 11 * MIB, np.uint8)
    url = new_url("s3")
    for number, fault in enumerate(FAULTS):
        options = ObjectOptions(part_nbytes=5 * MIB, retries=2, timeout_s=2.0 if fault == "hang" else 10.0)
        storage = ObjectStorage(parse_url(url)[0], options)
        # after two to create it: the start of the upload, three parts, a look, the end
        proxy.spoil(3 + 2 * (number % 2), fault)
        writer = storage.create(fault, len(data))
        writer.write(0, data.data)
        writer.finish()
        assert raw_get("s3", f"{url}/{fault}") == data.tobytes(), fault
    assert uploads_left(url) == []


def test_an_upload_whose_parts_are_all_refused_fails_and_leaves_none(proxy: FaultProxy) -> None:
    """Every writing thread receives the error, and the memory is freed."""
    data = np.zeros(30 * MIB, np.uint8)
    url = new_url("s3")
    storage = ObjectStorage(parse_url(url)[0], ObjectOptions(part_nbytes=5 * MIB, retries=1))
    writer = storage.create("x", len(data))
    proxy.spoil(1, "503", times=1000)

    def write(start: int) -> None:
        writer.write(start, data[start : start + 10 * MIB].data)

    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(write, start) for start in range(0, len(data), 10 * MIB)]
    proxy.spoil(None)
    try:
        if not any(isinstance(end.exception(), StorageError) for end in ends):
            with pytest.raises(StorageError):
                writer.finish()
    finally:
        writer.abort()
    with pytest.raises(StorageError):
        storage.size("x")


@pytest.mark.parametrize("store", ["s3", "gcs", "azure"])
def test_of_four_saves_of_one_step_that_begin_together_exactly_one_wins(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The types of the losers' errors show the conflict."""
    reach(store, monkeypatch)
    line = threading.Barrier(4)

    def save(url: str, value: int) -> ReknitError | None:
        line.wait(60)
        try:
            reknit.save(url, state(value))
        except ReknitError as error:
            return error
        return None

    with ThreadPoolExecutor(4) as pool:
        for _ in range(20 if is_night() else 3):
            url = new_url(store)
            ends = list(pool.map(partial(save, url), range(4)))
            assert ends.count(None) == 1, ends
            assert loaded(url) == ends.index(None)
            lost = [end for end in ends if end is not None]
            assert all(isinstance(end, (FencedError, CheckpointExistsError)) for end in lost), ends


def test_a_reader_during_overwrites_sees_the_old_or_the_new(proxy: FaultProxy) -> None:
    url, seen, over = new_url("s3"), set[int](), threading.Event()
    reknit.save(url, state(0))

    def watch() -> None:
        while not over.is_set():
            try:
                seen.add(loaded(url))
            except StorageError:  # the error that its files were replaced, and no other one
                continue

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            for value in range(1, 8):
                reknit.save(url, state(value), overwrite=True)
        finally:
            over.set()
        watching.result()
    assert seen <= set(range(8))
    assert loaded(url) == 7


def test_a_save_in_the_background_goes_through_agents(proxy: FaultProxy) -> None:
    """Agents are separate processes, started and never forked, and open the store by its URL."""
    reknit.close()  # agents keep the environment of their start
    url = new_url("s3")
    assert open_storage(url).put("used", b"1", if_absent=True)  # this process has a client, with threads
    for value in range(3):
        reknit.save(f"{url}/{value}", state(value), wait=False).result()
    reknit.close()
    assert [loaded(f"{url}/{value}") for value in range(3)] == [0, 1, 2]
