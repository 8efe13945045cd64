"""An S3 server in a few lines that ignores conditions, or refuses them."""

from __future__ import annotations

import hashlib
import http.server
import re
import threading
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from reknit.storage.object import conditions
from tests.storage.local_server import LocalServer

Conditions = Literal["kept", "ignored", "unknown"]


class TinyS3(LocalServer):
    """Use it in a ``with`` statement; `files` are its contents, by bucket and key."""

    def __init__(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self.files: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        """The parts of unfinished uploads."""
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        super().__init__(_Handler, store=self)
        self.endpoint = self.address

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        conditions.ENDPOINTS.clear()  # another server may get this port


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    store: TinyS3

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        with self.store.lock:
            self.store.requests.append((self.command, url.path))
            status, data = self.answer(unquote(url.path).lstrip("/"), parse_qs(url.query, True), body)
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", "Sat, 21 Nov 2026 00:00:00 GMT")
        self.send_header("ETag", etag(data if self.command != "PUT" else body))
        if status == 206:
            self.send_header("Content-Range", self.range)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = serve

    def answer(self, key: str, query: dict[str, list[str]], body: bytes) -> tuple[int, bytes]:
        files = self.store.files
        if "uploads" in query or "uploadId" in query:
            return self.upload(key, query, body)
        if self.command == "PUT":
            return self.put(key, body), b""
        if "list-type" in query:
            return 200, self.listing(key, query.get("prefix", [""])[0], query.get("delimiter", [""])[0])
        if key not in files:
            return 404, b""
        if self.command == "DELETE":
            del files[key]
            return 204, b""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            return 200, files[key]
        first, last = int(wanted[1]), min(int(wanted[2]), len(files[key]) - 1)
        self.range = f"bytes {first}-{last}/{len(files[key])}"
        return 206, files[key][first : last + 1]

    def upload(self, key: str, query: dict[str, list[str]], body: bytes) -> tuple[int, bytes]:
        uploads = self.store.uploads
        if "uploads" in query:
            name = f"{len(self.store.requests)}"
            uploads[name] = {}
            return 200, f"<Started><UploadId>{name}</UploadId></Started>".encode()
        name = query["uploadId"][0]
        if name not in uploads:
            return 404, b"<Error><Code>NoSuchUpload</Code><Message>It is over.</Message></Error>"
        if self.command == "PUT":
            uploads[name][int(query["partNumber"][0])] = body
            return 200, b""
        parts = uploads.pop(name)
        if self.command == "POST":
            self.store.files[key] = b"".join(parts[number] for number in sorted(parts))
            tag = escape(etag(self.store.files[key]))
            return 200, f"<Ended><ETag>{tag}</ETag></Ended>".encode()
        return 204, b""

    def put(self, key: str, body: bytes) -> int:
        files = self.store.files
        fresh, same = self.headers.get("If-None-Match"), self.headers.get("If-Match")
        if fresh is not None or same is not None:
            if self.store.conditions == "unknown":
                return 501
            there = files.get(key)
            fits = there is None if fresh else there is not None and etag(there) == same
            if self.store.conditions == "kept" and not fits:
                return 412
        files[key] = body
        return 200

    def listing(self, bucket: str, prefix: str, delimiter: str) -> bytes:
        found, folders = "", set()
        for key, data in sorted(self.store.files.items()):
            rest = key.removeprefix(f"{bucket}/{prefix}")
            if rest == key:
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            found += (
                f"<Contents><Key>{escape(prefix + rest)}</Key><Size>{len(data)}</Size><LastModified>"
                f"2026-11-21T00:00:00.000Z</LastModified><ETag>{escape(etag(data))}</ETag></Contents>"
            )
        found += "".join(
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(folders)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
