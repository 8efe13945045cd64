"""Requests that the HDFS client lacks: Hadoop RPC to a NameNode, and WebHDFS; without authentication.

A request is a length and three messages in the encoding of Protocol Buffers, each after its own length: a
header, the name of the method, its arguments.  An answer is a length, a header, and the result.
"""

from __future__ import annotations

import http.client
import itertools
import json
import math
import re
import socket
import struct
import threading
import uuid
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from reknit.errors import StorageError, StoragePermissionError, UsageError
from reknit.plugins.store import Deadline
from reknit.stores.hdfs.client import of_class, unreached

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.stores.hdfs.config import Cluster, HdfsOptions


PROTOCOL = "org.apache.hadoop.hdfs.protocol.ClientProtocol"
_CONTEXT_CALL = -3
_NO_RETRY = -1
_FATAL = 2
_HOLDER = re.compile(r" owned by (\S+) but is accessed by | is not the lease owner \(=([^:\s)]+)")
"""The texts in which Hadoop 2 and 3 name the holder of a file."""

_MOST_NBYTES = 64 << 20
"""The largest answer of a NameNode."""

_QUICK_S = 2.0
"""How long an optional request may take."""


class Requests(Protocol):
    """Requests to the NameNode that the HDFS client lacks."""

    def concat(self, target: str, sources: Sequence[str], url: str) -> None:
        """Append all blocks of the sources to the target in one step; this removes the sources."""

    def set_policy(self, path: str, policy: str, url: str) -> None:
        """Set the storage policy of a file or folder, such as ``"COLD"``."""

    def nodes_of(self, path: str, url: str) -> list[DataNode]:
        """Return the DataNodes of a file's last block, even while it is being written; empty if unknown."""

    def place(self, path: str, avoided: Sequence[DataNode], url: str) -> None:
        """Allocate the first block of a file, which must still be empty, on other DataNodes."""

    def close(self) -> None:
        """Close the connections; the next request makes a new connection."""


@dataclass(frozen=True)
class DataNode:
    """A DataNode; `encoded` is its description by the NameNode."""

    key: str
    address: tuple[str, int]
    encoded: bytes = field(repr=False, compare=False)


