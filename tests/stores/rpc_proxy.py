"""A proxy for a NameNode of HDFS that spoils calls: drops, delays or doubles them, or loses their answers."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from typing_extensions import Self

Fault = Literal["lost", "delayed", "dropped", "doubled"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
DELAY_S = 0.05
_HELLO_NBYTES = 7
"""The length of the greeting that precedes the first call of a connection."""
_UPSTREAM_S = 60.0


class RpcProxy:
    """Passes the calls of Hadoop RPC on to a NameNode; use it in a ``with`` statement.

    After `spoil`, the next call of each of some methods meets a fault.  The connection of a ``"dropped"``
    call is closed before the NameNode gets it, and that of a ``"lost"`` one after it has answered.  A
    ``"delayed"`` call arrives late, within the client's patience.  A ``"doubled"`` call arrives twice, and
    the client gets both answers.
    """

    def __init__(self, host: str, port: int) -> None:
        self._upstream = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.calls: list[str] = []
        """The methods that were called since the last call of `spoil`, with their faults."""
        self._lock = threading.Lock()
        self._fault = FAULTS[0]
        self.unspoilt: set[str] = set()
        """The methods of which `spoil` waits for a call."""
        self._over = threading.Event()
        self._open: list[socket.socket] = [self._listener]

    def spoil(self, fault: Fault, *methods: str) -> None:
        """Plan a fault for the next call of each of some methods of `ClientProtocol`."""
        with self._lock:
            self.calls = []
            self.unspoilt, self._fault = set(methods), fault

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with self._lock:
            for each in self._open:
                _close(each)

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed in the end
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._upstream, _UPSTREAM_S)
                with self._lock:
                    self._open += [client, server]
                _Connection(self, client, server).start()

    def fault_for(self, call: bytes) -> Fault | None:
        """Return the planned fault of a call."""
        name = _method_of(call).decode(errors="replace")
        with self._lock:
            fault = self._fault if name in self.unspoilt else None
            self.unspoilt.discard(name)
            self.calls.append(f"{name} ({fault})" if fault else name)
        return fault

    def wait(self, seconds: float) -> None:
        """Wait some seconds, or until the proxy ends."""
        self._over.wait(seconds)


class _Connection:
    """A connection of a client, and the one to the NameNode that belongs to it."""

    def __init__(self, proxy: RpcProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._deaf = False
        """Whether the next answer is to be lost."""

    def start(self) -> None:
        """Pass both directions on, in threads of their own."""
        for work in (self._to_server, self._to_client):
            threading.Thread(target=self._until_closed, args=(work,), daemon=True).start()

    def _until_closed(self, work: object) -> None:
        assert callable(work)
        with suppress(OSError, EOFError):
            work()
        _close(self._client)
        _close(self._server)

    def _to_server(self) -> None:
        self._server.sendall(_received(self._client, _HELLO_NBYTES))
        while True:
            call = _frame(self._client)
            fault = self._proxy.fault_for(call)
            if fault == "dropped":
                return
            if fault == "delayed":
                self._proxy.wait(DELAY_S)
            self._deaf = fault == "lost"
            self._server.sendall(call * (2 if fault == "doubled" else 1))

    def _to_client(self) -> None:
        while True:
            answer = _frame(self._server)
            if self._deaf:
                return
            self._client.sendall(answer)


def _method_of(call: bytes) -> bytes:
    """Return the method of a call: after the length and a header with its own length, the first text."""
    start = 4 + 1 + call[4] + 1  # both lengths are below 128
    name = call[start : start + 2]
    return call[start + 2 : start + 2 + name[1]] if name[:1] == b"\x0a" else b""


def _frame(connection: socket.socket) -> bytes:
    head = _received(connection, 4)
    return head + _received(connection, struct.unpack(">I", head)[0])


def _received(connection: socket.socket, nbytes: int) -> bytes:
    parts = []
    while nbytes:
        if not (part := connection.recv(min(nbytes, 1 << 16))):
            raise EOFError
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


def _close(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
