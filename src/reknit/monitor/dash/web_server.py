"""A small web server for the page: the view as JSON, and a stream that announces newer views."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reknit.errors import UsageError
from reknit.monitor.reports.report_page import live_page

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
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
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def app(events: LiveEvents, token: str | None, is_closing: Callable[[], bool]) -> Starlette:
    """Return the application; with a `token`, it refuses requests without it."""

    async def index(request: Request) -> Response:
        answer = HTMLResponse(live_page(), headers=_HEADERS)
        if token is not None:  # so that the browser sends it, and the address does not need it
            answer.set_cookie(_COOKIE, token, httponly=True, samesite="strict")
        return answer

    async def data(request: Request) -> Response:
        view = events.view
        return JSONResponse(None if view is None else view.shown, 404 if view is None else 200, _HEADERS)

    async def columns(request: Request) -> Response:
        view = events.view
        version, number = (_count(request.path_params[name]) for name in ("version", "number"))
        if version is None or number is None:
            return PlainTextResponse("the path is /columns/VERSION/NUMBER", 400, _HEADERS)
        if view is None or version != view.version or number >= len(view.columns):
            return PlainTextResponse("there is a newer view", 409, _HEADERS)
        if (found := view.columns[number]) is None:
            return PlainTextResponse("these events are no longer in memory", 410, _HEADERS)
        return JSONResponse(found, headers=_HEADERS)

    async def changes(request: Request) -> Response:
        return StreamingResponse(_versions(events, is_closing), 200, _HEADERS, media_type="text/event-stream")

    def guarded(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guard(request: Request) -> Response:
            given = request.query_params.get("token") or request.cookies.get(_COOKIE) or ""
            if token is not None and not secrets.compare_digest(given.encode(), token.encode()):
                return PlainTextResponse("the address ends with ?token=..., as reknit dash printed it", 401)
            return await answer(request)

        return guard

    pages = {"/": index, "/data": data, "/columns/{version}/{number}": columns, "/changes": changes}
    middleware = [Middleware(GZipMiddleware)]
    if token is None:  # a page of another site must not read from here by a name of this machine
        hosts = ["localhost", "127.0.0.1", "[::1]", "::1"]
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


def server(events: LiveEvents, token: str | None) -> uvicorn.Server:
    """Return a server of the page; its `run` returns when the process is interrupted."""
    settings: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": 5, "lifespan": "off"}
    # Browsers keep the stream open: it must end before uvicorn waits for the end of all connections.
    serving = uvicorn.Server(uvicorn.Config(app(events, token, lambda: serving.should_exit), **settings))
    return serving
