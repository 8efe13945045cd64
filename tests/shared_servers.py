"""The process that forks the ranks, one for all processes in which tests run side by side.

The imports of such a process take seconds.  The first process that needs a module of `tests.warm` starts it.
It listens on a socket, and for each process that connects it forks another one, which has that process's
variables and output, and forks its ranks.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from subprocess import Popen

FOLDER = "REKNIT_TEST_SERVERS"
"""The variable with the folder of the sockets; without it, each process has servers of its own."""

_BACKLOG = 64


class ForkedServer:
    """A process that forks ranks for this one; it has the calls of `Popen` that `tests.ranks` needs."""

    def __init__(self, connection: socket.socket, variables: dict[str, str]) -> None:
        self.stdin: BinaryIO = connection.makefile("wb")
        self.stdout: BinaryIO = connection.makefile("rb")
        socket.send_fds(connection, [b"e"], [2])
        pickle.dump(variables, self.stdin)
        self.stdin.flush()
        self.pid: int = pickle.load(self.stdout)
        self._connection = connection
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return None until it was killed."""
        return self._status

    def kill(self) -> None:
        """Kill the process, whose ranks die with it."""
        if self._status is None:
            self._status = -signal.SIGKILL
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def communicate(self) -> None:
        """Close the connection."""
        for stream in (self.stdin, self.stdout, self._connection):
            with suppress(OSError):
                stream.close()


def connected(
    folder: str, key: tuple[str, Path | None], variables: dict[str, str], start: Callable[[int], Popen[bytes]]
) -> tuple[ForkedServer, Popen[bytes] | None]:
    """Return a process that forks ranks, and the server that was started for it with a listening socket.

    The server is None where there was one.
    """
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:12]
    path = os.path.join(folder, f"{key[0]}-{name}")
    started = None
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):  # the process that had started it has ended
            with suppress(FileNotFoundError):
                os.unlink(path)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen(_BACKLOG)
                started = start(listener.fileno())
            connection.connect(path)
    return ForkedServer(connection, variables), started


# In the server.


def serve_all(
    descriptor: int, imports: Callable[[], None], serve: Callable[[BinaryIO, BinaryIO], None]
) -> None:
    """Import, and fork a process for each connection, in which `serve` forks ranks until the tests end."""
    before = dict(os.environ)
    imports()
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    listener = socket.socket(fileno=descriptor)
    while True:
        if listener not in select.select([listener, sys.stdin], [], [])[0]:
            return  # the process that started this one has ended
        connection, _ = listener.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()  # who connects after the end of the server is refused, and starts another
            serve(*_adopted(connection, changed))
            os._exit(0)
        connection.close()


def _adopted(connection: socket.socket, changed: dict[str, str]) -> tuple[BinaryIO, BinaryIO]:
    """Take over the output and the variables of the process that connected; return streams from and to it."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    for stream in (1, 2):
        os.dup2(descriptors[0], stream)
    os.close(descriptors[0])
    source, answers = connection.makefile("rb"), connection.makefile("wb")
    variables: dict[str, Any] = pickle.load(source)
    os.environ.clear()
    os.environ.update(variables | changed)
    pickle.dump(os.getpid(), answers)
    answers.flush()
    return source, answers
