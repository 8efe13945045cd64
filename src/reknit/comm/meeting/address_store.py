"""A rendezvous store at a given address: rank 0 serves it while the group forms, the other ranks connect.

A call without the token is refused before its content is read.  A hash of the token travels with each call,
so an eavesdropper in the network can take part, unless `CommOptions.tls` is set.
"""

from __future__ import annotations

import hmac
import time
from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import urlsplit

import grpc
import msgspec

from reknit.comm import tls
from reknit.comm.backoff import doubling
from reknit.comm.meeting.addresses import bracketed
from reknit.comm.rank_messages import Reply, decode, encode
from reknit.comm.serving import TOKEN, channel_settings
from reknit.errors import CommError, DeadlineError, UsageError, from_wire
from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
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
        self._channel = tls.channel(str(point), options, store_settings())

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
