"""Work with other processes of this host: messages over a pair of sockets, and memory that both ends map."""

from __future__ import annotations

import subprocess
import sys

from reknit.environment import agent_environment
from reknit.errors import typed_known
from reknit.system import output_of_child


def start_child(
    module: str, fd: int, *arguments: str, stdout: int | None, new_session: bool = False
) -> subprocess.Popen[bytes]:
    """Run a module in a new process, which inherits a descriptor; its number comes first in the arguments.

    It finds modules in the same places as this process, and its errors go to the errors of this process.
    Raises `ShortageError` where there may be no more processes, `OSError`.
    """
    with typed_known():
        return subprocess.Popen(
            [sys.executable, "-m", module, str(fd), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=output_of_child(2),
            pass_fds=[fd],
            start_new_session=new_session,
            env=agent_environment(sys.path),
        )
