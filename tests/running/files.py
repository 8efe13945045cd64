"""Where are the files of a test?  On a disk, or in shared memory for folders with thousands of small saves.

By default a save waits for the disk a dozen times.  That is right for tests of stores and of faults, and for
one test of each kind.  In others these waits would be half of their time.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.running.budget import folder_of

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_MEMORY = ("cli", "engine", "monitor", "runs", "simulation", "world")
_MEMORY = "/dev/shm"


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return an empty folder of a test."""
    if folder_of(request.node.nodeid) not in IN_MEMORY or not os.path.isdir(_MEMORY):
        yield tmp_path
        return
    prefix = f"{tmp_path.name}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=_MEMORY, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
