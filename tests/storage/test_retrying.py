"""Requests to remote stores are retried for the time in their URL, and are carried out once."""

from __future__ import annotations

import itertools
import logging
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.errors import StorageError, StorageUnavailableError, UsageError
from reknit.options import MIB
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import open_storage, recipe, register
from reknit.storage.wrappers.retrying import RetryingStorage, RetryPolicy, with_retries
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.testing.storage_suite import listed, pattern, read, write
from tests.running.examples import is_night
from tests.servers import new_url
from tests.storage.fault_proxy import FaultProxy, before
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from reknit.options import Durability
    from reknit.storage.base import Storage, Writer
    from reknit.testing.faulty_storage import FaultKind

QUICK = RetryPolicy(deadline_s=20, first_s=0.001, longest_s=0.002)


def retrying(folder: Path, *faults: Fault, policy: RetryPolicy = QUICK, resumes: bool = False) -> Any:
    return RetryingStorage(FaultyStorage(LocalStorage(folder), plan=faults), policy, resumes=resumes)


# Files of stores whose writers cannot go on


def test_a_small_file_is_written_anew_where_its_writer_cannot_go_on(tmp_path: Path) -> None:
    data = pattern(1000)
    kinds: tuple[FaultKind, ...] = ("away", "unheard")
    for kind, operation in itertools.product(kinds, ("write", "finish")):
        folder = tmp_path / f"{kind} {operation}"
        storage = retrying(folder, Fault(kind, 1, operation))
        writer = storage.create("x", len(data))
        writer.write(500, memoryview(data)[500:])
        writer.write(0, memoryview(data)[:500])
        writer.finish()
        assert read(storage, "x", 0, len(data)) == data
        assert storage.retries == {"finish": 1}, folder.name
        assert listed(LocalStorage(folder)) == {"x": 1000}


def test_a_file_that_is_too_large_to_be_kept_is_left_to_its_store(tmp_path: Path) -> None:
    storage = retrying(tmp_path, Fault("away", 1, "finish"))
    writer = storage.create("x", 17 * MIB)
    writer.write(0, memoryview(bytes(17 * MIB)))
    with pytest.raises(StorageUnavailableError):
        writer.finish()
    writer.abort()
    assert not storage.retries
    assert listed(storage) == {}


def test_a_create_whose_answer_was_lost_says_what_stands_in_the_way(tmp_path: Path) -> None:
    """The name is taken in the folder from then on, and the writer that took it cannot be determined."""
    for name, resumes in (("x", True), ("y", False)):
        storage = retrying(tmp_path, Fault("unheard", 1, "create"), resumes=resumes)
        with pytest.raises(StorageError, match="may be from an attempt before, of which no answer came"):
            storage.create(name, 3)
        other = retrying(tmp_path, resumes=resumes)
        with pytest.raises(StorageError) as caught:
            other.create(name, 3)
        assert "attempt" not in str(caught.value)


class Dead(ProcessMemory):
    """A store whose files fail after their first piece, as with an aborted upload."""

    def create(self, path: str, nbytes: int) -> Any:
        return _DeadWriter(super().create(path, nbytes))


class _DeadWriter:
    def __init__(self, inner: Writer) -> None:
        self.inner, self.error = inner, StorageUnavailableError("one part could not go up")

    def write(self, start: int, data: memoryview) -> None:
        raise self.error


def test_who_raises_the_same_error_again_is_not_waited_for() -> None:
    storage = RetryingStorage(Dead("dead"), RetryPolicy(deadline_s=1000, first_s=0.001))
    with pytest.raises(StorageUnavailableError, match=r"one part could not go up$"):
        storage.create("x", 3).write(0, memoryview(b"abc"))
    assert storage.retries == {"write": 1}


# How long


class Away(ProcessMemory):
    """A store that cannot be reached until `there` is set."""

    there = False

    def size(self, path: str) -> int:
        if not self.there:
            raise StorageUnavailableError("nobody answers")
        return super().size(path)


def seconds(storage: Storage) -> float:
    begin = time.monotonic()
    with pytest.raises(StorageUnavailableError):
        storage.size("x")
    return time.monotonic() - begin


def test_what_comes_after_an_operation_that_was_given_up_is_not_waited_for_as_long_again() -> None:
    """So a failed save does not wait once more for each file that it would delete."""
    away = Away("away")
    storage = RetryingStorage(away, RetryPolicy(deadline_s=0.5, first_s=0.001, longest_s=0.01))
    assert seconds(storage) >= 0.5
    before = storage.retries["size"]
    for _ in range(5):
        seconds(storage)
    assert storage.retries["size"] == before
    away.there = True
    write(storage, "x", b"1")
    assert storage.size("x") == 1
    away.there = False
    assert seconds(storage) >= 0.5
    assert storage.retries["size"] > before
    time.sleep(0.6)  # so that the next failure counts as another outage
    assert seconds(storage) >= 0.5


