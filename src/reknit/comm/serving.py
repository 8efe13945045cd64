"""The gRPC servers and channels of ranks: bounded settings, the check of the token, TLS."""

from __future__ import annotations

import hmac
import logging
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc

from reknit.comm.rank_messages import CHUNK_NBYTES, Reply, decode, encode
from reknit.errors import CommError, ReknitError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from reknit.comm.rank_messages import Message
    from reknit.options import CommOptions, Tls
    from reknit.system import DaemonExecutor


def channel(address: str, options: CommOptions, settings: Sequence[tuple[str, int]]) -> grpc.Channel:
    """Return a connection to the server at `address`; it is made when it is first used.

    Raises `UsageError` for files of certificates that cannot be used.
    """
    arguments: list[tuple[str, int | str]] = list(settings)
    if options.tls is None:
        return grpc.insecure_channel(address, options=arguments)
    ca, certificate, key = _files(options.tls)
    if options.tls.server_name is not None:
        # Ranks are reached by IP address, which certificates seldom name.  Only the signature matters.
        arguments.append(("grpc.ssl_target_name_override", options.tls.server_name))
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    return grpc.secure_channel(address, credentials, options=arguments)


def open_port(server: grpc.Server, address: str, options: CommOptions) -> int:
    """Let a server listen on `address`, a host and a port, 0 for any; return the port.

    Raises `CommError` when it cannot, `UsageError` for files of certificates that cannot be used.
    """
    try:
        if options.tls is None:
            port = server.add_insecure_port(address)
        else:
            ca, certificate, key = _files(options.tls)
            # Without a certificate of the same CA, no rank can connect.
            credentials = grpc.ssl_server_credentials(
                [(key, certificate)], root_certificates=ca, require_client_auth=True
            )
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise _deaf(address, str(error)) from error
    if port == 0:
        raise _deaf(address, "the port could not be opened")
    return port


def _files(tls: Tls) -> tuple[bytes, bytes, bytes]:
    """Return the contents of the files of CA, certificate and key.

    They are checked here, since gRPC reports a bad file only as a failed connection.
    """
    texts = _read("ca", tls.ca), _read("certificate", tls.certificate), _read("key", tls.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(tls.ca)
    except ssl.SSLError as error:
        raise UsageError(
            f"tls.ca holds no certificate: {error}",
            path=os.fspath(tls.ca),
            remedy="give a file in PEM format",
        ) from error
    try:
        context.load_cert_chain(tls.certificate, tls.key, password=_no_password)
    except ssl.SSLError as error:
        raise UsageError(
            f"tls.certificate and tls.key do not match: {error}",
            path=os.fspath(tls.certificate),
            remedy=f"give a certificate in PEM format, and its key without a password ({tls.key})",
        ) from error
    return texts


def _read(name: str, path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"tls.{name} cannot be read: {error.strerror or error}",
            path=os.fspath(path),
            remedy=f"put the file there on every host, readable by the user of the job: {path}",
        ) from error


def _no_password() -> str:
    return ""  # else OpenSSL would ask for one at the terminal


def _deaf(address: str, detail: str) -> CommError:
    return CommError(
        f"no server can listen on {address}: {detail}",
        remedy="set CommOptions.interface, or CommOptions.bind to an address of this host",
    )


if TYPE_CHECKING:
    _Handler = grpc.GenericRpcHandler[bytes, bytes]
    Method = grpc.RpcMethodHandler[bytes, bytes]
else:
    _Handler = grpc.GenericRpcHandler  # generic in the stubs only

_log = logging.getLogger("reknit.comm")

TOKEN = "reknit-token"
"""The name under which a call carries the token of the server that it is for."""

SPARE_CONNECTIONS = 64
"""The number of connections that a server accepts beyond the connections that it needs."""

MOST_PEERS_LOGGED = 256
HANDSHAKE_MS = 10_000
IDLE_MS = 20_000


def channel_settings() -> list[tuple[str, int]]:
    """Return the settings of channels and servers, so that no environment variable decides them."""
    return [
        # Larger messages come in chunks, whose sum is limited by `CommOptions.max_message_nbytes`.
        ("grpc.max_send_message_length", 2 * CHUNK_NBYTES),
        ("grpc.max_receive_message_length", 2 * CHUNK_NBYTES),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        # Channels of one process would else share connections, and the back-off of a dead one.
        ("grpc.use_local_subchannel_pool", 1),
        # A host that loses its power sends no reset; only a ping finds out.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 60_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def server_settings(num_callers: int) -> list[tuple[str, int]]:
    """Return the settings of a server for so many callers.

    The number of connections is bounded, so that strangers cannot exhaust this process.  A connection that
    says nothing, or that was refused, is closed soon; a caller that finds no room tries again.
    """
    return [
        *channel_settings(),
        ("grpc.max_allowed_incoming_connections", 2 * num_callers + SPARE_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        # A rank that has joined is never idle: its watch call stays open.
        ("grpc.max_connection_idle_ms", IDLE_MS),
    ]


def replying(
    kind: type[Message], receive: Callable[[Message, grpc.ServicerContext], Reply], max_nbytes: int
) -> Method:
    """Return a handler that answers a message with the reply of `receive`, or with its error."""

    def answer(data: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return encode(receive(decode(data, kind, max_nbytes), context))
        except ReknitError as error:
            return encode(Reply(error.to_wire()))

    return grpc.unary_unary_rpc_method_handler(answer)


def token_server(
    name: str,
    token: str,
    methods: Mapping[str, Method],
    executor: DaemonExecutor,
    settings: list[tuple[str, int]],
) -> grpc.Server:
    """Return a server that answers calls with the token only; `name` names its owner in errors and logs."""
    handler = _TokenHandler(name, token, methods)
    return grpc.server(cast("ThreadPoolExecutor", executor), handlers=[handler], options=settings)


class _TokenHandler(_Handler):
    """A handler that serves calls with the token, and refuses all other calls without reading them."""

    def __init__(self, name: str, token: str, methods: Mapping[str, Method]) -> None:
        self._name, self._token, self._methods = name, token.encode(), methods
        self._refused: set[str] = set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Method | None:
        """Return the method for a call: without the token, a refusal that reads nothing of it."""
        method = self._methods.get(handler_call_details.method)
        if method is None:
            return None
        given = next((v for k, v in handler_call_details.invocation_metadata or () if k == TOKEN), "")
        value = given if isinstance(given, bytes) else given.encode()
        if not hmac.compare_digest(value, self._token):
            return grpc.stream_unary_rpc_method_handler(self._refuse)
        return method

    def _refuse(self, _: object, context: grpc.ServicerContext) -> bytes:
        peer = context.peer().rpartition(":")[0]
        if peer not in self._refused and len(self._refused) < MOST_PEERS_LOGGED:
            self._refused.add(peer)
            _log.warning("%s refused a call from %s: wrong token", self._name, peer)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{self._name} has another token")
