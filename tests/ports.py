"""Ports on which processes of a test will listen."""

from __future__ import annotations

import errno
import random
import socket

_PORTS = range(10_000, 20_000)
"""Below those that the kernel gives to connections, and beside those of the servers."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of loopback that nobody uses; no connection gets it before it is listened on.

    Raises `OSError` where there is no such loopback.
    """
    draw = random.SystemRandom()  # Hypothesis gives every test the same numbers of the other
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        try:
            with socket.create_server((host, port := draw.choice(_PORTS)), family=family):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # such as a machine without IPv6
                raise
