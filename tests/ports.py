"""Ports on which processes of a test will listen."""

from __future__ import annotations

import errno
import random
import socket

_PORTS = range(10_000, 20_000)
"""Ports below the range that the kernel gives to connections, without the ports of the servers."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return an unused port of loopback, which no connection takes before a process listens on it.

    Raises `OSError` where the machine does not have this loopback.
    """
    draw = random.SystemRandom()  # Hypothesis seeds the global generator alike for every test
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        try:
            with socket.create_server((host, port := draw.choice(_PORTS)), family=family):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # such as a machine without IPv6
                raise
