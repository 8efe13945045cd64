"""A proxy: to its clients it speaks the XML API of Google Cloud Storage, to the server behind it S3.

What differs between the two is little: names of headers, conditions that name a generation instead of an
ETag, and signatures.  The generation of an object is here its ETag.  Usage: _gcs_shim.py PORT S3_STATE_FILE
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
import http.server
import json
import sys
import threading
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote

UNSIGNED = "UNSIGNED-PAYLOAD"
DROPPED = {"authorization", "host", "connection", "content-length", "accept-encoding", "transfer-encoding"}
BACK = {"content-length", "connection", "transfer-encoding", "date", "server"}


class Shim(http.server.BaseHTTPRequestHandler):
    """Passes each request on, with the other names, and its answer back."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    s3: dict[str, str]
    kept = threading.local()

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, _, query = self.path.partition("?")
        path = quote(unquote(path), safe="/-_.~")
        query = canonical(query)
        address = self.s3["endpoint"].removeprefix("http://")
        headers = signed(
            self.s3, self.command, address, path, query=query, headers=to_s3(self.headers.items())
        )
        status, found, data = self.ask(address, f"{path}?{query}" if query else path, headers, body)
        self.send_response(status)
        for name, value in from_s3(found):
            self.send_header(name, value)
        length = dict((name.lower(), value) for name, value in found).get("content-length", "0")
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def ask(self, address: str, target: str, headers: dict, body: bytes) -> tuple[int, list, bytes]:
        """Ask the server behind, on the connection that this thread keeps, or on a new one."""
        for connection in (
            getattr(self.kept, "connection", None),
            http.client.HTTPConnection(address, timeout=60),
        ):
            if connection is None:
                continue
            try:
                connection.request(self.command, target, body=body, headers=headers)
                answer = connection.getresponse()
                data = answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                self.kept.connection = None
                continue
            self.kept.connection = connection
            return answer.status, answer.getheaders(), data
        return 503, [], b""

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def to_s3(headers: list[tuple[str, str]]) -> dict[str, str]:
    """Return a request's headers by the names that S3 has for them."""
    found = {}
    for name, value in headers:
        name = name.lower()
        if name == "x-goog-if-generation-match":
            name, value = ("if-none-match", "*") if value == "0" else ("if-match", f'"{value}"')
        elif name.startswith("x-goog-meta-"):
            name = name.replace("x-goog-", "x-amz-")
        elif name == "x-goog-copy-source":
            name = "x-amz-copy-source"
        elif name in DROPPED or name.startswith("x-goog-"):
            continue
        found[name] = value
    return found


def from_s3(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return an answer's headers by the names that GCS has for them."""
    found = []
    for name, value in headers:
        lower = name.lower()
        if lower == "etag":
            found.append(("x-goog-generation", value.strip('"')))
        if lower not in BACK:
            found.append((name.replace("x-amz-meta-", "x-goog-meta-"), value))
    return found


def canonical(query: str) -> str:
    pairs = sorted(parse_qsl(query, keep_blank_values=True))
    return "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in pairs)


def signed(
    s3: dict, method: str, address: str, path: str, *, query: str, headers: dict[str, str]
) -> dict[str, str]:
    """Return the headers with a signature of version 4, which leaves out the body."""
    moment = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    headers = {**headers, "host": address, "x-amz-date": moment, "x-amz-content-sha256": UNSIGNED}
    names = sorted(name for name in headers if name == "host" or name.startswith("x-amz-"))
    lines = "".join(f"{name}:{headers[name].strip()}\n" for name in names)
    request = "\n".join((method, path, query, lines, ";".join(names), UNSIGNED))
    scope = f"{moment[:8]}/{s3['region']}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{s3['secret_access_key']}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, text.encode(), "sha256").hexdigest()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={s3['access_key_id']}/{scope}, "
        f"SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    return headers


if __name__ == "__main__":
    Shim.s3 = json.loads(Path(sys.argv[2]).read_text())
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Shim)
    server.daemon_threads = True
    server.serve_forever()
