"""Property tests are not timed: a busy machine is no failure.  Nothing asks a cloud for credentials.

What tests leave in shared memory goes with them.  ``process://name`` is a store that no other process sees.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from reknit.storage.registry import register
from tests.storage.process_memory import open_process_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["tests.running.budget", "tests.running.lanes", "tests.running.elsewhere"]

# How many examples a property is tried with, unless `examples` of tests.running.examples says more or less.
# By day they are always the same, so that no change is refused for what only chance brought up; at night they
# are new ones.
for profile, num_examples in {"quick": 10, "ci": 50, "nightly": 1000}.items():
    by_day = profile != "nightly"
    settings.register_profile(profile, max_examples=num_examples, deadline=None, derandomize=by_day)
settings.load_profile("ci")

# A client of object stores without credentials asks the machine that it believes to run on.
os.environ.setdefault("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")

# Whoever starts the tests in the background of a script has them begin with Ctrl-C switched off, and whatever
# they start as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_MEMORY = tempfile.mkdtemp(prefix="reknit-tests-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
os.environ["REKNIT_MEMORY"] = _MEMORY

register("process", lambda url, durability: open_process_memory(url))


def pytest_collection_finish() -> None:
    """Let no search for garbage go through all that has been imported and collected, test after test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Open Chromium where it and playwright are there."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as drivers:
        opened = drivers.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


def pytest_unconfigure() -> None:
    """Remove what is left in the memory of the tests."""
    gc.unfreeze()  # libraries complain of objects that outlive the interpreter
    shutil.rmtree(_MEMORY, ignore_errors=True)