def test_the_first_repetition_of_each_operation_is_told_and_not_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = [Fault("away", n) for n in range(1, 100, 2)]
    storage = RetryingStorage(FaultyStorage(LocalStorage(tmp_path), plan=plan), QUICK)
    with caplog.at_level(logging.WARNING, "reknit"):
        for k in range(10):
            storage.sub("a").put(f"x{k}", b"1", if_absent=True)
        storage.sub("a").size("x1")
    reported = [record.getMessage() for record in caplog.records]
    assert len(reported) == 2
    assert all(str(tmp_path) in line and "is tried again, for up to 20 s" in line for line in reported)
    assert storage.retries == {"put": 10, "size": 1}


# By the URL

OPENED: list[str] = []


@with_retries(resumes=False)
def vault(url: str, durability: Durability) -> Storage:
    """Open a store for these tests."""
    OPENED.append(url)
    return ProcessMemory("vault")


def test_the_url_says_how_long_a_store_is_asked_again() -> None:
    register("patient-vault", vault)
    for option, rest, deadline_s in (
        ("", "", 120.0),
        ("?retry_s=7.5", "", 7.5),
        ("?a=b&retry_s=7&c=d", "?a=b&c=d", 7.0),
        ("?a=b", "?a=b", 120.0),
        ("?retry_s=0", "", None),
        ("?retry_s=0&a", "?a", None),
    ):
        storage = open_storage(f"patient-vault://x/y{option}")
        assert OPENED[-1] == f"patient-vault://x/y{rest}"
        assert isinstance(storage, RetryingStorage) == (deadline_s is not None), option
        if isinstance(storage, RetryingStorage):
            assert storage.policy.deadline_s == deadline_s
            assert isinstance(storage.inner, ProcessMemory)
    assert recipe("patient-vault://x") == ("patient-vault://x", True, f"{__name__}:vault")


def test_a_time_that_is_none_is_refused() -> None:
    register("patient-vault", vault)
    for option in ("retry_s=", "retry_s=soon", "retry_s=-1", "retry_s=inf", "retry_s=nan"):
        with pytest.raises(UsageError, match="retry_s is a number of seconds"):
            open_storage(f"patient-vault://x?{option}")


def test_what_is_on_this_host_or_registered_is_opened_as_it_is(tmp_path: Path) -> None:
    register("plain-vault", lambda url, durability: ProcessMemory("vault"))
    for url in (tmp_path, f"file://{tmp_path}", "mem://x", "plain-vault://x"):
        assert not isinstance(open_storage(url), RetryingStorage)


# A server that goes away and comes back

AWAY_S, MANY = 1.5, 1 << 20


class AwayFor:
    """Is a server away when a request comes?  For some seconds, from so many of its PUT requests on."""

    def __init__(self, after_puts: int = 0) -> None:
        self.left, self.over_at = after_puts, math.inf

    def __call__(self, request: str) -> bool:
        self.left -= request.startswith("PUT ")
        if self.left <= 0 and self.over_at == math.inf:
            self.over_at = time.monotonic() + AWAY_S
        return self.left <= 0 and time.monotonic() < self.over_at


def go_away(proxy: FaultProxy, after_puts: int = 0) -> None:
    proxy.spoil_those(AwayFor(after_puts), "reset before", times=MANY)


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    pytest.importorskip("obstore", reason="the object stores need obstore")
    with before("s3") as proxy:
        yield proxy


@pytest.mark.parametrize("after_puts", [4, *[0] * is_night()])
def test_a_save_and_a_load_pass_through_a_server_that_is_away_for_a_while(
    after_puts: int, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """The client alone, which tries twice, would give up in a fraction of a second."""
    url = new_url("s3")
    state: dict[str, Any] = {"model": {"w": np.arange(200_000.0)}, "extra": {"n": 3}}
    go_away(proxy)
    with pytest.raises(StorageUnavailableError):
        reknit.save(f"{url}/alone?retries=1&retry_s=0", state)
    go_away(proxy, after_puts)
    with caplog.at_level(logging.WARNING, "reknit"):
        reknit.save(f"{url}/run?retries=1", state)
    assert proxy.unspoilt < MANY
    assert any("is tried again, for up to 120 s" in record.getMessage() for record in caplog.records)
    assert len(caplog.records) < 10
    go_away(proxy)
    target: dict[str, Any] = {"model": {"w": np.zeros(200_000)}, "extra": {"n": 0}}
    reknit.load(f"{url}/run?retries=1", target)
    assert (target["model"]["w"] == state["model"]["w"]).all()
    assert target["extra"] == {"n": 3}


def test_parts_of_a_large_file_outlast_a_server_that_is_away_by_the_clients_own_tries(
    proxy: FaultProxy,
) -> None:
    data = np.random.default_rng(1).integers(0, 256, 40 * MIB, np.uint8)
    url = new_url("s3")
    go_away(proxy, after_puts=6)
    reknit.save(url, {"m": {"w": data}})
    assert proxy.unspoilt < MANY
    target = np.zeros_like(data)
    reknit.load(url, {"m": {"w": target}})
    assert (target == data).all()
