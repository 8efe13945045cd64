"""How do tests reach an HDFS without reknit?  Over its web server."""

from __future__ import annotations

import http.client
import importlib.util
import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from reknit.options import MIB
from reknit.stores.hdfs.upload import encoded
from tests.servers import STATE, server
from tests.stores.rpc_proxy import RpcProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from reknit.storage.base import Storage


def ask(address: str, method: str, path: str, data: bytes | None = None, **query: Any) -> tuple[int, bytes]:
    """Return the answer of WebHDFS, which redirects to a DataNode for contents."""
    root, words = f"/webhdfs/v1{quote(path)}", urlencode({"user.name": "root", **query})
    for _ in range(2):
        connection = http.client.HTTPConnection(address, timeout=30)
        try:
            connection.request(method, f"{root}?{words}", body=data)
            answer = connection.getresponse()
            body, target = answer.read(), answer.headers.get("Location")
        finally:
            connection.close()
        if answer.status != 307 or target is None:
            break
        parts = urlsplit(target)
        address, words = parts.netloc, parts.query
        root = f"/webhdfs/v1{quote(quote(path))}"  # DataNodes of this version decode it twice
    return answer.status, body


def raw_get(found: dict[str, Any], storage: Storage, path: str) -> bytes:
    """Return the bytes of a file."""
    status, data = ask(found["http"], "GET", place(storage, path), op="OPEN")
    assert status == 200, (status, data)
    return data


def raw_put(found: dict[str, Any], storage: Storage, path: str, data: bytes) -> None:
    """Write or replace a file."""
    target = place(storage, path)
    status, answer = ask(found["http"], "PUT", target, data, op="CREATE", overwrite="true")
    assert status == 201, (status, answer)


def everything(found: dict[str, Any], path: str) -> list[str]:
    """Return the names of all files in a folder, including unfinished files."""
    status, answer = ask(found["http"], "GET", path, op="LISTSTATUS")
    if status == 404:
        return []
    assert status == 200, (status, answer)
    return [entry["pathSuffix"] for entry in json.loads(answer)["FileStatuses"]["FileStatus"]]


def place(storage: Storage, path: str = "") -> str:
    """Return the absolute path of a file of a store."""
    below = urlsplit(storage.url).path
    return f"{below}/{encoded(path)}" if path else below


class Cluster:
    """A private cluster of a test, whose processes may be stopped; made from the files of the server."""

    def __init__(self, folder: Path, datanodes: int, **settings: str) -> None:
        server("hdfs")  # skips the test if the files are missing
        self._parts = hdfs_server()
        self.server = self._parts.lay_out(STATE / "hdfs", folder, datanodes, **settings)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for node in self.server["nodes"]:
            self.launch(node)

    def launch(self, node: str) -> None:
        """Start a process, for the first time or again."""
        folder = Path(self.server["folder"])
        if node in self._running:
            self._running[node].wait()
        with open(folder / "log" / node, "ab") as log:
            self._running[node] = subprocess.Popen(
                self.server["nodes"][node], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder
            )

    def send(self, node: str, sign: signal.Signals) -> None:
        """Send a signal to a process; after SIGSTOP, wait until all its threads are stopped."""
        process = self._running[node]
        process.send_signal(sign)
        while sign is signal.SIGSTOP and not stands_still(process.pid):
            time.sleep(0.01)

    def wait(self, seconds: float = 60) -> None:
        """Wait until the NameNode accepts writes, and all running DataNodes have reported to it."""
        end = time.monotonic() + seconds
        while True:
            try:
                self._parts.ready(self.server)
            except (OSError, RuntimeError):
                assert time.monotonic() < end, f"see {self.server['folder']}/log"
            else:
                return
            time.sleep(0.1)

    def end(self) -> None:
        """Kill all processes."""
        for process in self._running.values():
            process.kill()
            process.wait()


def stands_still(process: int) -> bool:
    """Return whether every thread of a process is stopped."""
    try:
        states = [(task / "stat").read_text() for task in Path(f"/proc/{process}/task").iterdir()]
    except FileNotFoundError:  # a thread that has just ended
        return False
    return all(state.rpartition(")")[2].split()[0] == "T" for state in states)


@contextmanager
def running(folder: Path, datanodes: int, **settings: str) -> Iterator[Cluster]:
    """Yield a private cluster that accepts writes, and end it."""
    cluster = Cluster(folder, datanodes, **settings)
    try:
        cluster.wait()
        yield cluster
    finally:
        cluster.end()


def write(
    storage: Storage, path: str, data: bytes, meanwhile: Mapping[int, Callable[[], object]] | None = None
) -> Any:
    """Write a file in pieces of a MiB, with actions before some of them, and return its writer."""
    writer = storage.create(path, len(data))
    for number, start in enumerate(range(0, len(data), MIB)):
        (meanwhile or {}).get(number, lambda: None)()
        writer.write(start, memoryview(data)[start : start + MIB])
    writer.finish()
    return writer


@contextmanager
def new_proxy() -> Iterator[RpcProxy]:
    """Pass calls on to the NameNode within the block."""
    host, port = server("hdfs")["endpoint"].removeprefix("hdfs://").split(":")
    with RpcProxy(host, int(port)) as proxy:
        yield proxy


def hdfs_server() -> Any:
    """Return the module that lays out clusters and starts them, from the files of the server."""
    folder = STATE.parent / "scripts/servers.d"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("servers_hdfs", folder / "hdfs.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module
