"""Property tests are not timed: a busy machine is no failure.  Nothing asks a cloud for credentials.

What tests leave in shared memory goes with them.  ``process://name`` is a store that no other process sees.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

from hypothesis import settings

from reknit.storage.registry import register
from tests.storage.process_memory import open_process_memory

pytest_plugins = ["tests.running.budget", "tests.running.lanes"]

# How many examples a property is tried with, unless `examples` of tests.running.examples says more or less.
for profile, num_examples in {"quick": 10, "ci": 50, "nightly": 1000}.items():
    settings.register_profile(profile, max_examples=num_examples, deadline=None)
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


def pytest_unconfigure() -> None:
    """Remove what is left in the memory of the tests."""
    shutil.rmtree(_MEMORY, ignore_errors=True)
