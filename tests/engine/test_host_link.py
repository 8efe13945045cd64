"""Ranks of one host hand each other memory; strangers who knock get nothing and cost nothing."""

from __future__ import annotations

import os
import queue
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from reknit.engine.sharing.tracker import HostLink
from reknit.errors import CommError
from reknit.processes.shared_memory import SharedMemory
from tests.as_nobody import as_nobody, needs_another_user
from tests.resources import open_files, threads
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

pytestmark = pytest.mark.skipif(not HostLink.available(), reason="this system has no links")
WAIT_S = 20.0


class Ear:
    """A listener that puts all events in a queue."""

    def __init__(self) -> None:
        self.events: queue.Queue[tuple[Any, ...]] = queue.Queue()

    def ready(self, rank: int, number: int, memory: NDArray[np.uint8]) -> None:
        self.events.put(("ready", rank, number, bytes(memory[:5])))

    def taken(self, number: int, rank: int) -> None:
        self.events.put(("taken", number, rank))

    def source_ended(self, rank: int) -> None:
        self.events.put(("source ended", rank))

    def taker_ended(self, rank: int) -> None:
        self.events.put(("taker ended", rank))

    def failed(self, error: BaseException) -> None:
        self.events.put(("failed", type(error), str(error)))

    def next(self) -> tuple[Any, ...]:
        return self.events.get(timeout=WAIT_S)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that each test leaves neither descriptors nor threads."""
    before = open_files(), threads("reknit-host-link")
    yield
    assert open_files() <= before[0]
    assert threads("reknit-host-link") <= before[1]


@pytest.fixture
def ring() -> Iterator[SharedMemory]:
    made = SharedMemory.create(10_000)
    made.bytes[100:105] = list(b"hello")
    yield made
    made.close()


def knock(link: HostLink) -> socket.socket:
    """Return a connection to a link by a stranger, who has sent nothing yet."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(WAIT_S)
    stranger.connect(f"\0reknit-{link.address[:32]}")
    return stranger


def hello(link: HostLink, *, token: bytes | None = None, rank: int = 9, nbytes: int = 10_000) -> bytes:
    return struct.pack("<16sQQ", bytes.fromhex(link.address[32:]) if token is None else token, rank, nbytes)


def works(link: HostLink, ear: Ear, ring: SharedMemory) -> None:
    """Check that a rank can still give its memory to a link."""
    source, other = HostLink(5), Ear()
    source.open(ring, {0: link.address}, other)
    source.ready(0, 77, 100)
    assert ear.next() == ("ready", 5, 77, b"hello")
    link.taken(5, 77)
    assert other.next() == ("taken", 77, 0)
    source.close()
    assert ear.next() == ("source ended", 5)


def test_a_rank_hears_what_is_ready_in_the_memory_of_another_which_hears_when_it_is_taken(
    ring: SharedMemory,
) -> None:
    taker, source, ear, other = HostLink(0), HostLink(1), Ear(), Ear()
    taker.open(None, {}, ear)
    source.open(ring, {0: taker.address}, other)
    for number in range(2_000):  # more than a connection holds at once
        source.ready(0, number, 100)
        if number % 2:
            ring.bytes[100] = ord("j")
    assert [ear.next()[:3] for _ in range(2_000)] == [("ready", 1, n) for n in range(2_000)]
    ring.bytes[100] = ord("c")
    source.ready(0, 2_000, 100)
    assert ear.next() == ("ready", 1, 2_000, b"cello")
    taker.taken(1, 8)
    assert other.next() == ("taken", 8, 0)
    taker.taken(3, 8)  # no event of it has come yet: the call has no receiver
    taker.close()
    assert other.next() == ("taker ended", 0)
    source.ready(0, 9, 100)  # no receiver is left, as the event above reported
    source.close()


def test_a_rank_that_is_gone_is_an_error_and_the_others_hear_of_this_one(ring: SharedMemory) -> None:
    gone, there, ear = HostLink(0), HostLink(2), Ear()
    gone.close()
    there.open(None, {}, ear)
    link = HostLink(1)
    with pytest.raises(CommError, match="rank 0 of this host"):
        link.open(ring, {0: gone.address, 2: there.address}, Ear())
    link.close()
    assert ear.next() == ("source ended", 1)
    there.close()


def fragments(link: HostLink, ring: SharedMemory) -> list[tuple[bytes, list[int]]]:
    """Return the messages of strangers: packets, and the descriptors that come with them."""
    right = hello(link)
    return [
        (b"GET / HTTP/1.1", []),
        (b"x", [ring.fd]),
        (hello(link, token=bytes(16)), [ring.fd]),
        (hello(link, token=bytes(16)), []),
        (hello(link, token=right[:8] + bytes(8)), [ring.fd]),
        (right[:-1], [ring.fd]),
        (bytes(32), [ring.fd] * 3),
        (bytes(5_000), [ring.fd]),
    ]


