"""Which tests run side by side?  Whole files, in the processes of ``-n``, while some tests run alone.

A test marked ``alone`` measures, or examines, resources that all processes of the host share.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.running.budget import folder_of
from tests.running.budgets import BUDGETS, Budget
from tests.shared_servers import FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOCKS = pytest.StashKey[str]()

TOGETHER = ("hdfs", "tests/deepspeed", "tests/jax", "tests/megatron")
"""Files with one of these in their paths run one after another: they share a server, or processes."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole files, or several that belong together."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((name for name in TOGETHER if name in file), file)

    config.option.loadscopereorder = False
    return Files(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the slowest folders, so that no process is left with one of them at the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -BUDGETS.get(folder_of(item.nodeid), Budget()).seconds)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test beside those of other processes, or when none of them runs one."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with _room(Path(item.config.workerinput["locks"]), alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the path of the locks of this run to a process."""
    if _LOCKS not in node.config.stash:
        node.config.stash[_LOCKS] = tempfile.mkdtemp(prefix="reknit-lanes-")
    node.workerinput["locks"] = node.config.stash[_LOCKS]


def pytest_configure(config: pytest.Config) -> None:
    """Let the processes of a run share the processes that fork ranks: their imports take seconds."""
    if hasattr(config, "workerinput"):
        os.environ[FOLDER] = config.workerinput["locks"]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the locks."""
    if (locks := config.stash.get(_LOCKS, None)) is not None:
        shutil.rmtree(locks)


@contextmanager
def _room(locks: Path, *, alone: bool) -> Iterator[None]:
    """Share the host with other tests, or have it alone; a test that waits to be alone is not overtaken."""
    with _opened(locks / "door") as door, _opened(locks / "room") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
        fcntl.flock(room, fcntl.LOCK_UN)  # closing is not enough if a process was forked meanwhile


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        yield fd
    finally:
        os.close(fd)
