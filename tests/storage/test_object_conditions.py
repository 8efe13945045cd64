"""Endpoints that ignore conditions are detected, before a checkpoint depends on them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("obstore", reason="the object stores need obstore")

import obstore

import reknit
from reknit.errors import StorageError
from reknit.storage.object.client import ObjectOptions, parse_url
from reknit.storage.object.store import ObjectStorage
from tests.storage.tiny_s3 import Conditions, TinyS3

if TYPE_CHECKING:
    from collections.abc import Iterator

URL = "s3://bucket/run"
WRONG = pytest.mark.parametrize("tiny", ["ignored", "unknown"], indirect=True)


@pytest.fixture
def tiny(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyS3]:
    conditions: Conditions = request.param
    with TinyS3(conditions) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anybody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not a secret")
        yield store


def opened(**options: object) -> ObjectStorage:
    store = ObjectStorage(parse_url(URL)[0], ObjectOptions(retries=1, **options))  # type: ignore[arg-type]
    store.bucket.conditions.settle_s = 0.05
    return store


@pytest.mark.parametrize("tiny", ["kept"], indirect=True)
def test_conditions_are_tried_once_with_six_small_requests(tiny: TinyS3) -> None:
    store = opened()
    assert store.put("a", b"1", if_absent=True)
    tried = [path for _, path in tiny.requests if path.endswith(".tmp")]
    assert (len(tried), len(set(tried))) == (6, 1)
    assert store.put("b", b"2", if_absent=True)
    assert len([path for _, path in tiny.requests if path.endswith(".tmp")]) == 6


@pytest.mark.parametrize("tiny", ["kept"], indirect=True)
def test_an_endpoint_that_keeps_to_conditions_is_used_with_them(tiny: TinyS3) -> None:
    reknit.save(f"{URL}/1", {"x": np.arange(5)})
    assert reknit.verify(f"{URL}/1").ok
    assert not any(key.endswith(".tmp") for key in tiny.files)


@WRONG
def test_a_save_to_an_endpoint_without_conditions_is_refused(tiny: TinyS3) -> None:
    """The error has a remedy, and no files are left."""
    with pytest.raises(StorageError, match=r"(?s)conditional create.*\?conditional=lock"):
        reknit.save(f"{URL}?retries=1", {"x": np.arange(5)})
    assert tiny.files == {}


@WRONG
def test_with_a_lock_object_it_is_saved_to_after_a_warning(tiny: TinyS3) -> None:
    with pytest.warns(RuntimeWarning, match="lock object"):
        reknit.save(f"{URL}?retries=1&conditional=lock", {"x": np.arange(5)})
    target = {"x": np.zeros(5, int)}
    reknit.load(URL, target)
    assert target["x"].tolist() == [0, 1, 2, 3, 4]
    assert not any(key.endswith(".tmp") for key in tiny.files)


@WRONG
@pytest.mark.filterwarnings("ignore:.*lock object")
def test_of_many_who_use_the_lock_one_is_first(tiny: TinyS3) -> None:
    """Each has a client of its own, as in a process of its own."""
    stores = [opened(conditional="lock") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda k: stores[k].put("x", b"%d" % k, if_absent=True), range(4)))
    assert won.count(True) == 1
    assert tiny.files["bucket/run/x"] == b"%d" % won.index(True)
    for k, store in enumerate(stores):
        store.put(f"pending.{k}", b"", if_absent=False)
    with ThreadPoolExecutor(4) as pool:
        assert all(
            pool.map(
                lambda k: stores[k].commit("x", b"%d!" % k, pending=f"pending.{k}", if_absent=False), range(4)
            )
        )
    assert tiny.files.keys() == {"bucket/run/x"}


@pytest.mark.parametrize("tiny", ["ignored"], indirect=True)
@pytest.mark.filterwarnings("ignore:.*lock object")
def test_a_lock_is_no_older_because_the_clock_of_its_holder_is_behind(
    tiny: TinyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reknit.storage.object.conditions._LOCK_WAIT_S", 0.2)
    store = opened(conditional="lock")
    two_hours_ago = time.time() - 7200.0
    tiny.files["bucket/run/.x.lock.tmp"] = f"other {two_hours_ago}".encode()
    with pytest.raises(reknit.ReknitError, match="another process has held the lock"):
        store.put("x", b"1", if_absent=True)
    assert not [key for key in tiny.files if key.endswith(".tmp") and key != "bucket/run/.x.lock.tmp"]


@pytest.mark.parametrize("tiny", ["ignored"], indirect=True)
@pytest.mark.filterwarnings("ignore:.*lock object")
def test_under_the_lock_a_marker_may_vanish_at_once_and_a_manifest_may_not(
    tiny: TinyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, get = opened(conditional="lock"), obstore.get
    assert store.put("first", b"1", if_absent=True)

    def removed(client: Any, key: str) -> Any:
        if not key.endswith(".tmp"):
            obstore.delete(client, key)
        return get(client, key)

    monkeypatch.setattr(obstore, "get", removed)
    assert store.put("pending", b"", if_absent=True)
    with pytest.raises(StorageError, match="manifest was written, but is missing"):
        store.put("manifest", b"{}", if_absent=True)


@pytest.mark.parametrize("tiny", ["unknown"], indirect=True)
def test_files_without_a_condition_go_up_to_an_endpoint_that_knows_none(tiny: TinyS3) -> None:
    """They have unique names; an existing file is still not written again."""
    store = opened()
    writer = store.create("x", 3)
    writer.write(0, memoryview(b"abc"))
    writer.finish()
    with pytest.raises(StorageError, match="exists"):
        store.create("x", 3)
    assert tiny.files == {"bucket/run/x": b"abc"}