class RpcRequests:
    """Requests over persistent connections; each carries one request at a time."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self._cluster, self._timeout_s = cluster, timeout_s
        self._active = 0
        """The NameNode that answered last."""
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def concat(self, target: str, sources: Sequence[str], url: str) -> None:
        """Join files into one."""
        request = text_field(1, target) + b"".join(text_field(2, source) for source in sources)
        self._call("concat", request, "join the parts of", url)

    def set_policy(self, path: str, policy: str, url: str) -> None:
        """Set a storage policy."""
        request = text_field(1, path) + text_field(2, policy)
        self._call("setStoragePolicy", request, f"give the policy {policy} to", url)

    def nodes_of(self, path: str, url: str) -> list[DataNode]:
        """Return the DataNodes of the last block."""
        action = "find the DataNodes of"
        request = text_field(1, path) + number_field(2, 0) + number_field(3, 1)
        answer = self._call("getBlockLocations", request, action, url, _QUICK_S)
        try:
            found = _messages(_inner(answer, 1, 4) or b"")
            by_name = self._cluster.datanodes_by_name
            return [_node(encoded, by_name=by_name) for number, encoded in found if number == 3]
        except OSError as error:
            raise unreached(action, url, error) from error

    def place(self, path: str, avoided: Sequence[DataNode], url: str) -> None:
        """Add the first block in the name of the client that writes the file, which then receives it.

        A client that asks for a block again receives the existing block, as if the first answer had been
        lost.  The NameNode names the holder of the file in its refusal of a request with another name.
        """
        action, stranger = "place a block of", f"reknit-{uuid.uuid4().hex}"
        refusal = self._ask("addBlock", text_field(1, path) + text_field(2, stranger), action, url, _QUICK_S)
        holders = [] if isinstance(refusal, bytes) else _HOLDER.findall(refusal[1].partition("\n")[0])
        if not holders:
            raise StorageError(f"cannot {action} {url}: the NameNode does not say who writes it", path=url)
        holder = "".join(holders[-1])  # the last, since a path may look like anything
        shunned = b"".join(bytes_field(4, node.encoded) for node in avoided)
        self._call("addBlock", text_field(1, path) + text_field(2, holder) + shunned, action, url, _QUICK_S)

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            _close_all(self._idle)

    def _call(self, method: str, request: bytes, action: str, url: str, most_s: float = math.inf) -> bytes:
        """Return the result of a request.  Raises `StorageError` if the NameNode refuses it."""
        answer = self._ask(method, request, action, url, most_s)
        if isinstance(answer, bytes):
            return answer
        raise of_class(action, url, *answer)

    def _ask(
        self, method: str, request: bytes, action: str, url: str, most_s: float
    ) -> bytes | tuple[str, str]:
        """Ask one NameNode after another, and return the answer of the active NameNode, or its refusal.

        Only a request that cannot have been carried out is sent again; the caller judges all other failures.
        """
        deadline, nodes = Deadline(min(self._timeout_s, most_s)), self._cluster.namenodes
        error: BaseException = TimeoutError("no NameNode is active")
        standby = None
        first = self._active
        for number in range(first, first + len(nodes)):
            share = Deadline(deadline.remaining() / (first + len(nodes) - number))
            try:  # a silent one leaves time for the others
                connection, new = self._connection(number % len(nodes), share)
            except OSError as failed:
                error, standby = failed, None
                continue
            try:
                answer = connection.call(method, request, deadline)
            except OSError as failed:
                connection.close()
                if not new:
                    self.close()  # the other connections were probably cut, too
                self._active = (number + 1) % len(nodes)
                raise unreached(action, url, failed or "the connection was cut") from failed
            if not isinstance(answer, bytes) and "StandbyException" in answer[0]:
                connection.close()
                standby = answer
                continue
            self._active = number % len(nodes)
            with self._lock:
                self._idle.append(connection)
            return answer
        if standby is not None:
            return standby
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
        context = bytes_field(2, text_field(1, user)) + text_field(3, PROTOCOL)
        hello = _delimited(self._header(_CONTEXT_CALL)) + _delimited(context)
        # The version of the protocol is 9; the zeros stand for no service class and no authentication.
        self._socket.sendall(b"hrpc\x09\x00\x00" + struct.pack(">I", len(hello)) + hello)

    def call(self, method: str, request: bytes, deadline: Deadline) -> bytes | tuple[str, str]:
        """Return the result, or the class and the message of an error.  Raises `OSError`."""
        number = next(self._calls)
        asked = text_field(1, method) + text_field(2, PROTOCOL) + number_field(3, 1)
        body = b"".join(map(_delimited, (self._header(number), asked, request)))
        self._socket.settimeout(max(deadline.remaining(), 0.001))
        self._socket.sendall(struct.pack(">I", len(body)) + body)
        (nbytes,) = struct.unpack(">I", self._receive(4, deadline))
        if nbytes > _MOST_NBYTES:
            raise OSError(f"{nbytes} bytes are not an answer of a NameNode")
        answer = self._receive(nbytes, deadline)
        length, start = _varint(answer, 0)
        header = dict(_fields(_cut(answer, start, length)))
        if not header.get(2, 0):
            nbytes, start = _varint(answer, start + length)
            return _cut(answer, start, nbytes)
        if header[2] == _FATAL:
            self.close()  # as the other side does
        encoded = [value if isinstance(value, bytes) else b"" for value in (header.get(4), header.get(5))]
        return encoded[0].decode(errors="replace"), encoded[1].decode(errors="replace")

    def alive(self) -> bool:
        """Return whether the connection is still open at the other end."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1, socket.MSG_PEEK)  # only the end of the connection comes unasked
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Close the connection; ignore errors, because nothing uses it any more."""
        with suppress(OSError):
            self._socket.close()

    def _header(self, call: int) -> bytes:
        return (
            number_field(1, 2)  # arguments in the encoding of Protocol Buffers
            + number_field(2, 0)
            + number_field(3, _signed(call))
            + bytes_field(4, self._client)
            + number_field(5, _signed(_NO_RETRY))
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


def number_field(field: int, value: int) -> bytes:
    """Return a field of protobuf that holds a number."""
    return _encoded(field << 3) + _encoded(value)


def bytes_field(field: int, value: bytes) -> bytes:
    """Return a field of protobuf that holds bytes."""
    return _encoded(field << 3 | 2) + _delimited(value)


def text_field(field: int, value: str) -> bytes:
    """Return a field of protobuf that holds text."""
    return bytes_field(field, value.encode())


def _delimited(message: bytes) -> bytes:
    return _encoded(len(message)) + message


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """Return a number and the position of its end.  Raises `OSError` for a number without an end."""
    value = 0
    for place, byte in enumerate(data[start : start + 10]):
        value |= (byte & 0x7F) << 7 * place
        if not byte & 0x80:
            return value, start + place + 1
    raise OSError("the answer is not a message of Hadoop's RPC")


def _cut(data: bytes, start: int, nbytes: int) -> bytes:
    """Return a part of a message.  Raises `OSError` if the message is too short."""
    if start + nbytes > len(data):
        raise OSError("the answer is not a message of Hadoop's RPC")
    return data[start : start + nbytes]


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the numbers and values of a message's fields."""
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
            raise OSError("the answer is not a message of Hadoop's RPC")
        yield tag >> 3, _cut(data, position, nbytes)
        position += nbytes


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields that are texts or messages."""
    return ((number, value) for number, value in _fields(data) if isinstance(value, bytes))


def _inner(data: bytes, *path: int) -> bytes | None:
    """Return a message inside a message, by the numbers of the fields that lead there."""
    for number in path:
        found = dict(_messages(data)).get(number)
        if found is None:
            return None
        data = found
    return data


def _node(encoded: bytes, *, by_name: bool) -> DataNode:
    """Decode the NameNode's description of a DataNode.  Raises `OSError`."""
    ident = dict(_fields(_inner(encoded, 1) or b""))
    host, key, port = ident.get(2 if by_name else 1), ident.get(3), ident.get(4)
    if not (isinstance(host, bytes) and isinstance(key, bytes) and isinstance(port, int)):
        raise OSError("the answer names no DataNode")
    return DataNode(key.decode(errors="replace"), (host.decode(errors="replace"), port), encoded)


