"""Groups to test with: several ranks in this process, joined by threads or by real gRPC."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from reknit.comm.tree import TreeGroup
from reknit.errors import ReknitError
from reknit.options import CommOptions
from reknit.testing.world import MemoryStore, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reknit.comm.base import Group
    from reknit.comm.rendezvous import Store


class Join(Protocol):
    """Makes the groups of a world of some size; the fixture `join` closes them."""

    def __call__(self, size: int) -> Sequence[Group]: ...


def join_tree(
    size: int, fan_out: int = 2, store: Store | None = None, job: str = "job", **options: Any
) -> list[TreeGroup]:
    """Return the groups of ranks that reach each other by gRPC on this host."""
    shared = store or MemoryStore()
    chosen = CommOptions(fan_out=fan_out, bind="127.0.0.1", connect_timeout_s=30, **options)
    with ThreadPoolExecutor(size) as pool:
        ranks = range(size)
        return list(pool.map(lambda rank: TreeGroup.join(shared, rank, size, job=job, options=chosen), ranks))


@contextmanager
def tree_world(
    size: int, fan_out: int = 2, store: Store | None = None, job: str = "job", **options: Any
) -> Iterator[list[TreeGroup]]:
    """Join the ranks of a tree, and close them all at the end."""
    groups = join_tree(size, fan_out, store, job, **options)
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


def endings(groups: Sequence[Group], fn: Callable[[Group], Any]) -> list[Any]:
    """Run `fn` as every rank, and return each rank's result, or the error that it raised."""

    def run(group: Group) -> Any:
        try:
            return fn(group)
        except (ReknitError, KeyboardInterrupt, LookupError) as error:
            return error

    return run_ranks(len(groups), run, groups=groups, timeout_s=40)


def ask(group: Group, name: str = "ask", request: bytes = b"", timeout_s: float = 30) -> bytes:
    """Hold a round in which every rank is told its own request."""
    return group.exchange(name, request, lambda requests: requests, timeout_s)
