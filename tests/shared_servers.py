"""The process that forks the ranks, one for all processes in which tests run side by side.

The imports of such a process take seconds.  The first process that needs a module of `tests.warm` starts it.
It listens on a socket, and for each process that connects it forks another one, which has that process's
variables and output, and forks its ranks.  Or the fork imports another module, and listens as well.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import select
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from subprocess import Popen

FOLDER = "REKNIT_TEST_SERVERS"
"""The variable with the folder of the sockets; without it, each process has servers of its own."""

_BACKLOG = 64


class ForkedServer:
    """A process that forks ranks for this one; it has the calls of `Popen` that `tests.ranks` needs."""

    def __init__(
        self,
        connection: socket.socket,
        variables: dict[str, str],
        listener: int | None = None,
        warm: str = "",
    ) -> None:
        self.stdin: BinaryIO = connection.makefile("wb")
        self.stdout: BinaryIO = connection.makefile("rb")
        socket.send_fds(connection, [b"e"], [2] if listener is None else [2, listener])
        pickle.dump((variables, warm), self.stdin)
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


def _socket_of(folder: str, key: tuple[str, Path | None]) -> str:
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:12]
    return os.path.join(folder, f"{key[0]}-{name}")


def grown(
    folder: str, key: tuple[str, Path | None], variables: dict[str, str], warm: str, listener: int
) -> ForkedServer | None:
    """Return a process that forks ranks for all, forked from that of `key`, which has half of its imports.

    None if that one has ended, or does so now.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(_socket_of(folder, key))
        return ForkedServer(connection, variables, listener, warm)
    except (OSError, EOFError):
        connection.close()
        return None


def connected(
    folder: str,
    key: tuple[str, Path | None],
    variables: dict[str, str],
    start: Callable[[int], Popen[bytes] | ForkedServer],
) -> tuple[ForkedServer, Popen[bytes] | ForkedServer | None]:
    """Return a process that forks ranks, and the server that was started for it with a listening socket.

    The server is None where there was one.
    """
    path = _socket_of(folder, key)
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
    descriptor: int,
    starter: TextIO | socket.socket,
    warm: str,
    imports: Callable[[str], None],
    serve: Callable[[BinaryIO, BinaryIO], None],
) -> None:
    """Import, and fork a process for each connection, in which `serve` forks ranks until the tests end.

    `starter` can be read from once the process that started this one has ended.
    """
    before = dict(os.environ)
    imports(warm)
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    listener = socket.socket(fileno=descriptor)
    while True:
        if listener not in select.select([listener, starter], [], [])[0]:
            return
        connection, _ = listener.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()  # who connects after the end of the server is refused, and starts another
            source, answers, warm, own = _adopted(connection, changed)
            if own is None:
                serve(source, answers)
            else:
                serve_all(own, connection, warm, imports, serve)
            os._exit(0)
        connection.close()


def _adopted(
    connection: socket.socket, changed: dict[str, str]
) -> tuple[BinaryIO, BinaryIO, str, int | None]:
    """Take over the output and the variables of the process that connected; return streams from and to it.

    The module and the listening socket of a process that is to serve all are there, too.
    """
    _, (output, *listeners), _, _ = socket.recv_fds(connection, 1, 2)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    source, answers = connection.makefile("rb"), connection.makefile("wb")
    variables, warm = pickle.load(source)
    os.environ.clear()
    os.environ.update(variables | changed)
    pickle.dump(os.getpid(), answers)
    answers.flush()
    return source, answers, warm, next(iter(listeners), None)