def requests_of(cluster: Cluster, options: HdfsOptions) -> Requests | None:
    """Return a client that can join sub-files, or None."""
    if options.concat == "none":
        return None
    if options.webhdfs is not None and options.concat != "rpc":
        return WebRequests(options.webhdfs, cluster.user, options.timeout_s)
    if options.concat == "auto" and cluster.secure:
        return None
    return RpcRequests(cluster, options.timeout_s)


class WebRequests:
    """Requests to a web server at ``http://host:port``, or the ``/path`` below which a gateway has WebHDFS.

    The requests are those of `user`, or of the query of the address: ``?delegation=TOKEN``,
    ``?user.name=NAME``.
    """

    def __init__(self, address: str, user: str, timeout_s: float) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"{address!r} is not the address of a web server", remedy="write webhdfs=http://namenode:9870"
            )
        self._parts, self._timeout_s = parts, timeout_s
        self._root = parts.path.rstrip("/") or "/webhdfs/v1"
        self._asking = dict(parse_qsl(parts.query)) or {"user.name": user}

    def concat(self, target: str, sources: Sequence[str], url: str) -> None:
        """Join files into one."""
        self._call("POST", target, {"op": "CONCAT", "sources": ",".join(sources)}, "join the parts of", url)

    def set_policy(self, path: str, policy: str, url: str) -> None:
        """Set a storage policy; needs Hadoop 3."""
        query = {"op": "SETSTORAGEPOLICY", "storagepolicy": policy}
        self._call("PUT", path, query, f"give the policy {policy} to", url)

    def nodes_of(self, path: str, url: str) -> list[DataNode]:
        """Return an empty list: WebHDFS cannot name the client that asks for blocks."""
        return []

    def place(self, path: str, avoided: Sequence[DataNode], url: str) -> None:
        """Do nothing: with WebHDFS, the NameNode places blocks."""

    def close(self) -> None:
        """Do nothing: each request has a connection of its own."""

    def _call(self, method: str, path: str, query: dict[str, str], action: str, url: str) -> None:
        parts = self._parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(parts.hostname), parts.port, timeout=self._timeout_s)
        try:
            connection.request(
                method,
                f"{self._root}{quote(path)}?{urlencode({**query, **self._asking})}",
                headers={"Content-Length": "0"},
            )
            answer = connection.getresponse()
            status, data = answer.status, answer.read(1 << 20)
        except (OSError, http.client.HTTPException) as error:
            raise unreached(action, url, f"{parts.netloc}: {error or type(error).__name__}") from error
        finally:
            connection.close()
        if status == 200:
            return
        name, message = _remote_exception(data)
        if name:
            raise of_class(action, url, name, message)
        if status in (401, 403):
            raise StoragePermissionError(
                f"cannot {action} {url}: {parts.netloc} answers {status}",
                remedy="give a delegation token, as webhdfs=http://host:port?delegation=TOKEN",
                path=url,
            )
        raise unreached(action, url, f"{parts.netloc} answers {status}")


def _remote_exception(data: bytes) -> tuple[str, str]:
    """Return the Java class and the message of an error, both empty for an unreadable answer."""
    try:
        fields = json.loads(data)["RemoteException"]
        return str(fields.get("javaClassName") or fields["exception"]), str(fields.get("message", ""))
    except (ValueError, KeyError, TypeError):
        return "", ""
