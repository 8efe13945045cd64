"""gRPC channels and ports, with TLS if `CommOptions.tls` is set."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from reknit.errors import CommError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.options import CommOptions, Tls


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
