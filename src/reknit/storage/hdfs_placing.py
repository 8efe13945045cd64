"""New files go to DataNodes that have not failed lately: the HDFS client would take any that it is given."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from reknit.errors import StorageError, StorageUnavailableError
from reknit.monitor.phase import Deadline
from reknit.storage.hdfs_threads import OverdueError, together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.storage.hdfs_client import HdfsClient
    from reknit.storage.hdfs_rpc import DataNode, Requests

logger = logging.getLogger("reknit")

_AVOIDED_S = 600.0
"""How long a DataNode that failed is not given anything; Java's client does the same."""

_PATIENCE_S = 2.0
"""How long a DataNode may take to answer when it is asked whether it is there."""


class Placing:
    """Writes whole files, past the DataNodes on which earlier ones failed."""

    def __init__(self, client: HdfsClient, requests: Requests | None) -> None:
        self._client, self._requests = client, requests
        self._lock = threading.Lock()
        self._avoided: dict[DataNode, Deadline] = {}

    @property
    def avoided(self) -> list[DataNode]:
        """The DataNodes that get nothing now."""
        with self._lock:
            self._avoided = {node: until for node, until in self._avoided.items() if not until.passed()}
            return list(self._avoided)

    def write(self, path: str, pieces: Sequence[bytes]) -> None:
        """Write a new file and close it.  A DataNode that fails, fails this file, and is avoided then."""
        writer = self._client.begin(path)
        if (avoided := self.avoided) and self._requests is not None:
            with suppress(StorageError):  # no others are left, say: then those will have to do
                self._requests.place(path, avoided, self._client.url(path))
        try:
            for piece in pieces:
                self._client.feed(path, writer, piece)
            self._client.end(path, writer, empty=not pieces)
        except StorageUnavailableError:
            self._blame(path)
            raise

    def _blame(self, path: str) -> None:
        """Avoid those DataNodes of a file that do not answer, or all if the fault is none that shows."""
        url = self._client.url(path)
        try:
            nodes = [] if self._requests is None else self._requests.nodes_of(path, url)
            there = together(3 * _PATIENCE_S, [partial(_answers, node) for node in nodes], len(nodes))
        except (StorageError, OverdueError):  # then it was not for a DataNode, likely
            return
        silent = [node for node, answers in zip(nodes, there, strict=True) if not answers]
        self._avoid(silent or nodes)
        if nodes:
            named = ", ".join("{}:{}".format(*node.address) for node in silent or nodes)
            fault = "no answer from" if silent else "something failed on"
            logger.warning(
                "writing %s: %s %s; nothing is written there for %g s", url, fault, named, _AVOIDED_S
            )

    def _avoid(self, nodes: list[DataNode]) -> None:
        with self._lock:
            for node in nodes:
                self._avoided[node] = Deadline(_AVOIDED_S)


def _answers(node: DataNode) -> bool:
    """Tell whether a DataNode is there: it hangs up when something comes that it does not know."""
    try:
        with socket.create_connection(node.address, _PATIENCE_S) as connection:
            connection.settimeout(_PATIENCE_S)
            connection.sendall(bytes(3))
            connection.recv(1)
    except ConnectionResetError:
        return True
    except OSError:
        return False
    return True
