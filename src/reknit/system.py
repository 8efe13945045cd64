"""The resources of a process (memory, threads, descriptors), its switches, forks, and last actions."""

from __future__ import annotations

import atexit
import fcntl
import gc
import io
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.process import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from reknit.errors import ShortageError, says_end, shortage, typed_known

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


inherited: weakref.WeakSet[Any] = weakref.WeakSet()
"""The default groups of torch that the parents of this process had."""


def _after_fork() -> None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None:
        return
    with suppress(Exception):  # torch may be in any state after a fork, and the child must go on
        if distributed.is_available() and distributed.is_initialized():
            inherited.add(distributed.group.WORLD)


os.register_at_fork(after_in_child=_after_fork)


EXIT_STATUS = 120
"""That of Python itself for an error while it ends, also after ``sys.exit``."""


def at_very_end(action: Callable[[], object]) -> None:
    """Call `action` when this process ends by itself, after all actions of `system.AtExit`.

    Finalizers do not run after one that changes the exit status of a process of `multiprocessing`.
    """
    Finalize(None, action, exitpriority=-2)


def end_with_failure() -> None:
    """Let this process end with `EXIT_STATUS` instead of 0; only an action of `at_very_end` calls this.

    An exception or a signal that ends the process has a status of its own, which stays.
    """
    if parent_process() is None:
        if not hasattr(sys, "last_value"):
            sys.stderr = FailsLast(sys.stderr)
        return
    # A process of `multiprocessing` calls finalizers while the exception that ends it is raised.
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and not error.code):
        raise SystemExit(EXIT_STATUS)


class FailsLast:
    """A standard error whose last flush fails, which is that of the interpreter, after all exit handlers.

    The exit status is 120 then, and nothing else differs.  Python ignores exceptions of exit handlers, and
    `os._exit` in one of them would skip the others.
    """

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = io.StringIO() if stream is None else stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush, and fail without a calling function."""
        with suppress(ValueError):  # it may be closed
            self._stream.flush()
        if sys._getframe().f_back is None:
            raise OSError("a save failed")


def available_nbytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process can still get; `root` has the folders of the system."""
    machine = _fields(root / "proc/meminfo").get("MemAvailable:")
    if machine is not None:
        free = machine * 1024
    else:
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([free, *_group_rooms(root)]))


