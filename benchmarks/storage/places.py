"""The places where the benchmark puts its files, and the settings by which a process reaches them."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from pathlib import Path

import pytest

from reknit.storage.registry import open_storage
from tests.servers import environment, new_url, server

PLACES = ("local", "mem", "s3", "gcs", "azure", "hdfs")


def folder(place: str) -> str | None:
    """Return a new folder, None if the server is not up."""
    if place == "local":
        return tempfile.mkdtemp(prefix="reknit-bench-", dir=os.environ.get("REKNIT_BENCH_DIR"))
    unique = f"bench-{uuid.uuid4().hex[:12]}"
    if place == "mem":
        return f"mem://{unique}"
    try:
        return f"{server('hdfs')['endpoint']}/{unique}" if place == "hdfs" else new_url(place)
    except pytest.skip.Exception:
        return None


def prepare(place: str) -> None:
    """Set the variables by which this process reaches the server."""
    if place in ("s3", "gcs", "azure"):
        os.environ.update(environment(place))


def clear(place: str, url: str) -> None:
    """Remove the files that remain in a folder of this machine."""
    if place == "local":
        shutil.rmtree(url, ignore_errors=True)
    if place == "mem":
        for file in open_storage(url).list():
            open_storage(url).delete(file.path)
        shutil.rmtree(shared(url), ignore_errors=True)


def shared(url: str) -> Path:
    """Return the folder in shared memory that raw clients use in place of one of ``mem://``."""
    return Path("/dev/shm", f"raw-{url.partition('://')[2]}")
