"""Groups to test with: several ranks in this process, joined by threads, by sockets, or by real gRPC."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from reknit.comm.group import Call, Topology, turn
from reknit.comm.tree.tree_group import TreeGroup
from reknit.errors import ReknitError
from reknit.options import CommOptions
from reknit.testing.world import run_ranks
from tests.comm.memory_store import MemoryStore
from tests.resources import open_files, threads

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence

    from reknit.comm.group import Group
    from reknit.comm.meeting.rendezvous import Store


GENERATION = 7

BIND = "unix"
"""Where ranks listen: at sockets of this host, or with an IP address by gRPC, as tests of it set."""


class Join(Protocol):
    """A function that makes the groups of a world of some size; the fixture `join` closes them."""

    def __call__(self, size: int) -> Sequence[Group]: ...


def join_tree(
    size: int, fan_out: int = 2, store: Store | None = None, job: str = "job", **options: Any
) -> list[TreeGroup]:
    """Return the groups of ranks that reach each other on this host."""
    shared = store or MemoryStore()
    chosen = CommOptions(fan_out=fan_out, bind=BIND, connect_timeout_s=30, **options)
    with ThreadPoolExecutor(size) as pool:
        ranks = range(size)
        return list(pool.map(lambda rank: TreeGroup.join(shared, rank, size, job=job, options=chosen), ranks))


def listen_all(
    size: int, fan_out: int = 2, job: str = "job", connect_timeout_s: float = 30
) -> list[TreeGroup]:
    """Return the ports of ranks that share no store."""
    options = CommOptions(bind=BIND, connect_timeout_s=connect_timeout_s)
    topology = Topology([0] * size, fan_out)
    return [
        TreeGroup(rank, topology, job=job, generation=GENERATION, options=options) for rank in range(size)
    ]


def connect_rank(ports: Sequence[TreeGroup], rank: int) -> TreeGroup:
    """Join one of the ranks that took `ports`, with the address of the rank above it."""
    above = ports[rank].above
    ports[rank].connect_parent("" if above is None else ports[above].address)
    return ports[rank]


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
    """Hold a round in which every rank receives its own request."""
    return exchange(group, Call(name, request, timeout_s), lambda requests: requests)


def exchange(group: Group, call: Call, decide: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
    """Hold a round of a backend itself, and return this rank's answer."""
    try:
        requests = group.gather(call)
        answer: bytes = group.give(None if requests is None else decide(requests))
    except BaseException as error:
        group.leave(call, error)
        raise
    return answer


@dataclass(frozen=True)
class Resources:
    """The threads and open files of this process at one moment, to be compared with later ones."""

    threads: set[threading.Thread] = field(default_factory=threads)
    files: set[str] = field(default_factory=open_files)

    def new_threads(self) -> set[threading.Thread]:
        """Return the threads that began since, once none is left or after a long while."""
        return settled(lambda: threads() - self.threads)

    def new_files(self) -> set[str]:
        """Return the files that were opened since, once none is left or after a long while."""
        return settled(lambda: open_files() - self.files)


def settled(found: Callable[[], set[Any]]) -> set[Any]:
    """Wait a long while for `found` to be empty, and return its last result."""
    for _ in range(200):
        if not found():
            break
        time.sleep(0.05)
    return found()


def held_round(
    group: Group,
    name: str,
    produce: Callable[[], bytes],
    decide: Callable[[list[bytes]], Sequence[bytes]],
    timeout_s: float,
    *,
    merge: Callable[[Sequence[bytes]], bytes] | None = None,
    subject: str = "",
) -> bytes:
    with turn(group, name, timeout_s, merge=merge, subject=subject) as its_turn:
        requests = its_turn.gather(produce())
        return its_turn.give(None if requests is None else decide(requests), bytes)
