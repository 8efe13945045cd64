"""Hosts of one machine: network namespaces whose packets pass through a switch that delays and drops.

Each host is a namespace with one TAP device, and the switch is a thread of this process.  TCP and its
retransmissions are real, and the delay and the loss of the wire are chosen.  Needs root and /dev/net/tun,
but no queueing discipline of the kernel.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x1002
_DEVICE = "wire0"
_LONGEST_FRAME = 65_536


def why_not() -> str | None:
    """Return the reason if this machine cannot make hosts, else None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces are made with ip, of iproute2, which is not installed"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun cannot be opened: {error.strerror}"
    made = subprocess.run(["ip", "netns", "add", name := f"probe-{os.getpid()}"], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return "network namespaces cannot be made here" if made.returncode else None


class Wire:
    """A number of hosts, and the switch between them.

    `delay_s` is the time that a frame takes from host to host, `loss` the part of all frames that are lost.
    """

    def __init__(self, hosts: int, *, delay_s: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        """Set the properties; `with` makes the hosts."""
        self.hosts, self.delay_s, self.loss = hosts, delay_s, loss
        self.forwarded = self.dropped = 0
        self._names = [f"wire-{os.getpid()}-{host}" for host in range(hosts)]
        self._random = random.Random(seed)
        self._cut: set[int] = set()
        self._taps: list[int] = []
        self._ended = threading.Event()
        self._switch = threading.Thread(target=self._run, name="wire", daemon=True)

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host."""
        return f"10.99.0.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on a host."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def cut(self, host: int) -> None:
        """Unplug a host: drop all its frames from now on, without a signal to anybody."""
        self._cut.add(host)

    def mend(self, host: int) -> None:
        """Plug a host in again."""
        self._cut.discard(host)

    def __enter__(self) -> Wire:
        """Make the hosts."""
        try:
            for host, name in enumerate(self._names):
                self._taps.append(_tap(name, f"02:00:00:00:00:{host + 1:02x}", self.address(host)))
        except BaseException:
            self._remove()
            raise
        self._switch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the hosts; their processes must have ended."""
        self._ended.set()
        self._switch.join()
        self._remove()

    def _remove(self) -> None:
        for tap in self._taps:
            os.close(tap)
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _run(self) -> None:
        on_the_way: list[tuple[float, int, int, bytes]] = []
        number = 0
        while not self._ended.is_set():
            wait_s = min(0.05, max(0.0, on_the_way[0][0] - time.monotonic())) if on_the_way else 0.05
            ready, _, _ = select.select(self._taps, [], [], wait_s)
            now = time.monotonic()
            for tap in ready:
                frame = os.read(tap, _LONGEST_FRAME)
                for host in self._receivers(self._taps.index(tap), frame):
                    if self._random.random() < self.loss:
                        self.dropped += 1
                        continue
                    number += 1
                    heapq.heappush(on_the_way, (now + self.delay_s, number, host, frame))
            while on_the_way and on_the_way[0][0] <= now:
                _, _, host, frame = heapq.heappop(on_the_way)
                if host not in self._cut:
                    self.forwarded += 1
                    os.write(self._taps[host], frame)

    def _receivers(self, sender: int, frame: bytes) -> list[int]:
        """Return the hosts that a frame is for: the last byte of a host's MAC address is its number."""
        if sender in self._cut:
            return []
        if frame[0] & 1:  # to all
            return [host for host in range(len(self._taps)) if host != sender]
        host = frame[5] - 1
        return [host] if 0 <= host < len(self._taps) and host != sender else []


def _tap(name: str, mac: str, address: str) -> int:
    """Make a namespace with one device, and return the descriptor on which its frames come and go."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    made = f"w{os.getpid()}-{mac[-2:]}"  # unique until it is in its namespace
    try:
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", made.encode(), _TAP_WITHOUT_HEADER))
        inside = ("ip", "-n", name)
        for command in (
            ("ip", "netns", "add", name),
            ("ip", "link", "set", made, "netns", name),
            (*inside, "link", "set", made, "name", _DEVICE, "address", mac),
            (*inside, "addr", "add", f"{address}/24", "dev", _DEVICE),
            (*inside, "link", "set", _DEVICE, "up"),
            (*inside, "link", "set", "lo", "up"),
        ):
            subprocess.run(command, check=True, capture_output=True)
    except BaseException:
        os.close(tap)
        raise
    return tap
