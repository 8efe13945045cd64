"""Property tests are not timed: a busy machine is no failure.  Nothing asks a cloud for credentials."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A client of object stores without credentials asks the machine that it believes to run on.
os.environ.setdefault("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
