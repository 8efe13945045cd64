#!/usr/bin/env bash
# s3fs 2026.9.0: an exception inside `with fs.open(path, "wb")` replaces the object by the part written so far.
#
# An object appears in one piece when its upload is completed, so one would think that a writer which fails leaves the
# old object, or none.  But the end of the `with` closes the file also after an exception, and to close it is to
# complete the upload, of one piece as of many.  A save that fails half-way has then put a short object in the place of
# a good one, and nothing says so but the exception itself.  Inside `with fs.transaction` the old object stays.
#
# Expected: the old object.  Exits 0 as long as s3fs behaves so, and 1 if that has changed.  The store is a server of
# moto, in the same process and on loopback.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "s3fs==2026.9.0" "aiobotocore==3.10.0" \
    "boto3==1.43.117" "botocore==1.43.117" "moto[s3]==5.2.5" flask flask-cors

cat >"$folder/half.py" <<'PYTHON'
import contextlib
import os

import s3fs
from moto.server import ThreadedMotoServer


class Failure(Exception):
    """An error in the middle of a save."""


def write_half(fs, path, nbytes):
    """Write the first part of a file, and fail."""
    with contextlib.suppress(Failure), fs.open(path, "wb", block_size=5 << 20) as file:
        file.write(b"n" * nbytes)
        raise Failure


os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
fs = s3fs.S3FileSystem(endpoint_url=f"http://{host}:{port}", key="key", secret="secret")
fs.mkdir("bucket")
for name, nbytes in (("small", 4), ("large", 12 << 20)):
    path = f"bucket/{name}"
    fs.pipe(path, b"the old object")
    write_half(fs, path, nbytes)
    fs.invalidate_cache()
    found = fs.cat(path)
    print(f"{name}: {len(found)} bytes of the {'new' if found[:1] == b'n' else 'old'} one")

fs.pipe("bucket/safe", b"the old object")
with contextlib.suppress(Failure), fs.transaction, fs.open("bucket/safe", "wb") as file:
    file.write(b"nnnn")
    raise Failure
fs.invalidate_cache()
print("in a transaction:", fs.cat("bucket/safe").decode())
server.stop()
PYTHON

timeout 120 "$folder/venv/bin/python" "$folder/half.py" >"$folder/out" 2>"$folder/log" || {
    cat "$folder/log" >&2
    exit 1
}
cat "$folder/out"

diff "$folder/out" - <<'SEEN'
small: 4 bytes of the new one
large: 12582912 bytes of the new one
in a transaction: the old object
SEEN
