"""The suite of stores on S3, on the gateway of Ceph: ``scripts/servers up ceph``.

The gateway answers 412 to a write with If-Match over a matching object, so that conditions alone cannot
commit.  By option, reknit refuses the gateway, or uses a lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import reknit
from reknit.errors import StorageError
from reknit.storage.object.client import ObjectOptions, parse_url
from reknit.storage.object.store import ObjectStorage
from reknit.storage.registry import open_storage
from reknit.testing.storage_suite import StorageSuite
from tests.servers import environment, new_url, raw_get
from tests.storage.test_object import OnServer, image, in_parts, write_whole

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.storage.base import Storage

pytestmark = pytest.mark.filterwarnings("ignore:.*lock object")


class TestCeph(OnServer, StorageSuite):
    """The whole contract, with a lock."""

    server = "ceph"

    def make(self, tmp_path: Path) -> Storage:
        place, _ = parse_url(new_url(self.server))
        storage = ObjectStorage(place, ObjectOptions(conditional="lock"))
        storage.bucket.conditions.settle_s = 0.05  # it is one gateway, on this machine
        return storage


@pytest.fixture
def ceph(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a new folder, which the environment leads to."""
    for name, value in environment("ceph").items():
        monkeypatch.setenv(name, value)
    return new_url("ceph")


def test_it_is_refused_where_nothing_else_is_said(ceph: str) -> None:
    with pytest.raises(StorageError, match=r"(?s)If-Match.*\?conditional=lock"):
        reknit.save(ceph, {"x": np.arange(5)})
    assert list(open_storage(ceph).list()) == []


def test_with_a_lock_object_it_is_saved_to_and_over_after_a_warning(ceph: str) -> None:
    with pytest.warns(RuntimeWarning, match="lock object"):
        reknit.save(f"{ceph}?conditional=lock", {"x": np.arange(5)})
    reknit.save(f"{ceph}?conditional=lock", {"x": np.arange(5) * 2}, overwrite=True)
    target = {"x": np.zeros(5, int)}
    reknit.load(ceph, target)
    assert target["x"].tolist() == [0, 2, 4, 6, 8]
    assert reknit.verify(ceph).ok


def test_a_large_file_goes_up_in_parts_and_comes_back(ceph: str) -> None:
    storage, data = in_parts(ceph), image(23_000_007)
    write_whole(storage, "x", data)
    assert raw_get("ceph", f"{ceph}/x") == data.tobytes()
    buffer = bytearray(len(data))
    storage.read_into("x", 0, [memoryview(buffer)])
    assert buffer == data.tobytes()