def _group_rooms(root: Path) -> Iterator[int]:
    """Yield the rest of the limit of each control group of this process, of either version.

    Pages of files that were not used lately count as free, as in MemAvailable, because reading data and
    writing checkpoints fills the group with them.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        kinds, _, path = line.partition(":")[2].partition(":")
        if not kinds:
            top, limit, usage, cold = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in kinds.split(","):
            top, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cold = "total_inactive_file"
        else:
            continue
        inner = Path(path.lstrip("/"))
        # In a container the path may be that of the host, which is not mounted; this group is then the top.
        for group in (inner, *inner.parents):
            folder = root / top / group
            most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
            if most.isdecimal() and used.isdecimal():
                yield int(most) - int(used) + _fields(folder / "memory.stat").get(cold, 0)


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file whose lines are a name, a number, and perhaps a unit."""
    rows = [line.split() for line in _text(path).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""  # another kind of system, or not readable: other sources answer


logger = logging.getLogger("reknit")

_State = TypeVar("_State")
_Result = TypeVar("_Result")

_STANDARD = 3  # input, output and error have the numbers below this

_THREAD_NBYTES = 16 << 20
"""The memory that a thread may take before its first line: a stack, and the arenas of allocators."""


class Switch(Generic[_State]):
    """A switch of the whole process for blocks of code: the first block turns it, the last turns it back.

    Blocks may nest, and blocks of several threads may overlap.  A forked process has only the blocks of the
    thread that forked it; without any, its switch is turned back.  `turn` returns the state that `back`
    needs.  `back` may be called twice, and keeps a change that other code has made meanwhile.
    """

    def __init__(self, turn: Callable[[], _State], back: Callable[[_State], object]) -> None:
        self._turn, self._back = turn, back
        self._lock = threading.RLock()  # a handler of a signal may come to a block inside of one
        self._blocks: dict[object, int] = {}
        """The thread of each block."""
        self._turned: list[_State] = []
        os.register_at_fork(after_in_child=self._after_fork)

    @contextmanager
    def turned(self) -> Iterator[_State | None]:
        """Turn the switch during the block, which gets the state from before.

        A handler of a signal that interrupts the turning gets None.
        """
        block = object()
        try:
            with self._lock:
                self._blocks[block] = threading.get_ident()
                if len(self._blocks) == 1 and not self._turned:
                    self._turned.append(self._turn())
                before = self._turned[0] if self._turned else None
            yield before
        finally:
            with self._lock:
                self._blocks.pop(block, None)
                self._turn_back()

    def is_last(self) -> bool:
        """Return whether only one block is left, so that its end turns the switch back."""
        return len(self._blocks) == 1

    def _turn_back(self) -> None:
        if not self._blocks:
            for state in list(self._turned):
                self._back(state)
            self._turned.clear()  # only now: a handler that comes in between must not take it for turned back

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        this = threading.get_ident()
        self._blocks = {block: thread for block, thread in self._blocks.items() if thread == this}
        self._turn_back()


def _pause_collector() -> tuple[int, int, int]:
    before = gc.get_threshold()
    gc.set_threshold(0, *before[1:])
    return before


def _resume_collector(before: tuple[int, int, int]) -> None:
    if gc.get_threshold()[0] == 0:  # else other code has set it since
        gc.set_threshold(*before)


_HAS_GIL: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
_collector = Switch(_pause_collector, _resume_collector)


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector of this process from running by itself during the block.

    A job has millions of objects, and a save or a load makes and needs many more: repeated searches of them
    take longer than all the rest.  Objects without references are freed as always; only objects that refer to
    each other in a circle stay until the end.  The collector stays enabled, since other code may change that
    meanwhile: its threshold is changed instead.

    At the end the collector searches the youngest objects.  Else their number would start a search at once,
    often one of all objects: with torch half of the time of a first save.  A Python without the GIL only has
    searches of all objects, and there this starts none.
    """
    with _collector.turned() as before:
        try:
            yield
        finally:
            paused = _collector.is_last() and gc.isenabled() and gc.get_threshold()[0] == 0
            if paused and _HAS_GIL and before is not None and 0 < before[0] < gc.get_count()[0]:
                gc.collect(0)


dice = SystemRandom()
"""For pauses of random length: the generator of the module `random` belongs to the program."""


def require_memory(nbytes: int) -> None:
    """Raise `ShortageError` unless this process could have so many more bytes now; take none of them.

    It is for calls that answer a refusal by ending the process, as libraries in C++ do, or that never return,
    as Python's own start of a thread.
    """
    try:
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, OverflowError, MemoryError) as error:
        raise shortage(error) or ShortageError(f"there is too little memory: {error}") from error


def advise(memory: mmap.mmap, advice: str, start: int, nbytes: int) -> None:
    """Give the kernel an advice that it may not support, or may refuse; nothing depends on it."""
    number = getattr(mmap, advice, None)
    if number is not None:
        with suppress(OSError):
            memory.madvise(number, start, nbytes)


def start_thread(name: str, work: Callable[[], object]) -> threading.Thread:
    """Run `work` in a thread that never keeps the interpreter from ending.  Raises `ShortageError`."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    start(thread)
    return thread


def start(thread: threading.Thread) -> None:
    """Start a thread.  Raises `ShortageError` if the system allows no more threads, or memory is too low.

    If memory runs out before the first line of a thread, Python would wait for that line for ever.
    """
    require_memory(_THREAD_NBYTES)
    with typed_known():
        thread.start()


class DaemonExecutor:
    """A bounded pool of threads that never keeps the interpreter from ending.

    The executors of the standard library join their threads when the interpreter ends, before any function of
    `atexit` runs.  A thread that waits for a rank or a server would then keep the process alive.
    """

    def __init__(
        self,
        name: str,
        most: int,
        *,
        ready: int = 0,
        on_shortage: Callable[[ShortageError], object] | None = None,
    ) -> None:
        """Make a pool of at most `most` threads, and start `ready` of them.  Raises `ShortageError`.

        `on_shortage` is called if a job needs a new thread and none can be started; the job then waits for a
        busy thread.  Without `on_shortage`, `submit` raises the `ShortageError`.
        """
        self._name, self._most, self._on_shortage = name, most, on_shortage
        self._changed = threading.Condition()  # guards all below
        self._jobs: deque[Callable[[], None]] = deque()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        """Number of threads that take the next job: each waits for one, or is about to."""
        self._num_ended = 0
        self._closed = False
        with self._changed:
            self._start(ready)

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        """Run ``fn(*args, **kwargs)`` in one of the threads."""
        future: Future[_Result] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # the future raises it where its result is asked for
                future.set_exception(error)

        try:
            with self._changed:
                self._jobs.append(job)
                self._changed.notify()
                self._start(len(self._jobs) - self._num_idle)
        except ShortageError as error:
            if self._on_shortage is None:
                future.cancel()
                raise
            self._on_shortage(error)
        return future

    def _start(self, number: int) -> None:
        """Start up to `number` threads, within the bound.  Raises `ShortageError`."""
        for _ in range(min(number, self._most - len(self._threads))):
            try:
                self._threads.append(start_thread(self._name, self._work))
            except (RuntimeError, ShortageError) as error:
                if isinstance(error, ShortageError) and not (self._threads and says_end(error)):
                    raise
                # An interpreter that ends starts no threads, and gRPC must not get an error for that.
                logger.warning("jobs of %s are waiting for a free thread: %s", self._name, error)
                return
            self._num_idle += 1

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """Let each thread end when the jobs are done, and wait up to `timeout_s` for all threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            ended = self._changed.wait_for(lambda: self._num_ended == len(self._threads), timeout_s)
        for thread in self._threads if ended else ():
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                self._num_idle -= 1
                if not self._jobs:
                    self._num_ended += 1
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
            job()
            with self._changed:
                self._num_idle += 1


def aside(fd: int) -> int:
    """Return a descriptor above those of standard input, output and error, in the place of this one.

    A process may have those closed, as daemons do.  Then the next opened file gets their numbers, and printed
    text would get into it.
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
    """Return the output or error for a new process: that of this process, if it is open."""
    try:
        os.fstat(fd)
    except OSError:
        return subprocess.DEVNULL
    return None


def umask() -> int:
    """Return the permissions that new files of this process lack.

    `os.umask` returns it only by setting another, which would meanwhile hold for the files of other threads.
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
    """The user and the file system with which this process opens files; it cannot hand them over."""

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
    """An action at the end of this process, called once if the process ends by itself, the newest first.

    An action that is `last` comes after all that are not.  Processes that `multiprocessing` forks, from this
    one or from its fork server, end without the functions of `atexit`, but with finalizers of their own.  A
    forked process has to make actions of its own: those of its parent do nothing there.
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
