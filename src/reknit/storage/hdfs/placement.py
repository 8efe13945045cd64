"""Place new files on DataNodes that have not failed lately; the HDFS client accepts any."""

from __future__ import annotations

import logging
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING

from reknit.errors import StorageError, StorageUnavailableError
from reknit.monitor.phase import Deadline
from reknit.storage.hdfs.threads import OverdueError, together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hdfs_native._internal import RawFileWriter

    from reknit.storage.hdfs.client import HdfsClient
    from reknit.storage.hdfs.rpc import DataNode, Requests

logger = logging.getLogger("reknit")

_AVOIDED_S = 600.0
"""How long new files avoid a silent DataNode; Java's client does the same."""

_PATIENCE_S = 2.0
"""How long a DataNode may take to answer a probe."""


class BlockPlacement:
    """A writer of whole files that avoids the DataNodes that were silent when earlier files failed."""

    def __init__(self, client: HdfsClient, requests: Requests | None) -> None:
        self._client, self._requests = client, requests
        self._lock = threading.Lock()
        self._avoided: dict[DataNode, Deadline] = {}

    @property
    def avoided(self) -> list[DataNode]:
        """The DataNodes that new files avoid at present."""
        with self._lock:
            self._avoided = {node: until for node, until in self._avoided.items() if not until.passed()}
            return list(self._avoided)

    def write(self, path: str, pieces: Sequence[bytes]) -> None:
        """Write a new file, with the folders above it, and close it.

        A DataNode that falls silent fails the file, and is avoided by the next.
        """
        self.fill(path, self._client.begin(path), pieces, new=True)

    def append(self, path: str, data: bytes, *, new: bool) -> None:
        """Write bytes at the end of a file, which is `new` as long as it is empty, and close it."""
        self.fill(path, self._client.reopen(path), [data], new=new)

    def fill(self, path: str, writer: RawFileWriter, pieces: Sequence[bytes], *, new: bool) -> None:
        """Write the bytes of a file that has been created, and close it."""
        if pieces and new:  # a block that is given and not filled would keep the file from being closed
            self._place(path)
        try:
            for piece in pieces:
                self._client.feed(path, writer, piece)
            self._client.end(path, writer, empty=not pieces)
        except StorageUnavailableError:
            self.find_silent(path)
            raise

    def _place(self, path: str) -> None:
        """Allocate the first block of a new file on DataNodes that are not avoided."""
        avoided = self.avoided
        if not avoided or self._requests is None:
            return
        url = self._client.url(path)
        try:
            self._requests.place(path, avoided, url)
        except StorageError as error:  # such as without other nodes: then the avoided ones are used
            logger.debug("writing %s: its block may go to DataNodes that did not answer: %s", url, error)

    def find_silent(self, path: str) -> None:
        """Avoid the DataNodes of a file that do not answer: they probably caused its failure."""
        url = self._client.url(path)
        try:
            nodes = [] if self._requests is None else self._requests.nodes_of(path, url)
            there = together(2 * _PATIENCE_S, [partial(answers, node) for node in nodes], len(nodes))
        except (StorageError, OverdueError):  # the NameNode is probably silent
            return
        self.avoid([node for node, answers in zip(nodes, there, strict=True) if not answers], url)

    def avoid(self, silent: Sequence[DataNode], url: str) -> None:
        """Do not place new files on these DataNodes for a while."""
        known = set(self.avoided)
        with self._lock:
            for node in silent:
                self._avoided[node] = Deadline(_AVOIDED_S)
        if new := [node for node in silent if node not in known]:
            named = ", ".join("{}:{}".format(*node.address) for node in new)
            logger.warning(
                "writing %s: no answer from %s; for %g s new files use other DataNodes if possible",
                url,
                named,
                _AVOIDED_S,
            )


def answers(node: DataNode) -> bool:
    """Return whether a DataNode answers: it closes the connection after bytes that it cannot read."""
    deadline = Deadline(_PATIENCE_S)
    try:
        connection = socket.create_connection(node.address, _PATIENCE_S)
    except (OSError, ValueError, OverflowError):  # the last two: of an invalid address
        return False
    with connection:
        try:
            connection.sendall(bytes(4))
            connection.settimeout(max(deadline.remaining(), 0.001))
            connection.recv(1)
        except TimeoutError:
            return False
        except OSError:
            pass
    return True
