"""Settings of all tests: property tests have no deadline, and no client asks a cloud for credentials.

Shared memory of the tests is removed at their end.  ``process://name`` is a store that no other process sees.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from reknit.engine.background.background import unread_saves
from reknit.storage.registry import register
from tests.running.examples import VARIABLE
from tests.storage.process_memory import open_process_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = [
    "tests.running.budget",
    "tests.running.lanes",
    "tests.running.elsewhere",
    "tests.running.files",
]

# The number of examples of a property, unless `examples` of tests.running.examples sets another.  By day the
# examples are always the same, so that chance alone never refuses a change; at night they are new.
for profile, num_examples in {"quick": 10, "ci": 50, "nightly": 1000}.items():
    by_day = profile != "nightly"
    settings.register_profile(profile, max_examples=num_examples, deadline=None, derandomize=by_day)
settings.load_profile("ci")

# A client of object stores without credentials asks the machine of the cloud that it believes to run on.
os.environ.setdefault("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")

# A script that starts the tests in the background switches Ctrl-C off for them, and for their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_MEMORY = tempfile.mkdtemp(prefix="reknit-tests-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
os.environ["REKNIT_MEMORY"] = _MEMORY

_MUCH = 100_000
"""The number of objects of which a search for garbage takes long."""

register("process", lambda url, durability: open_process_memory(url))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Set the variable of the profile for processes of tests, and end a lane without a clean-up.

    To take all that a lane has imported apart takes seconds, and nobody needs it.
    """
    os.environ[VARIABLE] = str(settings().max_examples)
    if hasattr(config, "workerinput"):
        atexit.register(_end, os.getpid())


def _end(pid: int) -> None:
    if os.getpid() == pid:  # a forked process has an exit status of its own
        os._exit(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect the tests without searches for garbage, of which an import leaves little.

    All imported and collected objects are excluded from later searches, which would cost every test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude all that was imported and collected from searches for garbage; there is little garbage yet."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Exclude all objects that the tests of a file leave, if many, from later searches for garbage."""
    yield
    if (nextitem is None or nextitem.path != item.path) and len(gc.get_objects(generation=2)) > _MUCH:
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
    """Remove the shared memory of the tests, and forget their failed saves, which nobody has to ask for."""
    unread_saves.reset()
    gc.unfreeze()  # libraries complain of objects that outlive the interpreter
    shutil.rmtree(_MEMORY, ignore_errors=True)
