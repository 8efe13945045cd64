"""Messages of any size between two processes arrive, and block neither of them."""

from __future__ import annotations

import gc
import os
import resource
import socket
import struct
from typing import TYPE_CHECKING

import msgspec
import pytest

from reknit.processes.channel import Channel, Message
from reknit.system import socket_pair
from tests.resources import open_files

if TYPE_CHECKING:
    from collections.abc import Iterator


class Text(Message):
    """A message with a text."""

    text: str


class Number(Message):
    """A message with a number."""

    number: int


decode = msgspec.msgpack.Decoder(Text | Number).decode
LARGE = "x" * 40_000


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket_pair()
    with ours, theirs:
        yield Channel(ours, decode, send_timeout_s=1.0), Channel(theirs, decode)


def received(end: Channel) -> tuple[Message, int | None]:
    got = end.receive()
    assert got is not None
    return got.message, got.fd


def test_large_messages_wait_for_nobody_to_read_them(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    sent = [Text("x" * nbytes) for nbytes in (4 << 20, 10, 40_000, 8 << 20)]
    for message in sent:
        ours.send(message)
    before = open_files()
    assert [received(theirs) for _ in sent] == [(message, None) for message in sent]
    assert open_files() <= before, "their channel is closed"


@pytest.mark.parametrize("text", ["", "x" * 30_000, LARGE])
def test_a_descriptor_comes_with_its_message_and_stays_open_at_the_sender(
    ends: tuple[Channel, Channel], text: str
) -> None:
    ours, theirs = ends
    end, other = os.pipe()
    ours.send(Number(1))
    ours.send(Text(text), other)
    ours.send(Number(2))
    assert received(theirs) == (Number(1), None)
    before = open_files()
    message, fd = received(theirs)
    assert message == Text(text)
    assert fd is not None
    assert not os.get_inheritable(fd)
    os.write(fd, b"a")
    os.write(other, b"b")
    assert os.read(end, 2) == b"ab"
    for each in (fd, end, other):
        os.close(each)
    assert open_files() <= before
    assert received(theirs) == (Number(2), None)


def test_large_messages_with_descriptors_wait_for_nobody_either(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    for _ in range(20):
        ours.send(Text(LARGE), 0)
    for _ in range(20):
        message, fd = received(theirs)
        assert message == Text(LARGE)
        assert fd is not None
        os.close(fd)


def test_a_closed_end_is_noticed(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    assert not theirs.wait(0.0)
    ours.send(Number(1))
    ours.close()
    assert theirs.wait(1.0)
    assert received(theirs) == (Number(1), None)
    assert theirs.wait(1.0)
    assert theirs.receive() is None
    with pytest.raises(OSError, match="Broken pipe"):
        theirs.send(Number(2))


def test_a_receiver_that_reads_nothing_ends_the_channel_after_the_timeout(
    ends: tuple[Channel, Channel],
) -> None:
    ours, theirs = ends

    def send_on() -> None:
        while True:
            ours.send(Text("x" * 30_000))

    with pytest.raises(OSError, match="temporarily unavailable"):
        send_on()
    while theirs.receive() is not None:
        pass


def test_a_lost_descriptor_is_an_error_and_the_others_are_closed(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.send(Text(LARGE), 0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # files that earlier tests left would be closed at any moment, and leave room for both
    first = os.dup(0)
    os.close(first)
    before = open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + 1, limits[1]))
    try:
        with pytest.raises(OSError, match="without its descriptor: too many files are open"):
            theirs.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert open_files() <= before


def test_a_message_larger_than_any_that_is_sent_is_refused() -> None:
    for nbytes in (40_000, 1 << 62):
        ours, theirs = socket_pair()
        with ours, theirs:
            ours.sendall(struct.pack("<QI", nbytes, 0))
            with pytest.raises(OSError, match=f"a message of {nbytes} bytes"):
                Channel(theirs, decode).receive()


def test_a_file_that_is_smaller_than_its_message_is_refused() -> None:
    ours, theirs = socket_pair()
    with ours, theirs, open(__file__, "rb") as file:
        socket.send_fds(ours, [struct.pack("<QI", 1 << 62, 2)], [file.fileno()])
        before = open_files()
        with pytest.raises(OSError, match="in a file of"):
            Channel(theirs, decode).receive()
        assert open_files() <= before
