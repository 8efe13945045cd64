"""Calls of a NameNode that are dropped, delayed or doubled, or whose answers are lost: done once."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import pytest

pytest.importorskip("hdfs_native", reason="HDFS needs hdfs-native")

from reknit.errors import StorageNotFoundError, StorageUnavailableError
from reknit.options import MIB
from reknit.storage.wrappers.forwarding import innermost
from reknit.storage.wrappers.retrying import RetryingStorage, RetryPolicy
from reknit.stores.hdfs.store import open_hdfs
from reknit.testing.storage_suite import listed, pattern, read, write
from tests.running.budget import use_server
from tests.running.examples import thinned
from tests.stores.hdfs_probes import new_proxy
from tests.stores.rpc_proxy import FAULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hdfs_native import FileStatus

    from reknit.storage.base import Storage
    from reknit.stores.hdfs.client import HdfsClient
    from tests.stores.rpc_proxy import Fault, RpcProxy

T = TypeVar("T")
LARGE = pattern(2 * MIB + 1)
POLICY = RetryPolicy(deadline_s=60, first_s=0.01, longest_s=0.5)


def at_once(operations: Sequence[T], test: Callable[[RpcProxy, T], None]) -> None:
    """Test operations at the same time, each through its own proxy: HDFS takes half a second for a file."""

    def through_its_own(operation: T) -> None:
        with new_proxy() as proxy:
            test(proxy, operation)

    use_server("hdfs")
    with ThreadPoolExecutor(len(operations)) as pool:
        list(pool.map(through_its_own, operations))


def folder_with_a_file(proxy: RpcProxy) -> Storage:
    folder = f"hdfs://127.0.0.1:{proxy.port}/answers-{uuid.uuid4().hex}"
    found = RetryingStorage(open_hdfs(f"{folder}?part_mib=1&block_mib=1&timeout_s=10&tries=2"), POLICY)
    assert found.put("first", b"1", if_absent=True)
    return found


@pytest.fixture
def storage() -> Iterator[Storage]:
    with new_proxy() as proxy:
        yield folder_with_a_file(proxy)


def put_new(storage: Storage) -> None:
    assert storage.put("x", b"new", if_absent=True)
    assert storage.get("x", limit=9) == b"new"


def put_marker(storage: Storage) -> None:
    assert storage.put("x", b"", if_absent=True)
    assert listed(storage) == {"first": 1, "x": 0}


def put_over(storage: Storage) -> None:
    assert storage.put("first", b"2", if_absent=False)
    assert storage.get("first", limit=9) == b"2"


def write_x(storage: Storage, data: bytes) -> None:
    write(storage, "below/x", data)
    assert read(storage, "below/x", 0, len(data)) == data


def write_small(storage: Storage) -> None:
    write_x(storage, b"small")


def write_large(storage: Storage) -> None:
    write_x(storage, LARGE)


def commit(storage: Storage) -> None:
    assert storage.put("pending", b"", if_absent=True)
    assert storage.commit("x", b"new", pending="pending", if_absent=True)
    assert listed(storage) == {"first": 1, "x": 3}


def commit_over(storage: Storage) -> None:
    assert storage.put("pending", b"", if_absent=True)
    assert storage.commit("first", b"new", pending="pending", if_absent=False)
    assert storage.get("first", limit=9) == b"new"


def delete(storage: Storage) -> None:
    storage.delete("first")
    assert listed(storage) == {}


def look(storage: Storage) -> None:
    assert listed(storage) == {"first": 1}
    assert (storage.size("first"), storage.get("first", limit=1)) == (1, b"1")


CALLS: list[tuple[Callable[[Storage], None], tuple[str, ...]]] = [
    (put_new, ("create", "addBlock", "fsync", "complete", "rename2")),
    (put_marker, ("create", "complete", "rename2")),
    (put_over, ("rename2",)),
    (write_small, ("mkdirs", "create", "addBlock", "complete", "rename2")),
    (write_large, ("create", "complete", "concat", "rename2")),
    (commit, ("append", "addBlock", "complete", "rename2")),
    (commit_over, ("append", "rename2")),
    (delete, ("delete",)),
    (look, ("getListing", "getFileInfo", "getBlockLocations")),
]


@pytest.mark.parametrize("fault", thinned(FAULTS, 2))
def test_an_operation_whose_calls_meet_a_fault_is_done_once(fault: Fault) -> None:
    """The next call of each method meets it, also when the operation is repeated."""

    def test(proxy: RpcProxy, calls: tuple[Callable[[Storage], None], tuple[str, ...]]) -> None:
        operation, methods = calls
        storage = folder_with_a_file(proxy)
        proxy.spoil(fault, *methods)
        operation(storage)
        assert not proxy.unspoilt, (operation, proxy.calls)

    at_once(CALLS, test)


RENAMING = (put_new, put_over, write_small, commit, commit_over)


def test_a_rename_whose_answer_was_lost_is_recognised_without_another_try() -> None:
    def test(proxy: RpcProxy, operation: Callable[[Storage], None]) -> None:
        storage = folder_with_a_file(proxy)
        proxy.spoil("lost", "rename2")
        operation(innermost(storage))
        assert len([call for call in proxy.calls if call.startswith("rename2 ")]) == 1, operation
        if operation not in (commit, commit_over):
            assert "rename2" not in proxy.calls, operation

    at_once(RENAMING, test)


def test_a_look_for_a_renamed_file_does_not_stay_on_a_connection_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def test(proxy: RpcProxy, operation: Callable[[Storage], None]) -> None:
        inner = innermost(folder_with_a_file(proxy))
        end_with_the_answer_to_a_rename(inner.client, monkeypatch)  # type: ignore[attr-defined]
        operation(inner)

    at_once(RENAMING, test)


def end_with_the_answer_to_a_rename(client: HdfsClient, patch: pytest.MonkeyPatch) -> None:
    """Let the next rename end the connection that its client uses, before its answer."""
    rename, stat, dead = client.rename, client.stat, client.raw

    def ended(path: str) -> FileStatus:
        if client.raw is dead:
            raise StorageUnavailableError("RPC listener disconnected", path=path)
        return stat(path)

    def unanswered(source: str, target: str, *, overwrite: bool) -> None:
        rename(source, target, overwrite=overwrite)
        patch.setattr(client, "stat", ended)
        raise StorageUnavailableError("no answer", path=target)

    patch.setattr(client, "rename", unanswered)


def test_a_commit_whose_marker_another_save_removed_has_not_happened(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other save commits a manifest of the same length just before the rename."""
    inner = innermost(storage)
    assert inner.put("marker", b"", if_absent=True)
    client = inner.client  # type: ignore[attr-defined]
    rename = client.rename

    def late(source: str, target: str, *, overwrite: bool) -> None:
        monkeypatch.setattr(client, "rename", rename)
        inner.delete("marker")
        assert inner.put("manifest", b"theirs", if_absent=True)
        rename(source, target, overwrite=overwrite)

    monkeypatch.setattr(client, "rename", late)
    with pytest.raises(StorageNotFoundError):
        inner.commit("manifest", b"behind", pending="marker", if_absent=False)
    assert inner.get("manifest", limit=9) == b"theirs"
