"""A rendezvous store at a given address: rank 0 serves it while the group forms, the other ranks connect.

A call without the token is refused before its content is read.  A hash of the token travels with each call,
so an eavesdropper in the network can take part, unless `CommOptions.tls` is set.
"""

from __future__ import annotations

import errno
import hmac
import socket
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import urlsplit

import grpc
import msgspec

from reknit.comm import serving
from reknit.comm.group import doubling
from reknit.comm.meeting.addresses import addresses, bracketed, is_loopback, own_addresses
from reknit.comm.rank_messages import Reply, decode, encode
from reknit.comm.serving import TOKEN, channel_settings, replying, server_settings, token_server
from reknit.errors import CommError, DeadlineError, ReknitError, UsageError, from_wire, typed_known
from reknit.events.phase import Deadline
from reknit.system import DaemonExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.errors import ShortageError
    from reknit.options import CommOptions


SERVICE = "/reknit.Store/"
"""The beginning of the path of every call."""

MOST_VALUE_NBYTES = 1 << 20
MOST_KEY_LETTERS = 1024
MOST_MESSAGE_NBYTES = 2 * MOST_VALUE_NBYTES

LONGEST_WAIT_S = 5.0
"""The longest that a call waits in the server for a value."""

PAUSES_S = (0.02, 1.0)
"""The first and the longest pause before a call is made again."""

_SHORTEST_TOKEN = 16

_REPLY_S = 10.0
"""Seconds that the server may take, or be out of reach, beyond the time that a call waits for a value."""


class Point(NamedTuple):
    """Where ranks meet: a host and a port."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Point:
        """Return the point that ``tcp://host:port`` names.  Raises `UsageError`."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port or url.lower() != f"tcp://{bracketed(host)}:{port}":
            raise UsageError(
                f"{url!r} names no host and port", remedy="write tcp://host:port, or tcp://[::1]:port"
            )
        return cls(host, port)

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


class StoreRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A call of the store: set `key` to `value`, or get it, waiting up to `wait_s` for it.

    The value comes in the `Reply`, or None before it is set.
    """

    key: str
    value: bytes = b""
    wait_s: float = 0.0


class RemoteStore:
    """A client of the store of rank 0, for the other ranks."""

    def __init__(self, point: Point, token: str, options: CommOptions) -> None:
        """Connect at the first call: rank 0 may come later.  Raises `UsageError` for unusable `tls`."""
        self.master = point.host
        self._point = point
        self._metadata = ((TOKEN, hashed(token)),)
        self._channel = serving.channel(str(point), options, store_settings())

    def set(self, key: str, value: bytes) -> None:
        """Put `value` under `key`.  Raises `CommError` when the store refuses it or cannot be reached."""
        self._call("set", StoreRequest(key, value), Deadline(_REPLY_S))

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of `key`, waiting up to `timeout_s` for it.

        Raises `DeadlineError` without a value, `CommError` when the store refuses or cannot be reached.
        """
        deadline, pauses = Deadline(timeout_s), doubling(*PAUSES_S)
        patience = Deadline(max(timeout_s, _REPLY_S))
        while True:
            waits_s = min(deadline.remaining(), LONGEST_WAIT_S)
            value = self._call("get", StoreRequest(key, wait_s=waits_s), patience).value
            if value is not None:
                return value
            if deadline.passed():
                raise no_value(key, self._point, timeout_s)
            time.sleep(min(next(pauses), deadline.remaining()))

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def _call(self, method: str, request: StoreRequest, patience: Deadline) -> Reply:
        """Return the reply to a call, repeated while the server is out of reach and `patience` lasts."""
        stub, data = self._channel.unary_unary(SERVICE + method, None, None), encode(request)
        pauses = doubling(*PAUSES_S)
        while True:
            try:
                answer = stub(data, timeout=request.wait_s + _REPLY_S, metadata=self._metadata)
            except grpc.RpcError as error:
                failure = self._error_of(cast("grpc.Call", error), patience)
                if failure is not None:
                    raise failure from error
            else:
                reply = decode(answer, Reply, MOST_MESSAGE_NBYTES)
                if reply.error is not None:
                    raise from_wire(reply.error)
                return reply
            time.sleep(min(next(pauses), patience.remaining()))

    def _error_of(self, call: grpc.Call, patience: Deadline) -> CommError | None:
        """Return the error of a call that failed, None where it is to be repeated."""
        code, details = call.code(), call.details() or ""
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return CommError(
                f"the store at {self._point} refuses our token",
                remedy="give every rank the same token, and check that no other job uses this address",
            )
        if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return CommError(f"the store at {self._point} failed: {code.name}: {details}")
        if not patience.passed():
            return None
        return CommError(
            f"rank 0 does not serve the store at {self._point}, or it cannot be reached from here, for "
            f"{patience.seconds:g} s: {details}",
            remedy="look at the log of rank 0, and check that the address is one of its host",
        )


def checked_token(token: str | None) -> str:
    """Return a token that is long enough to be a secret.  Raises `UsageError`."""
    if token is None or len(token) < _SHORTEST_TOKEN:
        given = "there is none" if token is None else f"this one has {len(token)}"
        raise UsageError(
            f"ranks that meet at an address need a token of {_SHORTEST_TOKEN} letters or more, and {given}",
            remedy="pass token=, or set REKNIT_TOKEN, to the same secret on all ranks and nowhere else",
        )
    return token


