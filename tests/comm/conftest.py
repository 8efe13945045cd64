"""All backends, for every test of their common behaviour."""

from __future__ import annotations

import logging
import queue
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from reknit.comm.tree.thread_group import thread_groups
from tests.comm import worlds
from tests.comm.worlds import join_tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.comm.group import Group
    from tests.comm.worlds import Join


class Notices(logging.Handler):
    """The warnings that ranks log, each as soon as it is there."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text of a warning."""
        self._texts.put(record.getMessage())

    def next(self) -> str:
        """Return the next warning, waiting for it."""
        return self._texts.get(timeout=30)

    @property
    def rest(self) -> list[str]:
        """The warnings that `next` has not returned yet."""
        return list(self._texts.queue)


@pytest.fixture
def notices() -> Iterator[Notices]:
    """The warnings of comm, which this test expects."""
    log, handler = logging.getLogger("reknit.comm"), Notices()
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


@pytest.fixture(params=["unix", "127.0.0.1"], ids=["sockets", "grpc"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let ranks reach each other in both ways, one after the other."""
    bind: str = request.param
    monkeypatch.setattr(worlds, "BIND", bind)
    return bind


@pytest.fixture
def over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks reach each other by gRPC only."""
    monkeypatch.setattr(worlds, "BIND", "127.0.0.1")


@pytest.fixture(params=["threads", "tree-2", "grpc-2"])
def join(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    kind, _, fan_out = request.param.partition("-")
    if kind == "grpc":
        monkeypatch.setattr(worlds, "BIND", "127.0.0.1")
    with ExitStack() as stack:

        def make(size: int) -> Sequence[Group]:
            groups = thread_groups(size) if kind == "threads" else join_tree(size, int(fan_out))
            for group in groups:
                stack.callback(group.close)
            return groups

        yield make
