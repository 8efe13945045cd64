"""The report of saves and loads while they run, for a browser."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import ReknitError, StorageError, UsageError
from reknit.monitor.operations import EventFiles
from reknit.monitor.page import brief, content, detail, facts, limit_of, live_page, live_policy
from reknit.monitor.summary import figures_of
from reknit.plugins.events import monotonic, reason_of
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from starlette.requests import Request

    from reknit.monitor.operations import RecordedOperation
    from reknit.monitor.summary import CostTable, OperationFigures


logger = logging.getLogger("reknit")

_MOST_EVENTS = 1_000_000
"""Events that are kept in memory, some 400 bytes each."""
_MOST_PAST = 1_000
"""Older operations that the page still lists, without their events."""
_LOOK_S = 1.0
_IDLE_SHARE = 4
"""The pause after a look is at least so many times as long as the look."""


class LiveView(NamedTuple):
    """The content of the page; `shown` has the picture of the last operation only, `version` counts up."""

    version: int
    shown: dict[str, Any]
    figures: list[OperationFigures | None]
    """None for an operation whose events were forgotten."""

    def detail(self, number: int) -> dict[str, Any] | None:
        """Return the picture of an operation; None if its events were forgotten."""
        figures = self.figures[number]
        return None if figures is None else detail(figures)


class LiveEvents:
    """Reads events as they are written, in a thread; `view` is None until the first event.

    `costs` returns the cost of the time between saves.  Without a limit of the throughput, the highest one in
    the events is the limit.
    """

    def __init__(
        self,
        places: Sequence[str],
        costs: Callable[[Sequence[RecordedOperation]], CostTable | None],
        limit_bytes_per_s: float | None = None,
    ) -> None:
        self._costs = costs
        self._limit_bytes_per_s = limit_bytes_per_s
        self._files = EventFiles(places)
        self._problem = ""
        try:
            self._files.read()
        except StorageError as error:  # of one file; a wrong place is an error at once
            self._problem = str(error)
            logger.warning("the page may lack events: %s", error)
        self._known: dict[tuple[object, ...], OperationFigures] = {}
        self._past: deque[dict[str, Any]] = deque(maxlen=_MOST_PAST)
        self._end = threading.Event()
        self.view: LiveView | None = None
        self._build()
        self._thread = start_thread("reknit-dash", self._follow)

    def close(self) -> None:
        """Stop reading."""
        self._end.set()
        self._thread.join()

    def _follow(self) -> None:
        pause_s, built = _LOOK_S, self._files.amount
        while not self._end.wait(pause_s):
            begin = monotonic()
            problem = self._attempt(self._files.read)
            if (amount := self._files.amount) > built:
                built_problem = self._attempt(self._build)
                problem, built = problem or built_problem, built if built_problem else amount
            if problem and problem != self._problem:
                logger.warning("the page may lack events: %s", problem)
            self._problem = problem
            pause_s = max(_LOOK_S, _IDLE_SHARE * (monotonic() - begin))

    def _attempt(self, call: Callable[[], object]) -> str:
        """Call a function, and return the text of its error: the next look may succeed."""
        try:
            call()
        except Exception as error:
            return str(error) if isinstance(error, ReknitError) else reason_of(error)
        return ""

    def _build(self) -> None:
        self._past += [_without_events(each) for each in self._files.forget(_MOST_EVENTS)]
        read = self._files.until_now()
        if operations := read.operations:
            known, self._known = self._known, {}
            shown, figures = content(
                operations,
                self._costs(operations),
                read.run,
                self._limit_bytes_per_s,
                figured=lambda each: self._figured(each, known),
            )
            last = figures[-1]
            if last is not None:
                shown["operations"][-1]["detail"] = detail(last)
            shown["operations"] = [*self._past, *shown["operations"]]
            version = 1 if self.view is None else self.view.version + 1
            past: list[OperationFigures | None] = [None] * len(self._past)
            self.view = LiveView(version, {"version": version, **shown}, [*past, *figures])

    def _figured(
        self, operation: RecordedOperation, known: dict[tuple[object, ...], OperationFigures]
    ) -> OperationFigures:
        """Return the figures of an operation, those of the last look if it has no new events since then."""
        key = operation.action, operation.path, operation.step, operation.number, len(operation.events)
        figures = known.get(key)
        figures = figures_of(operation) if figures is None else figures._replace(operation=operation)
        self._known[key] = figures
        return figures


def _without_events(operation: RecordedOperation) -> dict[str, Any]:
    """Return the facts on an operation as a whole."""
    figures = figures_of(operation)
    return brief(operation) | facts(figures, limit_of([figures])) | {"past": True}


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
