"""What the operating system gives a process or refuses (memory, quiet descriptors), and its last actions."""

from __future__ import annotations

import atexit
import fcntl
import gc
import mmap
import os
import socket
import subprocess
import tempfile
import threading
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, NamedTuple

from reknit.errors import ShortageError, shortage, typed_shortage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_STANDARD = 3  # input, output and error have the numbers below this

_THREAD_NBYTES = 16 << 20
"""What a thread may take before its first line: a stack, and what allocators set apart for it."""


class _Collector:
    """The garbage collector of this process: who keeps it from running, and whether it ran before."""

    lock = threading.Lock()
    pauses = 0
    ran = False


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector of this process from running meanwhile; blocks may overlap and nest.

    A job has millions of objects, and a save or a load makes many more, all of which it needs: to look
    through them again and again takes longer than all the rest.  What nobody refers to goes as always; only
    objects that refer to each other in a circle stay until the end.
    """
    with _Collector.lock:
        if not _Collector.pauses:
            _Collector.ran = gc.isenabled()
            gc.disable()
        _Collector.pauses += 1
    try:
        yield
    finally:
        with _Collector.lock:
            _Collector.pauses -= 1
            if not _Collector.pauses and _Collector.ran:
                gc.enable()


def require_memory(nbytes: int) -> None:
    """Raise `ShortageError` unless this process could have so many more bytes now; it takes none of them.

    For what answers a refusal by ending the process, as libraries in C++ do, or by never coming back, as
    Python's own start of a thread.
    """
    try:
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, OverflowError, MemoryError) as error:
        raise shortage(error) or ShortageError(f"there is too little memory: {error}") from error


def start_thread(name: str, work: Callable[[], object]) -> threading.Thread:
    """Run `work` in a thread that never keeps the interpreter from ending.  Raises `ShortageError`."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    start(thread)
    return thread


def start(thread: threading.Thread) -> None:
    """Start a thread.  Raises `ShortageError` where there may be no more, or there is too little memory.

    If memory runs out before the first line of a thread, Python would wait for that line for ever.
    """
    require_memory(_THREAD_NBYTES)
    with typed_shortage():
        thread.start()


def aside(fd: int) -> int:
    """Return a descriptor that nobody takes for standard input, output or error, in the place of this one.

    A process may have those closed, as daemons do.  Then what is opened next gets their numbers, and what
    anybody prints gets into it.
    """
    if fd >= _STANDARD:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _STANDARD)
    finally:
        os.close(fd)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends; either may be handed to a new process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return socket.socket(fileno=aside(ours.detach())), socket.socket(fileno=aside(theirs.detach()))


def output_of_child(fd: int) -> int | None:
    """Return what a new process is to have as its output or error: that of this one, if it is open."""
    try:
        os.fstat(fd)
    except OSError:
        return subprocess.DEVNULL
    return None


def umask() -> int:
    """Return the permissions that new files of this process are made without.

    `os.umask` returns it only by setting another, with which other threads would make their files meanwhile.
    """
    with suppress(OSError), open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line[len(b"Umask:") :], 8)
    with tempfile.TemporaryDirectory() as folder:
        probe = os.path.join(folder, "probe")
        os.mkdir(probe, 0o777)
        return ~os.stat(probe).st_mode & 0o777


class Identity(NamedTuple):
    """As whom, and in which file system, this process opens files; none of it can be given to another."""

    user: int
    group: int
    groups: tuple[int, ...]
    root: tuple[int, int]
    """Device and inode of the root folder."""
    mounts: int | None
    """Inode of the namespace of mounts, where the system has one."""


def identity() -> Identity:
    """Return the identity of this process."""
    root, mounts = os.stat("/"), None
    with suppress(OSError):
        mounts = os.stat("/proc/self/ns/mnt").st_ino
    groups = tuple(sorted(os.getgroups()))
    return Identity(os.geteuid(), os.getegid(), groups, (root.st_dev, root.st_ino), mounts)


class AtExit:
    """Calls `action` once when this process ends by itself, the last one made first; `cancel` takes it back.

    One that is `last` comes after all that are not.  Processes that `multiprocessing` forks, from this one or
    from its fork server, end without the functions of `atexit`, but with finalizers of their own.  A forked
    process has to make one of its own: what it has from its parent does nothing there.
    """

    def __init__(self, action: Callable[[], object], *, last: bool = False) -> None:
        self._action: Callable[[], object] | None = action
        self._process = os.getpid()
        if not last:  # the finalizers run later: `multiprocessing` was imported before
            atexit.register(self._run)
        self._finalizer = Finalize(None, self._run, exitpriority=-1 if last else 0)

    def cancel(self) -> None:
        """Forget the action; nothing happens if it was called."""
        self._action = None
        atexit.unregister(self._run)
        self._finalizer.cancel()

    def _run(self) -> None:
        action = self._action
        self.cancel()
        if action is not None and os.getpid() == self._process:
            action()
