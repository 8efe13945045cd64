"""What the HDFS client cannot ask of a NameNode, asked directly: Hadoop's RPC, without authentication.

A request is a length and three messages in the encoding of Protocol Buffers, each after its own length: a
header, the name of the method, its arguments.  An answer is a length, a header, and the result.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import uuid
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from reknit.errors import StorageError
from reknit.monitor.phase import Deadline
from reknit.storage.hdfs_errors import of_class, unreached

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.storage.hdfs_config import Cluster

PROTOCOL = "org.apache.hadoop.hdfs.protocol.ClientProtocol"
_CONTEXT_CALL = -3
_NO_RETRY = -1
_MOST_NBYTES = 64 << 20
"""A longer answer is none of a NameNode."""


class Requests(Protocol):
    """What the HDFS client lacks."""

    def concat(self, target: str, sources: Sequence[str], url: str) -> None:
        """Move all blocks of the sources behind those of the target, in one step; the sources vanish."""

    def set_policy(self, path: str, policy: str, url: str) -> None:
        """Say on what kind of disks the blocks of a file or folder belong, such as ``"COLD"``."""

    def close(self) -> None:
        """Drop the connections; the next request makes new ones."""


class RpcRequests:
    """Requests over connections that are kept; each carries one request at a time."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self._cluster, self._timeout_s = cluster, timeout_s
        self._active = 0
        """The NameNode that answered last."""
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def concat(self, target: str, sources: Sequence[str], url: str) -> None:
        """Ask for one file instead of many."""
        request = _text(1, target) + b"".join(_text(2, source) for source in sources)
        self._call("concat", request, "join the parts of", url)

    def set_policy(self, path: str, policy: str, url: str) -> None:
        """Ask for other disks."""
        self._call("setStoragePolicy", _text(1, path) + _text(2, policy), f"give the policy {policy} to", url)

    def close(self) -> None:
        """Drop the connections that nobody uses."""
        with self._lock:
            _close_all(self._idle)

    def _call(self, method: str, request: bytes, action: str, url: str) -> None:
        """Ask one NameNode after another until one does not send us on.

        Only a request that cannot have been carried out is sent again; all else is for the caller to judge.
        """
        deadline, nodes = Deadline(self._timeout_s), self._cluster.namenodes
        error: BaseException = TimeoutError("no NameNode is active")
        first = self._active
        for number in range(first, first + len(nodes)):
            share = Deadline(deadline.remaining() / (first + len(nodes) - number))
            try:  # one that is silent leaves time for the others
                connection, new = self._connection(number % len(nodes), share)
            except OSError as failed:
                error = failed
                continue
            try:
                answer = connection.call(method, request, deadline)
            except OSError as failed:
                connection.close()
                if not new:
                    self.close()  # the others were cut too, likely
                self._active = (number + 1) % len(nodes)
                raise unreached(action, url, failed or "the connection was cut") from failed
            if answer is None:
                self._active = number % len(nodes)
                with self._lock:
                    self._idle.append(connection)
                return
            connection.close()
            name, message = answer
            told = of_class(action, url, name, message)
            if "StandbyException" not in name:
                raise told
            error = told
        if isinstance(error, StorageError):
            raise error
        raise unreached(action, url, error) from error

    def _connection(self, node: int, deadline: Deadline) -> tuple[_Connection, bool]:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if connection.node == node and connection.alive():
                    return connection, False
                connection.close()
        connection = _Connection(node, self._cluster.namenodes[node], self._cluster.user, deadline)
        return connection, True


class _Connection:
    """A connection to one NameNode."""

    def __init__(self, node: int, address: tuple[str, int], user: str, deadline: Deadline) -> None:
        self.node = node
        self._client = uuid.uuid4().bytes
        self._calls = itertools.count()
        self._socket = socket.create_connection(address, max(deadline.remaining(), 0.001))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = _bytes(2, _text(1, user)) + _text(3, PROTOCOL)
        hello = _delimited(self._header(_CONTEXT_CALL)) + _delimited(context)
        # The version of the protocol is 9; the zeros stand for no service class and no authentication.
        self._socket.sendall(b"hrpc\x09\x00\x00" + struct.pack(">I", len(hello)) + hello)

    def call(self, method: str, request: bytes, deadline: Deadline) -> tuple[str, str] | None:
        """Return nothing, or the class and the message of an error.  Raises `OSError`."""
        number = next(self._calls)
        asked = _text(1, method) + _text(2, PROTOCOL) + _number(3, 1)
        body = b"".join(map(_delimited, (self._header(number), asked, request)))
        self._socket.settimeout(max(deadline.remaining(), 0.001))
        self._socket.sendall(struct.pack(">I", len(body)) + body)
        (nbytes,) = struct.unpack(">I", self._receive(4, deadline))
        if nbytes > _MOST_NBYTES:
            raise OSError(f"{nbytes} bytes are no answer of a NameNode")
        answer = self._receive(nbytes, deadline)
        length, start = _varint(answer, 0)
        header = dict(_fields(answer[start : start + length]))
        if not header.get(2, 0):
            return None
        name, message = header.get(4, b""), header.get(5, b"")
        return bytes(name).decode(errors="replace"), bytes(message).decode(errors="replace")

    def alive(self) -> bool:
        """Tell whether the other side has not closed it."""
        try:
            self._socket.setblocking(False)
            self._socket.recv(1, socket.MSG_PEEK)  # nothing comes unasked, unless it is the end
            return False
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Close it; an error of a connection that is given up means nothing."""
        with suppress(OSError):
            self._socket.close()

    def _header(self, call: int) -> bytes:
        return (
            _number(1, 2)  # arguments in the encoding of Protocol Buffers
            + _number(2, 0)
            + _number(3, _signed(call))
            + _bytes(4, self._client)
            + _number(5, _signed(_NO_RETRY))
        )

    def _receive(self, nbytes: int, deadline: Deadline) -> bytes:
        parts, missing = [], nbytes
        while missing:
            self._socket.settimeout(max(deadline.remaining(), 0.001))
            if not (part := self._socket.recv(min(missing, 1 << 16))):
                raise ConnectionResetError("the NameNode closed the connection")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


def _close_all(connections: list[_Connection]) -> None:
    while connections:
        connections.pop().close()


def _encoded(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _signed(number: int) -> int:
    return (number << 1 ^ number >> 31) & 0xFFFFFFFF


def _number(field: int, value: int) -> bytes:
    return _encoded(field << 3) + _encoded(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _encoded(field << 3 | 2) + _delimited(value)


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _delimited(message: bytes) -> bytes:
    return _encoded(len(message)) + message


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """Return a number and where it ends.  Raises `OSError` when it does not."""
    value = 0
    for place, byte in enumerate(data[start : start + 10]):
        value |= (byte & 0x7F) << 7 * place
        if not byte & 0x80:
            return value, start + place + 1
    raise OSError("the answer is no message of Hadoop's RPC")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message, by number."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if kind == 2:
            nbytes, position = _varint(data, position)
        elif kind in (1, 5):
            nbytes = 8 if kind == 1 else 4
        else:
            raise OSError("the answer is no message of Hadoop's RPC")
        yield tag >> 3, data[position : position + nbytes]
        position += nbytes
