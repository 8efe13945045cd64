"""Where the benchmark puts its files, and what a process has to know to get there."""

from __future__ import annotations

import os
import tempfile

import pytest

from tests.servers import environment, new_url

PLACES = ("local", "s3", "gcs", "azure")


def folder(place: str) -> str | None:
    """Return a folder that is new; None where the server is not up."""
    if place == "local":
        return tempfile.mkdtemp(prefix="reknit-bench-", dir=os.environ.get("REKNIT_BENCH_DIR"))
    try:
        return new_url(place)
    except pytest.skip.Exception:
        return None


def prepare(place: str) -> None:
    """Set the variables by which this process reaches the server."""
    if place != "local":
        os.environ.update(environment(place))
