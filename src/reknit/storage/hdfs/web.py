"""WebHDFS, to a NameNode or a gateway, for requests that the HDFS client lacks."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from reknit.errors import StoragePermissionError, UsageError
from reknit.storage.hdfs.errors import of_class, unreached
from reknit.storage.hdfs.rpc import Requests, RpcRequests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.storage.hdfs.config import Cluster, HdfsOptions
    from reknit.storage.hdfs.rpc import DataNode


def requests_of(cluster: Cluster, options: HdfsOptions) -> Requests | None:
    """Return a client that can join sub-files, or None."""
    if options.concat == "none":
        return None
    if options.webhdfs is not None and options.concat != "rpc":
        return WebRequests(options.webhdfs, cluster.user, options.timeout_s)
    if options.concat == "auto" and cluster.secure:
        return None
    return RpcRequests(cluster, options.timeout_s)


class WebRequests:
    """Requests to a web server at ``http://host:port``, or the ``/path`` below which a gateway has WebHDFS.

    The requests are those of `user`, or of the query of the address: ``?delegation=TOKEN``,
    ``?user.name=NAME``.
    """

    def __init__(self, address: str, user: str, timeout_s: float) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"{address!r} is not the address of a web server", remedy="write webhdfs=http://namenode:9870"
            )
        self._parts, self._timeout_s = parts, timeout_s
        self._root = parts.path.rstrip("/") or "/webhdfs/v1"
        self._asking = dict(parse_qsl(parts.query)) or {"user.name": user}

    def concat(self, target: str, sources: Sequence[str], url: str) -> None:
        """Join files into one."""
        self._call("POST", target, {"op": "CONCAT", "sources": ",".join(sources)}, "join the parts of", url)

    def set_policy(self, path: str, policy: str, url: str) -> None:
        """Set a storage policy; needs Hadoop 3."""
        query = {"op": "SETSTORAGEPOLICY", "storagepolicy": policy}
        self._call("PUT", path, query, f"give the policy {policy} to", url)

    def nodes_of(self, path: str, url: str) -> list[DataNode]:
        """Return an empty list: WebHDFS cannot name the client that asks for blocks."""
        return []

    def place(self, path: str, avoided: Sequence[DataNode], url: str) -> None:
        """Do nothing: with WebHDFS, the NameNode places blocks."""

    def close(self) -> None:
        """Do nothing: each request has a connection of its own."""

    def _call(self, method: str, path: str, query: dict[str, str], action: str, url: str) -> None:
        parts = self._parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(parts.hostname), parts.port, timeout=self._timeout_s)
        try:
            connection.request(
                method,
                f"{self._root}{quote(path)}?{urlencode({**query, **self._asking})}",
                headers={"Content-Length": "0"},
            )
            answer = connection.getresponse()
            status, data = answer.status, answer.read(1 << 20)
        except (OSError, http.client.HTTPException) as error:
            raise unreached(action, url, f"{parts.netloc}: {error or type(error).__name__}") from error
        finally:
            connection.close()
        if status == 200:
            return
        name, message = _remote_exception(data)
        if name:
            raise of_class(action, url, name, message)
        if status in (401, 403):
            raise StoragePermissionError(
                f"cannot {action} {url}: {parts.netloc} answers {status}",
                remedy="give a delegation token, as webhdfs=http://host:port?delegation=TOKEN",
                path=url,
            )
        raise unreached(action, url, f"{parts.netloc} answers {status}")


def _remote_exception(data: bytes) -> tuple[str, str]:
    """Return the Java class and the message of an error, both empty for an unreadable answer."""
    try:
        fields = json.loads(data)["RemoteException"]
        return str(fields.get("javaClassName") or fields["exception"]), str(fields.get("message", ""))
    except (ValueError, KeyError, TypeError):
        return "", ""
