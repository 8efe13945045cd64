"""How is something posted to a web server?  Within a time, to it only, and without secrets in errors."""

from __future__ import annotations

import socket
import threading
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from reknit.errors import StorageError
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_NBYTES = 300
"""Bytes of an answer that are read: a server may send without end."""


def post(url: str, data: bytes, headers: Mapping[str, str], timeout_s: float) -> None:
    """Post data.  Raises `OSError`, `StorageError` with the answer of a server that refuses.

    Redirects are not followed: they would send credentials elsewhere, or make a GET of the request.
    """
    limit = _TimeLimit(timeout_s)
    opener = build_opener(_TimedHttp(limit), _TimedHttps(limit), _NoRedirects())
    start_thread("reknit-post", limit.enforce)
    try:
        with opener.open(Request(url, data, dict(headers), method="POST"), timeout=timeout_s):
            limit.check()  # the content of the answer does not matter
    except HTTPError as error:
        raise StorageError(_refusal(error)) from None
    except OSError as error:
        limit.check()
        raise error from None
    except (ValueError, HTTPException) as error:  # its text may have parts of the URL, or of headers
        raise StorageError(f"the request cannot be made ({type(error).__name__})") from None
    finally:
        limit.over.set()


def _refusal(error: HTTPError) -> str:
    with error:
        if error.code // 100 == 3:
            return f"the server redirects (status {error.code}): give the URL that it leads to"
        try:
            text = error.read(_MOST_NBYTES).decode(errors="replace")
        except (OSError, HTTPException):
            text = ""
    return f"status {error.code}" + (f": {text}" if text else "")


class _TimeLimit:
    """Ends connections after a time; the timeout of a socket begins anew with each byte."""

    def __init__(self, timeout_s: float) -> None:
        self.over = threading.Event()
        self._timeout_s = timeout_s
        self._passed = False
        self._sockets: list[socket.socket] = []

    def watch(self, connected: socket.socket) -> None:
        """End this connection, too."""
        self._sockets.append(connected)

    def check(self) -> None:
        """Raise `TimeoutError` if the time is over."""
        if self._passed:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s") from None

    def enforce(self) -> None:
        """Wait until the request is over; after the time, end its connections."""
        if self.over.wait(self._timeout_s):
            return
        self._passed = True
        for connected in self._sockets:
            try:
                socket.socket.shutdown(connected, socket.SHUT_RDWR)  # the method of TLS changes the object
            except OSError:
                continue  # it has ended


class _TimedConnection(HTTPConnection):
    def __init__(self, host: str, *, limit: _TimeLimit, **options: Any) -> None:
        super().__init__(host, **options)
        self._limit = limit

    def connect(self) -> None:
        super().connect()
        self._limit.watch(self.sock)


class _TimedTlsConnection(HTTPSConnection):
    def __init__(self, host: str, *, limit: _TimeLimit, **options: Any) -> None:
        super().__init__(host, **options)
        self._limit = limit

    def connect(self) -> None:
        super().connect()
        self._limit.watch(self.sock)


class _TimedHttp(HTTPHandler):
    def __init__(self, limit: _TimeLimit) -> None:
        super().__init__()
        self._limit = limit

    def http_open(self, req: Request) -> Any:
        return self.do_open(_TimedConnection, req, limit=self._limit)  # type: ignore[arg-type]


class _TimedHttps(HTTPSHandler):
    def __init__(self, limit: _TimeLimit) -> None:
        super().__init__()
        self._limit = limit

    def https_open(self, req: Request) -> Any:
        return self.do_open(_TimedTlsConnection, req, limit=self._limit)  # type: ignore[arg-type]


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Return no request, so that the redirect is an error."""