def hashed(token: str) -> str:
    """Return the hash of a token, which a call carries: headers allow only some letters."""
    return hmac.new(token.encode(), b"reknit.Store", "sha256").hexdigest()


def store_settings() -> list[tuple[str, int]]:
    """Return the settings of channels and servers of a store."""
    return [
        *channel_settings(),
        # The first ranks are often there before rank 0, and should not sleep long after it has come.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


def no_value(key: str, point: Point, timeout_s: float) -> DeadlineError:
    """Return the error of a key that has no value yet."""
    return DeadlineError(
        f"no rank put {key!r} into the store at {point} within {timeout_s:g} s",
        remedy="check that all ranks were started, with the same address and job",
    )


_MOST_NBYTES = 256 << 20

_MOST_WAITING = 64
"""Calls that may wait in the server for a value, each in a thread; further calls are repeated."""

_LINGER_S = 1.5
"""How long rank 0 continues to serve after its failure, so that repeated calls receive the error."""

_END_S = 0.5


class ServedStore:
    """The store of rank 0: its values, and the server by which other ranks read them."""

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
        self._shortage: ShortageError | None = None
        self._executor = DaemonExecutor(
            "reknit-comm", _MOST_WAITING + 8, ready=1, on_shortage=self._fall_short
        )
        methods = {
            SERVICE + "set": replying(StoreRequest, self._set, MOST_MESSAGE_NBYTES),
            SERVICE + "get": replying(StoreRequest, self._get, MOST_MESSAGE_NBYTES),
        }
        settings = [*store_settings(), *server_settings(size)]
        self._server = token_server("rank 0", hashed(token), methods, self._executor, settings)
        try:
            _listen(self._server, point, options)
            with typed_known():
                self._server.start()
        except BaseException:
            self.close()
            raise

    def set(self, key: str, value: bytes) -> None:
        """Put `value` under `key`.  Raises `CommError` if it, or all values together, exceed the limits."""
        with self._changed:
            nbytes = self._nbytes + len(value) - len(self._values.get(key, b""))
            if len(value) > MOST_VALUE_NBYTES or nbytes > _MOST_NBYTES or len(key) > MOST_KEY_LETTERS:
                raise CommError(
                    f"the store at {self._point} accepts no value of {len(value)} bytes for {key[:80]!r}"
                )
            if key not in self._values and len(self._values) >= self._most_keys:
                raise CommError(f"the store at {self._point} accepts at most {self._most_keys} keys")
            self._values[key], self._nbytes = value, nbytes
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of `key`, waiting up to `timeout_s` for it; raises `DeadlineError`."""
        return self.get_many([key], timeout_s)[0]

    def get_many(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Return the values of `keys`, waiting up to `timeout_s` for them; raises `DeadlineError`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._shortage or self._values.keys() >= set(keys), timeout_s
            )
            if self._shortage is not None:
                raise from_wire(self._shortage.to_wire())
            absent = next((key for key in keys if key not in self._values), None)
            if absent is not None:
                raise no_value(absent, self._point, timeout_s)
            return [self._values[key] for key in keys]

    def __enter__(self) -> ServedStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, ReknitError):
            time.sleep(_LINGER_S)
        self.close()

    def close(self) -> None:
        """End the server; the values are gone for all ranks.  Closing twice does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()  # waiting calls are answered while the server stops
        self._server.stop(_END_S).wait()
        self._executor.shutdown()

    def _fall_short(self, error: ShortageError) -> None:
        """Answer all calls with an error: without a thread, they would wait until their deadlines."""
        error.sign(rank=0)
        with self._changed:
            self._shortage = error
            self._changed.notify_all()

    def _set(self, request: StoreRequest, _: object) -> Reply:
        self.set(request.key, request.value)
        return Reply()

    def _get(self, request: StoreRequest, _: object) -> Reply:
        wait_s = min(request.wait_s, LONGEST_WAIT_S) if request.wait_s > 0 else 0.0
        if wait_s and not self._waiting.acquire(blocking=False):
            wait_s = 0.0
        try:
            return Reply(value=self.get(request.key, wait_s))
        except DeadlineError:
            return Reply()
        finally:
            if wait_s:
                self._waiting.release()


def _listen(server: grpc.Server, point: Point, options: CommOptions) -> None:
    """Let the server listen at the point, as narrowly as the host named there allows."""
    host, deadline = _listen_address(point, options), Deadline(options.connect_timeout_s)
    while (problem := _occupied(host, point.port)) is not None:
        if deadline.passed() or problem.errno != errno.EADDRINUSE:
            raise CommError(
                f"rank 0 cannot listen on {bracketed(host)}:{point.port}: {problem.strerror or problem}",
                remedy="give a free port of rank 0's host, the same on all ranks",
            ) from problem
        time.sleep(min(PAUSES_S[1], deadline.remaining()))
    serving.open_port(server, f"{bracketed(host)}:{point.port}", options)


def _listen_address(point: Point, options: CommOptions) -> str:
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
    """Return the error that keeps a server from listening, since gRPC does not report it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family, dualstack_ipv6=host == "::").close()
    except OSError as error:
        return error
    return None
