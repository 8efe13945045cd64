"""Processes of a JAX job connect by its coordination service: a simulated one, and that of JAX."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from reknit.errors import CommError, DeadlineError, MissingExtraError, UsageError
from reknit.integrations.jax.job import JaxStore, coordination_store
from tests.ports import free_port

SOURCES = Path(__file__).parents[2] / "src"


class Client:
    """A coordination service within this process, with the words of JAX's."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.waits_ms: list[int] = []
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        with self._changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.values[key] = value
            self._changed.notify_all()

    def key_value_try_get_bytes(self, key: str) -> bytes:
        if key not in self.values:
            raise RuntimeError(f"NOT_FOUND: Config key {key} not found.")
        return self.values[key]

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        self.waits_ms.append(timeout_in_ms)
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
            return self.values[key]


def test_a_value_that_was_set_is_there_and_gives_way_to_a_later_one() -> None:
    client = Client()
    store = JaxStore(client, "a")
    store.set("key", b"one")
    store.set("key", b"\x00two")
    assert store.get("key", 0) == store.get("key", 5) == b"\x00two"
    assert client.values == {"a/key": b"\x00two"}
    with pytest.raises(DeadlineError, match=r"'key' into JAX's store within 0 s"):
        JaxStore(client, "b").get("key", 0)


def test_a_value_is_waited_for_in_slices_that_let_ctrl_c_through() -> None:
    client = Client()
    store = JaxStore(client, "a")
    with pytest.raises(DeadlineError, match=r"within 1\.25 s"):
        store.get("key", 1.25)
    assert client.waits_ms == [1000, 250]
    threading.Timer(0.1, store.set, ("key", b"late")).start()
    assert store.get("key", 20) == b"late"


def test_a_service_that_is_gone_is_said_to_be() -> None:
    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("UNAVAILABLE: failed to connect to all addresses")

    client = SimpleNamespace(
        key_value_set_bytes=gone, key_value_try_get_bytes=gone, blocking_key_value_get_bytes=gone
    )
    store = JaxStore(client, "a")
    for act in (lambda: store.set("k", b""), lambda: store.get("k", 0), lambda: store.get("k", 9)):
        with pytest.raises(CommError, match="cannot be reached for 'k': UNAVAILABLE") as caught:
            act()
        assert not isinstance(caught.value, DeadlineError)


@pytest.fixture
def jax_with(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts a JAX with a client of its own in the place of the real one."""

    def pretend(client: Any, address: str | None) -> None:
        jax, private, distributed = ModuleType("jax"), ModuleType("jax._src"), ModuleType("distributed")
        jax.__version__ = "0.0.1"  # type: ignore[attr-defined]
        jax._src = private  # type: ignore[attr-defined]
        private.distributed = distributed  # type: ignore[attr-defined]
        distributed.global_state = SimpleNamespace(  # type: ignore[attr-defined]
            client=client, coordinator_address=address
        )
        for name, module in {"jax": jax, "jax._src": private, "jax._src.distributed": distributed}.items():
            monkeypatch.setitem(sys.modules, name, module)

    return pretend


def test_the_store_is_that_of_the_process_and_knows_its_master(jax_with: Any) -> None:
    client = Client()
    for address, master in (("10.0.0.1:29400", "10.0.0.1"), ("[::1]:29400", "::1"), (None, None)):
        jax_with(client, address)
        store = coordination_store("a")
        store.set("key", b"value")
        assert client.values == {"a/key": b"value"}
        assert store.master == master


def test_a_job_without_a_service_and_a_jax_that_is_too_old_or_not_there_are_told_what_helps(
    jax_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax_with(None, None)
    with pytest.raises(UsageError, match=r"(?s)are not connected yet.*jax\.distributed\.initialize\(\)"):
        coordination_store("a")
    jax_with(SimpleNamespace(), None)
    with pytest.raises(MissingExtraError, match=r"JAX 0\.0\.1 has a store without a call that reknit needs"):
        coordination_store("a")
    for name in [name for name in sys.modules if name.partition(".")[0] == "jax"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("jax", "jax._src"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"(?s)needs JAX, which is not installed.*reknit\[jax\]"):
        coordination_store("a")


REAL = """
import sys
import jax
rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
import reknit
from reknit.comm.group import turn
from reknit.errors import DeadlineError
from reknit.integrations.jax.job import coordination_store
store = coordination_store("test")
store.set(f"of {rank}", b"")
store.set(f"of {rank}", bytes([rank, 0, 255]))
store.set(f"is set {rank}", b"")
store.get(f"is set {1 - rank}", 60)
assert store.get(f"of {1 - rank}", 0) == bytes([1 - rank, 0, 255])
for wait_s in (0, 0.2):
    try:
        store.get("nothing", wait_s)
    except DeadlineError:
        continue
    raise AssertionError("there is no such key")
assert store.master == "127.0.0.1"
group = reknit.connect(rank, 2, at="jax://")
with turn(group, "ask", 60) as its_turn:
    answer = its_turn.give_all(b"".join(its_turn.gather(bytes([rank])) or ()), bytes)
print(group.rank, group.size, answer.hex())
group.close()
jax.distributed.shutdown()
"""


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_processes_of_a_real_jax_job_meet_in_its_service() -> None:
    port = free_port()
    environment = os.environ | {"PYTHONPATH": str(SOURCES), "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", REAL, str(rank), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert out.split() == [str(rank), "2", "0001"]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