def test_strangers_who_do_not_know_the_token_are_shown_out_and_nobody_hears_of_them(
    ring: SharedMemory,
) -> None:
    link, ear = HostLink(0), Ear()
    link.open(None, {}, ear)
    for packet, fds in fragments(link, ring):
        with knock(link) as stranger:
            socket.send_fds(stranger, [packet], fds)
            assert stranger.recv(100) == b"", packet
    with knock(link) as stranger:
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(100) == b""
    for _ in range(50):
        knock(link).close()
    works(link, ear, ring)
    link.close()
    assert ear.events.empty()


def test_strangers_who_say_nothing_keep_nobody_waiting(ring: SharedMemory) -> None:
    link, ear = HostLink(0), Ear()
    link.open(None, {}, ear)
    silent = [knock(link) for _ in range(20)]
    works(link, ear, ring)
    # One of them sends a right message after all.
    socket.send_fds(silent[3], [hello(link)], [ring.fd])
    silent[3].send(struct.pack("<QQ", 6, 100))
    assert ear.next() == ("ready", 9, 6, b"hello")
    link.close()
    assert [s.recv(100) for s in silent] == [b""] * 20
    for stranger in silent:
        stranger.close()
    assert ear.events.empty() or ear.next() == ("source ended", 9)


def test_a_process_of_another_user_is_shown_out_though_it_knows_the_token(
    ring: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, ear, own = HostLink(0), Ear(), os.geteuid()
    uids = iter([own + 1])  # to the link, the first connection seems to come from another user
    monkeypatch.setattr(os, "geteuid", lambda: next(uids, own))
    link.open(None, {}, ear)
    with knock(link) as stranger:
        with suppress(OSError):  # the link may close the connection between the two packets
            socket.send_fds(stranger, [hello(link)], [ring.fd])
            stranger.send(struct.pack("<QQ", 6, 100))
        works(link, ear, ring)
    link.close()
    assert ear.events.empty()


def no_memory(link: HostLink, stranger: socket.socket, ring: SharedMemory) -> None:
    stranger.send(hello(link))


def small_memory(link: HostLink, stranger: socket.socket, ring: SharedMemory) -> None:
    socket.send_fds(stranger, [hello(link, nbytes=10_001)], [ring.fd])


def endless_memory(link: HostLink, stranger: socket.socket, ring: SharedMemory) -> None:
    socket.send_fds(stranger, [hello(link, nbytes=(1 << 64) - 1)], [ring.fd])


def no_file(link: HostLink, stranger: socket.socket, ring: SharedMemory) -> None:
    socket.send_fds(stranger, [hello(link)], [stranger.fileno()])


def test_a_rank_of_the_job_whose_memory_cannot_be_used_is_an_error_that_names_it(ring: SharedMemory) -> None:
    for say in one_by_one([no_memory, small_memory, endless_memory, no_file]):
        link, ear = HostLink(0), Ear()
        link.open(None, {}, ear)
        with knock(link) as stranger:
            say(link, stranger, ring)
            what, kind, message = ear.next()
            assert (what, kind) == ("failed", CommError)
            assert "rank 9 of this host" in message
        link.close()


def test_a_rank_that_talks_nonsense_is_heard_to_have_ended(ring: SharedMemory) -> None:
    link, ear = HostLink(0), Ear()
    link.open(None, {}, ear)
    with knock(link) as stranger:
        socket.send_fds(stranger, [hello(link)], [ring.fd])
        stranger.send(b"nonsense")
        assert ear.next() == ("source ended", 9)
    link.close()


def test_a_hearer_that_fails_is_told_that_nothing_more_will_be_heard(ring: SharedMemory) -> None:
    class Deaf(Ear):
        def ready(self, rank: int, number: int, memory: NDArray[np.uint8]) -> None:
            raise KeyError(number)

    link, source, ear = HostLink(0), HostLink(1), Deaf()
    link.open(None, {}, ear)
    source.open(ring, {0: link.address}, Ear())
    source.ready(0, 1, 0)
    assert ear.next() == ("failed", KeyError, "1")
    source.close()
    link.close()


@needs_another_user
def test_another_user_who_knows_the_token_is_shown_out(ring: SharedMemory) -> None:
    link, ear = HostLink(0), Ear()
    link.open(None, {}, ear)

    def knock_and_speak() -> bytes:
        with knock(link) as stranger:
            socket.send_fds(stranger, [hello(link)], [ring.fd])
            stranger.send(struct.pack("<QQ", 6, 100))
            return stranger.recv(100)

    answer = as_nobody(knock_and_speak)
    assert answer == b"" or isinstance(answer, (ConnectionResetError, BrokenPipeError)), answer
    works(link, ear, ring)
    link.close()
    assert ear.events.empty()
