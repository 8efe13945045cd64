"""The server of a store at an address: it lets in who knows its token, and holds values up to a bound."""

from __future__ import annotations

import errno
import functools
import hmac
import socket
import threading
import time
from typing import TYPE_CHECKING, cast

import grpc
import msgspec

from reknit.comm import tls
from reknit.comm.call_threads import CallThreads
from reknit.comm.meeting.address_store import (
    LONGEST_WAIT_S,
    MOST_KEY_LETTERS,
    MOST_VALUE_NBYTES,
    PAUSES_S,
    SERVICE,
    TOKEN,
    Ask,
    Point,
    StoreReply,
    decoded,
    spoken,
    store_settings,
    unset,
)
from reknit.comm.meeting.addresses import addresses, bracketed, is_loopback, own_addresses
from reknit.comm.tree.server import server_settings
from reknit.errors import CommError, DeadlineError, ReknitError
from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from reknit.options import CommOptions

    _Handler = grpc.GenericRpcHandler[bytes, bytes]
else:
    _Handler = grpc.GenericRpcHandler  # generic in the stubs only

_MOST_NBYTES = 256 << 20

_MOST_WAITING = 64
"""Calls that may wait in the server for a value, each in a thread; the others ask again."""

_LINGER_S = 1.5
"""How long rank 0 serves on after it failed, for those who ask again to hear why."""

_END_S = 0.5


class ServedStore:
    """The store of rank 0: its values, and the server by which others see them."""

    def __init__(self, point: Point, size: int, token: str, options: CommOptions) -> None:
        """Serve the store at `point`; raises `CommError` when nothing can listen there.

        A port that is in use is waited for, up to `options.connect_timeout_s`: a job that is started again
        may have to outlast the process of the one before.
        """
        self.master = point.host
        self._point = point
        self._values: dict[str, bytes] = {}
        self._nbytes = 0
        # Each rank sets a few keys; anything more is a mistake, or worse.
        self._most_keys = 8 * size + 64
        self._changed = threading.Condition()
        self._closed = False
        self._waiting = threading.BoundedSemaphore(_MOST_WAITING)
        self._crew = CallThreads(_MOST_WAITING + 8)
        self._server = grpc.server(
            cast("ThreadPoolExecutor", self._crew),
            handlers=[_Door(token, {SERVICE + "set": self._put, SERVICE + "get": self._look})],
            options=[*store_settings(), *server_settings(size)],
        )
        try:
            _open(self._server, point, options)
        except BaseException:
            self.close()
            raise
        self._server.start()

    def set(self, key: str, value: bytes) -> None:
        """Put `value` under `key`; raises `CommError` for one, or for values in all, beyond the limits."""
        with self._changed:
            nbytes = self._nbytes + len(value) - len(self._values.get(key, b""))
            if len(value) > MOST_VALUE_NBYTES or nbytes > _MOST_NBYTES or len(key) > MOST_KEY_LETTERS:
                raise CommError(
                    f"the store at {self._point} takes no value of {len(value)} bytes for {key[:80]!r}"
                )
            if key not in self._values and len(self._values) >= self._most_keys:
                raise CommError(f"the store at {self._point} takes no more than {self._most_keys} keys")
            self._values[key], self._nbytes = value, nbytes
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of `key`, waiting up to `timeout_s` for it; raises `DeadlineError`."""
        return self.get_many([key], timeout_s)[0]

    def get_many(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Return the values of `keys`, waiting up to `timeout_s` for them; raises `DeadlineError`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._values.keys() >= set(keys), timeout_s)
            absent = next((key for key in keys if key not in self._values), None)
            if absent is not None:
                raise unset(absent, self._point, timeout_s)
            return [self._values[key] for key in keys]

    def __enter__(self) -> ServedStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, ReknitError):
            time.sleep(_LINGER_S)
        self.close()

    def close(self) -> None:
        """End the server; the values are gone for everyone.  Closing twice does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()  # those who wait are answered within the time that calls get to end
        self._server.stop(_END_S).wait()
        self._crew.shutdown()

    def _put(self, ask: Ask) -> StoreReply:
        self.set(ask.key, ask.value)
        return StoreReply()

    def _look(self, ask: Ask) -> StoreReply:
        wait_s = min(ask.wait_s, LONGEST_WAIT_S) if ask.wait_s > 0 else 0.0
        if wait_s and not self._waiting.acquire(blocking=False):
            wait_s = 0.0
        try:
            return StoreReply(self.get(ask.key, wait_s))
        except DeadlineError:
            return StoreReply()
        finally:
            if wait_s:
                self._waiting.release()


class _Door(_Handler):
    """Lets calls in that bring the token."""

    def __init__(self, token: str, behaviours: dict[str, Callable[[Ask], StoreReply]]) -> None:
        self._token, self._behaviours = spoken(token).encode(), behaviours

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return what serves a call: a refusal that reads nothing of it, unless it carries the token."""
        behaviour = self._behaviours.get(handler_call_details.method)
        if behaviour is None:
            return None
        given = next((v for k, v in handler_call_details.invocation_metadata or () if k == TOKEN), "")
        if not hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), self._token):
            return grpc.stream_unary_rpc_method_handler(self._refuse)
        return grpc.unary_unary_rpc_method_handler(functools.partial(self._reply, behaviour))

    def _refuse(self, _: object, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")

    def _reply(self, behaviour: Callable[[Ask], StoreReply], data: bytes, _: grpc.ServicerContext) -> bytes:
        try:
            reply = behaviour(decoded(data, Ask))
        except ReknitError as error:
            reply = StoreReply(error=error.to_wire())
        return msgspec.msgpack.encode(reply)


def _open(server: grpc.Server, point: Point, options: CommOptions) -> None:
    """Let the server listen at the point, as narrowly as the host named there allows."""
    host, deadline = _listens(point, options), Deadline(options.connect_timeout_s)
    while (problem := _occupied(host, point.port)) is not None:
        if deadline.passed() or problem.errno != errno.EADDRINUSE:
            raise CommError(
                f"rank 0 cannot listen on {bracketed(host)}:{point.port}: {problem.strerror or problem}",
                remedy="name a free port of rank 0's host, the same on all ranks",
            ) from problem
        time.sleep(min(PAUSES_S[1], deadline.remaining()))
    tls.open_port(server, f"{bracketed(host)}:{point.port}", options)


def _listens(point: Point, options: CommOptions) -> str:
    """Return the address on which rank 0 listens."""
    if options.bind is not None or options.interface is not None:
        return addresses(options, one_host=False, master=point.host).listens.strip("[]")
    try:
        found = [
            str(end[0]) for *_, end in socket.getaddrinfo(point.host, point.port, type=socket.SOCK_STREAM)
        ]
    except OSError:
        found = []
    if point.host == "localhost" or point.host in found:
        loopback = [address for address in found if is_loopback(address)]
        if loopback:
            return loopback[0]
    own = own_addresses()
    exact = [address for address in found if address in own and not is_loopback(address)]
    # A name that leads elsewhere, or here only to loopback, may still be ours for the others.
    return exact[0] if exact else ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")


def _occupied(host: str, port: int) -> OSError | None:
    """Return what keeps a server from listening, since gRPC does not say."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family, dualstack_ipv6=host == "::").close()
    except OSError as error:
        return error
    return None
