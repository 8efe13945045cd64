"""A client that gets no socket is a shortage of this process, not an unreachable store."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("obstore", reason="the object stores need obstore")

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


@pytest.mark.parametrize("name", ["s3", "azure", "gcs"])
def test_too_few_open_files_are_a_shortage_and_not_retried(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, new_url(name)],
        env={**os.environ, **environment(name)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["no further file can be opened: [Errno 24] Too many open files"] * 2
