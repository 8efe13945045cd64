"""A client that gets no socket is a shortage of this process, not an unreachable store."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("obstore", reason="the object stores need obstore")

from obstore import exceptions

from reknit.errors import StorageUnavailableError
from reknit.events.phase import now
from reknit.storage.object import upload
from reknit.storage.object.client import ObjectOptions, as_ours, connect, parse_url
from tests.servers import environment, new_url

SCRIPT = """
import os, resource, sys
from reknit.errors import ShortageError
from reknit.storage.registry import open_storage
url = sys.argv[1]
open_storage(url).put("there", b"1", if_absent=False)  # now its threads run
storage = open_storage(url)
had = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, had[1]))  # whatever is closed meanwhile makes room for nothing
for ask in (lambda: storage.put("x", b"1", if_absent=False), lambda: storage.get("there", limit=1)):
    try:
        ask()
    except ShortageError as error:
        os.write(1, error.message.encode() + b"\\n")
resource.setrlimit(resource.RLIMIT_NOFILE, had)
assert storage.get("there", limit=1) == b"1"
"""


def test_too_few_open_files_are_a_shortage_and_not_retried() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, new_url("s3")],
        env={**os.environ, **environment("s3")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["no further file can be opened: [Errno 24] Too many open files"] * 2


def failed(status: str) -> Exception:
    return exceptions.GenericError(f"Server returned non-2xx status code: {status} : ")


def test_the_time_of_a_bucket_that_takes_no_object_is_that_of_this_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = parse_url("s3://bucket/folder")[0]
    for status in ("403 Forbidden", "507 Insufficient Storage"):

        def refused(*_: object, status: str = status) -> float:
            raise failed(status)

        monkeypatch.setattr(upload, "moment_of", refused)
        before = now()
        assert before <= upload.moment(connect(place, ObjectOptions(region="r")), place) <= now()


def test_a_failure_of_the_server_may_pass() -> None:
    for status in ("500", "502", "503", "504"):
        assert isinstance(as_ours("write", "s3://b/x", failed(status)), StorageUnavailableError)
