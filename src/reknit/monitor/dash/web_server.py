"""A small web server for the page: the view as JSON, and a stream that announces newer views."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reknit.errors import UsageError
from reknit.monitor.reports.report_page import live_page, live_policy

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise UsageError(
        f"the dashboard needs {error.name}, which is not installed", remedy="pip install 'reknit[dash]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.requests import Request

    from reknit.monitor.dash.live_view import LiveEvents

_POLL_S = 0.2
_ALIVE_S = 15.0
"""Proxies end connections that are silent for longer."""
_MOST_DIGITS = 18
_COOKIE = "reknit_token"
HEAD_S = 10.0
"""The longest that a connection may take until a request has begun."""
MOST_CONNECTIONS = 256
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def app(
    events: LiveEvents,
    token: str | None,
    is_closing: Callable[[], bool],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
) -> Starlette:
    """Return the application at an address; with a `token`, it refuses requests without it."""
    cookie = f"{_COOKIE}_{port}"  # browsers send the cookies of a host to all its ports

    async def index(request: Request) -> Response:
        answer = HTMLResponse(live_page(), headers=_HEADERS | {"Content-Security-Policy": live_policy()})
        if token is not None:  # so that the browser sends it, and the address does not need it
            answer.set_cookie(cookie, token, httponly=True, samesite="strict")
        return answer

    async def data(request: Request) -> Response:
        view = events.view
        return JSONResponse(None if view is None else view.shown, 404 if view is None else 200, _HEADERS)

    async def picture(request: Request) -> Response:
        view = events.view
        version, number = (_count(request.path_params[name]) for name in ("version", "number"))
        if version is None or number is None:
            return PlainTextResponse("the path is /details/VERSION/NUMBER", 400, _HEADERS)
        if view is None or version != view.version or number >= len(view.figures):
            return PlainTextResponse("there is a newer view", 409, _HEADERS)
        if (found := view.detail(number)) is None:
            return PlainTextResponse("these events are no longer in memory", 410, _HEADERS)
        return JSONResponse(found, headers=_HEADERS)

    async def changes(request: Request) -> Response:
        return StreamingResponse(_versions(events, is_closing), 200, _HEADERS, media_type="text/event-stream")

    def guarded(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guard(request: Request) -> Response:
            given = request.query_params.get("token") or request.cookies.get(cookie) or ""
            if token is not None and not secrets.compare_digest(given.encode(), token.encode()):
                text = "the address ends with ?token=..., as reknit dash printed it"
                return PlainTextResponse(text, 401, _HEADERS)
            return await answer(request)

        return guard

    pages = {"/": index, "/data": data, "/details/{version}/{number}": picture, "/changes": changes}
    middleware = [Middleware(GZipMiddleware)]
    if token is None:  # a page of another site must not read from here by a name of this machine
        hosts = ["localhost", "127.0.0.1", "[::1]", "::1", host, f"[{host}]"]
        middleware.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=hosts))
    routes = [Route(path, guarded(answer)) for path, answer in pages.items()]
    return Starlette(routes=routes, middleware=middleware)


def _count(text: str) -> int | None:
    """Return the number in a part of a path; None if it is not a number, or too long."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


async def _versions(events: LiveEvents, is_closing: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield the number of each view as a server-sent event, and a sign of life in between."""
    sent, silent_s = -1, 0.0
    while not is_closing():
        version = 0 if events.view is None else events.view.version
        if version != sent:
            sent, silent_s = version, 0.0
            yield f"data: {version}\n\n"
        elif silent_s >= _ALIVE_S:
            silent_s = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(_POLL_S)
        silent_s += _POLL_S


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.  Raises `UsageError` if the system refuses it."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}",
            remedy="name another with --host and --port",
        ) from error


class _Impatient(H11Protocol):
    """A connection that ends if the head of a request does not come in time."""

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        self._wait_for_head()

    def handle_events(self) -> None:
        super().handle_events()
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete and self._limit is not None:
            self._limit.cancel()

    def on_response_complete(self) -> None:
        self._wait_for_head()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = self.loop.call_later(HEAD_S, self.transport.abort)


def server(events: LiveEvents, token: str | None, host: str = "127.0.0.1", port: int = 0) -> uvicorn.Server:
    """Return a server of the page; its `run` returns when the process is interrupted."""
    settings: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": 5, "lifespan": "off"}
    # Browsers keep the stream open: it must end before uvicorn waits for the end of all connections.
    made = app(events, token, lambda: serving.should_exit, host=host, port=port)
    serving = uvicorn.Server(uvicorn.Config(made, http=_Impatient, ws="none", **settings))
    return serving
