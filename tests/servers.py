"""Real servers that run, and ways to their contents without reknit; see scripts/servers."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import http.client
import json
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.running.budget import use_server

STATE = Path(__file__).parents[1] / ".servers"
SCHEMES = {"s3": "s3", "ceph": "s3", "rclone": "s3", "swift": "s3", "gcs": "gs", "azure": "az"}


def server(name: str) -> dict[str, Any]:
    """Return the settings that a client of a server needs; skip the test when the server is not up."""
    try:
        found: dict[str, Any] = json.loads((STATE / f"{name}.json").read_text())
    except FileNotFoundError:
        pytest.skip(f"needs a server: scripts/servers up {name}")
    use_server(name)
    return found


def environment(name: str, endpoint: str | None = None) -> dict[str, str]:
    """Return the environment variables by which object stores are reached; skip when the server is not up."""
    found = server(name)
    endpoint = endpoint or found["endpoint"]
    if SCHEMES[name] == "s3":
        return {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": found["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": found["secret_access_key"],
            "AWS_REGION": found["region"],
        }
    if name == "gcs":
        key = {"gcs_base_url": endpoint, "disable_oauth": True}
        key |= {"client_email": "", "private_key": "", "private_key_id": ""}
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key), "GOOGLE_SKIP_SIGNATURE": "true"}
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": found["account_name"],
        "AZURE_STORAGE_ACCOUNT_KEY": found["account_key"],
        "AZURE_STORAGE_ENDPOINT": endpoint,
    }


def new_url(name: str) -> str:
    """Return the URL of a new folder."""
    return f"{SCHEMES[name]}://{server(name)['bucket']}/test-{uuid.uuid4().hex[:12]}"


def reach(name: str, patch: pytest.MonkeyPatch) -> str:
    """Lead the object stores of this process to a server, and return the URL of a new folder there."""
    for variable, value in environment(name).items():
        patch.setenv(variable, value)
    return new_url(name)


def new_folder(kind: str, local: Path, patch: pytest.MonkeyPatch) -> str:
    """Return a new folder of a store of some kind; on this machine it is `local`."""
    if kind == "local":
        return str(local)
    if kind == "hdfs":
        pytest.importorskip("hdfs_native", reason="HDFS needs hdfs-native")
        return f"{server(kind)['endpoint']}/test-{uuid.uuid4().hex[:12]}"
    return reach(kind, patch) if kind in SCHEMES else f"{kind}://{uuid.uuid4().hex[:12]}/run"


def raw_get(name: str, url: str) -> bytes:
    """Return the bytes of an object, past the client that reknit uses."""
    status, data = _ask(name, "GET", url, b"")
    assert status == 200, (status, data)
    return data


def raw_put(name: str, url: str, data: bytes) -> None:
    """Put an object there, past the client that reknit uses."""
    status, answer = _ask(name, "PUT", url, data)
    assert status in (200, 201), (status, answer)


def uploads_left(url: str) -> list[str]:
    """Return the multipart uploads below a folder of the S3 server that are neither finished nor aborted."""
    bucket = url.partition("://")[2].partition("/")[0]
    _, listing = _filer(
        "GET", f"/buckets/{bucket}/.uploads/?limit=10000", b"", {"Accept": "application/json"}
    )
    entries = json.loads(listing).get("Entries") or [] if listing else []
    prefix = url.partition("://")[2].partition("/")[2]
    keys = [base64.b64decode(entry["Extended"]["key"]).decode() for entry in entries]
    return [key for key in keys if key.startswith(f"{prefix}/")]


def _ask(name: str, method: str, url: str, data: bytes) -> tuple[int, bytes]:
    path = quote(url.partition("://")[2], safe="/-_.~")
    if name == "azure":
        return _azure(method, path, data)
    if name == "ceph":
        return _ceph(method, path, data)
    # The S3 server keeps its objects in a file system that has an API of its own.
    return _filer(method, f"/buckets/{path}", data, {"Content-Type": "application/octet-stream"})


def _filer(method: str, path: str, data: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    return _send(server("s3")["filer"], method, path, data, headers)


def _ceph(method: str, path: str, data: bytes) -> tuple[int, bytes]:
    """Send a request that is signed in the old way, which is short."""
    found = server("ceph")
    date, kind = email.utils.formatdate(usegmt=True), "application/octet-stream"
    text = f"{method}\n\n{kind}\n{date}\n/{path}"
    digest = hmac.digest(found["secret_access_key"].encode(), text.encode(), hashlib.sha1)
    signature = f"AWS {found['access_key_id']}:{base64.b64encode(digest).decode()}"
    headers = {"Date": date, "Content-Type": kind, "Authorization": signature}
    return _send(found["endpoint"].removeprefix("http://"), method, f"/{path}", data, headers)


def _azure(method: str, path: str, data: bytes) -> tuple[int, bytes]:
    found = server("azure")
    address, _, account = found["endpoint"].removeprefix("http://").partition("/")
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    if method == "PUT":
        headers = {"x-ms-blob-type": "BlockBlob", **headers}
    length = str(len(data)) if data else ""
    kind = "application/octet-stream" if method == "PUT" else ""
    lines = "\n".join(f"{key}:{value}" for key, value in headers.items())
    signed = f"{method}\n\n\n{length}\n\n{kind}\n\n\n\n\n\n\n{lines}\n/{account}/{account}/{path}"
    digest = hmac.digest(base64.b64decode(found["account_key"]), signed.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(digest).decode()}"
    if kind:
        headers["Content-Type"] = kind
    return _send(address, method, f"/{account}/{path}", data, headers)


def _send(address: str, method: str, path: str, data: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request(method, path, body=data if method != "GET" else None, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
