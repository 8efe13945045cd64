"""What a trainer and its agent say to each other arrives, however large, and holds up nobody."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from reknit.engine.background import channel as say
from reknit.system import socket_pair

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[tuple[say.Channel, say.Channel]]:
    ours, theirs = socket_pair()
    with ours, theirs:
        yield say.Channel(ours, send_timeout_s=1.0), say.Channel(theirs)


def test_large_messages_wait_for_nobody_to_read_them(ends: tuple[say.Channel, say.Channel]) -> None:
    ours, theirs = ends
    sent = [
        say.Abandon(number, unbegun=False, error={"message": "x" * nbytes}, timeout_s=1.0)
        for number, nbytes in enumerate((4 << 20, 10, 40_000, 8 << 20))
    ]
    for message in sent:
        ours.send(message)
    before = set(os.listdir("/proc/self/fd"))
    received = [theirs.receive() for _ in sent]
    assert [None if each is None else each.message for each in received] == sent
    assert [None if each is None else each.fd for each in received] == [None] * len(sent)
    assert set(os.listdir("/proc/self/fd")) <= before, "what they lay in is closed"
