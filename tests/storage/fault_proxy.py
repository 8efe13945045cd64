"""A proxy for HTTP that spoils requests: refuses, cuts, delays, holds or doubles them, or loses answers."""

from __future__ import annotations

import http.client
import http.server
import socket
import struct
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

import pytest

from tests.servers import environment, server
from tests.storage.local_server import LocalServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Refusal = Literal[
    "500",
    "503",
    "429",
    "reset before",
    "reset mid",
    "hang",
    "truncated",
    "applied then reset",
    "applied then 500",
]
Delivery = Literal["delayed", "doubled", "held", "409", "applied then 404"]
Fault = Refusal | Delivery
FAULTS: tuple[Refusal, ...] = get_args(Refusal)
DELAY_S = 0.05
_CONFLICT = b"<Error><Code>ConditionalRequestConflict</Code><Message>At once.</Message></Error>"
_UNKNOWN = b"<Error><Code>NoSuchUpload</Code><Message>No such upload.</Message></Error>"
_HANG_S = 60.0
_UPSTREAM_S = 60.0


class FaultProxy(LocalServer):
    """Passes requests on to `upstream` (``http://host:port/...``); use it in a ``with`` statement.

    After `spoil` or `spoil_those`, one or more requests meet a fault.  ``"500"``, ``"503"`` and ``"429"`` are
    immediate answers.  ``"reset before"`` closes the connection after the head of the request, and
    ``"reset mid"`` in the middle of its body, if it has one.  ``"hang"`` never answers, and ``"truncated"``
    ends in the middle of the answer's body.  ``"applied then reset"`` closes the connection after the server
    has carried the request out, and ``"applied then 500"`` then answers with a failure.

    A ``"delayed"`` request arrives late, within the client's patience.  A ``"doubled"`` request arrives
    twice, and the client gets the second answer.  The connection of a ``"held"`` request is closed, and the
    request arrives at `release`.  ``"409"`` and ``"applied then 404"`` are answers of stores that saw two
    requests at once, or that have ended an upload.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream, _, self._path = upstream.removeprefix("http://").partition("/")
        self.requests: list[str] = []
        """The method and target of each request since the last call of `spoil`."""
        self._lock = threading.Lock()
        self._at: range = range(0)
        self._matches: Callable[[str], bool] = lambda request: False
        self._left = 0
        self._fault: Fault = "500"
        self._over = threading.Event()
        self._held: list[Callable[[], int]] = []
        super().__init__(_Handler, proxy=self)

    @property
    def endpoint(self) -> str:
        """Return the URL of the proxy, with the path of `upstream`."""
        return f"{self.address}/{self._path}".rstrip("/")

    def spoil(self, at: int | None, fault: Fault = "500", *, times: int = 1) -> None:
        """Restart the count of requests, and plan a fault for `times` ones from number `at` on."""
        with self._lock:
            self.requests, self._left = [], 0
            self._at, self._fault = range(0) if at is None else range(at, at + times), fault

    def spoil_those(self, matches: Callable[[str], bool], fault: Fault, *, times: int = 1) -> None:
        """Restart the count of requests, and plan a fault for the first `times` ones that match."""
        with self._lock:
            self.requests, self._at = [], range(0)
            self._matches, self._left, self._fault = matches, times, fault

    @property
    def unspoilt(self) -> int:
        """The number of requests that `spoil_those` still waits for."""
        return self._left

    def fault_for(self, request: str) -> Fault | None:
        """Count a request, and return its planned fault."""
        with self._lock:
            self.requests.append(request)
            if self._left and self._matches(request):
                self._left -= 1
                return self._fault
            return self._fault if len(self.requests) - 1 in self._at else None

    def hold(self, request: Callable[[], int]) -> None:
        """Keep a request for `release`."""
        with self._lock:
            self._held.append(request)

    def release(self) -> list[int]:
        """Let all held requests arrive, in their order, and return the status of each answer."""
        with self._lock:
            held, self._held = self._held, []
        return [request() for request in held]

    def wait(self, seconds: float = _HANG_S) -> None:
        """Wait some seconds, by default until the client must have timed out, or until the proxy ends."""
        self._over.wait(seconds)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        super().__exit__()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    proxy: FaultProxy

    def pass_on(self) -> None:
        """Do the planned fault of this request."""
        fault = self.proxy.fault_for(f"{self.command} {self.path}")
        nbytes = int(self.headers.get("Content-Length") or 0)
        if fault in ("reset before", "reset mid"):
            self.rfile.read(nbytes // 2 if fault == "reset mid" else 0)
            self._reset()
            return
        body = self.rfile.read(nbytes)
        if fault == "held":
            self.proxy.hold(lambda: self._ask(body)[0])
            self._reset()
        elif fault == "hang":
            self.proxy.wait()
            self._reset()
        elif fault in ("500", "503", "429", "409"):
            self._answer(int(fault), [], b"spoilt" if fault != "409" else _CONFLICT)
        else:
            if fault == "delayed":
                self.proxy.wait(DELAY_S)
            elif fault == "doubled":
                self._ask(body)
            status, headers, data = self._ask(body)
            if fault == "applied then reset":
                self._reset()
                return
            if fault == "applied then 500":
                status, headers, data = 500, [], b"spoilt"
            elif fault == "applied then 404":
                status, headers, data = 404, [], _UNKNOWN
            self._answer(status, headers, data, cut=fault == "truncated")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.proxy.upstream, timeout=_UPSTREAM_S)
        try:
            # The signature of the client covers this host.
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, *, cut: bool = False) -> None:
        length = str(len(data))
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        self.wfile.flush()
        if cut:
            self._reset()

    def _reset(self) -> None:
        """Close the connection so that the client gets a reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.rfile.close()
        self.connection.close()


@contextmanager
def before(store: str) -> Iterator[FaultProxy]:
    """Start a proxy before a server, and lead all requests of this process and its agents through it."""
    with FaultProxy(server(store)["endpoint"]) as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(store, proxy.endpoint).items():
            patch.setenv(name, value)
        yield proxy
