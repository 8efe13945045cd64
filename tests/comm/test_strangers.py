"""Strangers who connect to a rank without its token: scans, noise, other protocols, and silence."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil
import pytest

from reknit.comm.group import barrier
from reknit.testing.world import run_ranks
from tests.comm.worlds import ask, endings, tree_world

if TYPE_CHECKING:
    from reknit.comm.group import Group
    from reknit.comm.tree.tree_group import TreeGroup

pytestmark = pytest.mark.usefixtures("over_grpc")

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of every connection of HTTP/2."""

NOISE = {
    "nothing": b"",
    "noise": os.urandom(4096),
    "another protocol": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "a handshake of TLS": bytes.fromhex("16030100a5010000a10303") + bytes(160),
    "a frame that claims 16 MiB": PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(4096),
    "frames of no known kind": PREFACE + b"\x00\x00\x00\xfe\x00\x00\x00\x00\x00" * 1000,
    "headers that never end": PREFACE
    + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    + b"\x00\x00\x01\x01\x00\x00\x00\x00\x01\x88" * 1000,
}


def port(group: TreeGroup) -> tuple[str, int]:
    """Return the address of the server of a rank."""
    host, _, number = group.address.split()[0].rpartition(":")
    return host, int(number)


def hung_up(stranger: socket.socket, noise: bytes) -> bool:
    """Send some bytes and no more; return whether the server then ends the connection in time."""
    try:
        stranger.sendall(noise)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True  # so soon that not all could be sent
    return True


def test_bytes_that_are_no_call_change_nothing() -> None:
    with tree_world(2) as groups:
        assert endings(groups, ask) == [b"", b""]
        for kind, noise in NOISE.items():
            for _ in range(5):
                with socket.create_connection(port(groups[0]), timeout=30) as stranger:
                    assert hung_up(stranger, noise), kind
            assert endings(groups, ask) == [b"", b""], kind
            assert not groups[0].broken, kind


def test_a_scan_of_the_port_costs_nothing_that_stays() -> None:
    with tree_world(2) as groups:
        assert endings(groups, ask) == [b"", b""]
        process = psutil.Process()
        threads = process.num_threads()
        for _ in range(200):
            socket.create_connection(port(groups[0]), timeout=30).close()
        with ExitStack() as open_ones:
            for _ in range(100):  # and some that stay, and send nothing
                open_ones.enter_context(socket.create_connection(port(groups[0]), timeout=30))
            assert endings(groups, ask) == [b"", b""]
            assert process.num_threads() <= threads + 30, "one for each connection would be a hundred"
        assert endings(groups, ask) == [b"", b""]


def test_a_job_of_which_somebody_knows_all_ports_goes_on_meanwhile() -> None:
    with tree_world(7) as groups:
        places = [port(group) for group in groups if group.address]

        def work(group: Group) -> None:
            for number in range(20):
                barrier(group, f"round {number}", 30)
                if group.rank == 6:
                    for place in places:
                        with socket.create_connection(place, timeout=30) as stranger:
                            stranger.sendall(NOISE["noise"])

        run_ranks(7, work, groups=groups, timeout_s=60)
        assert not any(group.broken for group in groups)
