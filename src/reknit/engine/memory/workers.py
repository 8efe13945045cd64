"""Threads of the engine: workers with an arena each, which take jobs in order and keep to a rate."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from msgspec import Struct

from reknit.errors import DeadlineError, ShortageError, UsageError
from reknit.events.phase import Deadline, monotonic
from reknit.format.checksum import BLOCK_NBYTES
from reknit.system import advise
from reknit.system import start as start_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    Arenas = Callable[[int], AbstractContextManager["Arena"]]
    """Lends an arena of the given number of bytes to a worker."""


PAGE_NBYTES = 4096
"""Every file begins at a multiple of this in an arena, as direct I/O demands."""

SPAN_NBYTES = 32 << 20
"""Bytes of a file that are staged, digested and handed over together: a multiple of the checksum block."""


class Arena:
    """`nbytes` bytes of anonymous, page-aligned memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # Private pages may be huge pages, which fault in much faster than pages of a shared map.
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise(self._map, "MADV_HUGEPAGE", 0, nbytes)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def view(self, nbytes: int) -> NDArray[np.uint8]:
        """Return the first `nbytes` bytes."""
        return self.bytes[:nbytes]


_spare: deque[Arena] = deque(maxlen=4)
"""Unused arenas of one block: a small save would wait longer for new pages than its copies take."""


@contextmanager
def borrowed(nbytes: int) -> Iterator[Arena]:
    """Lend an arena within the block; its bytes are undefined."""
    arena = None
    with suppress(IndexError):
        arena = _spare.pop() if nbytes == BLOCK_NBYTES else None
    arena = arena or Arena(nbytes)
    yield arena
    if nbytes == BLOCK_NBYTES:  # not after an error: a device may still use it
        _spare.append(arena)


class Span(Struct, frozen=True):
    """A range of one file, and its place in an arena.

    `file` is the number of the file, `start` and `nbytes` its range, and `at` the offset in the arena.  Span
    number `after` has to be written out before this span may be filled; -1 if there is no such span.
    """

    file: int
    start: int
    nbytes: int
    at: int
    after: int


def image_nbytes(sizes: Sequence[int]) -> int:
    """Return the size of the arena that holds files of these sizes, each beginning on a page."""
    return sum(_pages(size) for size in sizes)


def arena_spans(sizes: Sequence[int], capacity: int) -> list[Span]:
    """Place files of `sizes` bytes in an arena of `capacity` bytes, cut in spans of at most `SPAN_NBYTES`.

    If all files fit, the arena is their image, one after another, each beginning on a page.  Otherwise it is
    a ring of n slots of one span each: span k goes to slot k modulo n, once the span before it there is
    written out.  Empty files have no spans.  Raises `UsageError` if neither the files nor one span fit.
    """
    whole = image_nbytes(sizes) <= capacity
    num_slots = capacity // SPAN_NBYTES
    if not whole and num_slots < 1:
        raise UsageError(f"an arena of {capacity} bytes cannot hold a span of {SPAN_NBYTES} bytes")
    spans: list[Span] = []
    base = 0
    for file, size in enumerate(sizes):
        for start in range(0, size, SPAN_NBYTES):
            nbytes = min(SPAN_NBYTES, size - start)
            if whole:
                spans.append(Span(file, start, nbytes, base + start, -1))
            else:
                lap, slot = divmod(len(spans), num_slots)
                after = len(spans) - num_slots if lap else -1
                spans.append(Span(file, start, nbytes, slot * SPAN_NBYTES, after))
        base += _pages(size)
    return spans


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


class Pace:
    """A limit on the bytes and requests per second; None means unlimited.  Every request takes `latency_s`.

    Callers wait their turn, in the order of their calls.  One pace may limit many stores of a process.
    """

    def __init__(
        self, bytes_per_s: float | None = None, requests_per_s: float | None = None, latency_s: float = 0.0
    ) -> None:
        if any(rate is not None and rate <= 0 for rate in (bytes_per_s, requests_per_s)) or latency_s < 0:
            raise UsageError("the rates of a Pace are positive")
        self._per_byte = 1 / bytes_per_s if bytes_per_s else 0.0
        self._per_request = 1 / requests_per_s if requests_per_s else 0.0
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, nbytes: int) -> None:
        """Wait until a request of `nbytes` may pass."""
        with self._lock:
            begin = max(monotonic(), self._free_at)
            self._free_at = end = begin + max(nbytes * self._per_byte, self._per_request)
        time.sleep(max(0.0, end - monotonic()) + self._latency_s)


Job = TypeVar("Job")
Result = TypeVar("Result")
_Worker = tuple[threading.Thread, threading.Event]

_NO_ARENA_NBYTES = 4096

_LOOK_S = 1.0
"""Seconds between two checks whether a worker is still alive."""


class _JobSource(Generic[Job]):
    """Jobs handed out to several threads, until the jobs end or one fails."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = iter(jobs)
        self._taking = threading.Lock()
        # A second lock, since the iterator of the jobs may stall under the first.
        self._failing = threading.Lock()
        self.error: BaseException | None = None

    def take(self) -> list[Job]:
        """Return the next job in a list, or an empty list."""
        with self._taking:
            if self.error is None:
                for job in self._jobs:
                    # Another thread may have failed while the job was made.
                    return [] if self._has_failed() else [job]
            return []

    def _has_failed(self) -> bool:
        return self.error is not None

    def fail(self, error: BaseException) -> None:
        """Record the first error; no further job is handed out."""
        with self._failing:
            self.error = self.error or error


class Gate:
    """Guards memory that threads use, and closes for good when its owner no longer waits for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    def check(self) -> None:
        """Raise `DeadlineError` when the gate is closed."""
        if self._closed:
            raise DeadlineError("the caller no longer waits for this")

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Allow use of the memory within the block, which is short.  Raises `DeadlineError` once closed."""
        with self._changed:
            self.check()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Close the gate, and return once no thread is inside."""
        with self._changed:
            self._closed = True
            while self._inside:
                self._changed.wait()


def within(timeout_s: float, what: Callable[[], str], work: Callable[[], Result]) -> Result:
    """Return the result of `work`, or raise its error, or `DeadlineError` when it takes too long.

    `work` runs in a thread of its own, which is left behind at the deadline.  So it must not change state
    that other threads read.
    """
    found: list[Result] = []
    run_jobs(
        [work],
        lambda job, _: found.append(job()),
        threads=1,
        arena_nbytes=_NO_ARENA_NBYTES,
        budget_nbytes=_NO_ARENA_NBYTES,
        timeout_s=timeout_s,
        what=what,
    )
    return found[0]


def run_jobs(
    jobs: Iterable[Job],
    work: Callable[[Job, Arena], None],
    *,
    threads: int,
    arena_nbytes: int,
    budget_nbytes: int,
    arenas: Arenas = borrowed,
    timeout_s: float | None = None,
    what: Callable[[], str] = lambda: "the work",
    stop: Callable[[BaseException], None] = lambda _: None,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Do all jobs, several at once, and return when the last is done.

    Each worker owns one arena of `arena_nbytes`, lent by `arenas`.  There are at most `threads` workers, and
    no more than fit in `budget_nbytes` or can be started.  So memory is bounded, and while one worker waits
    for storage the others copy and digest.  For a single worker without `timeout_s`, the calling thread does
    the jobs.  It also runs `meanwhile`, while the workers work, or after its own jobs.

    The first error stops each worker after its current job, and is raised; so does an interrupt of the
    caller.  `stop` is called with it before the workers are waited for, to end jobs that would block.

    After `timeout_s` the caller stops waiting, and raises the first error, or a `DeadlineError` that says
    that `what()` did not finish.  A worker that hangs in a foreign call is left behind, and ends after its
    job, when the call returns.  `work` has to ensure, with a `Gate`, that it touches no memory then.
    """
    source = _JobSource(jobs)

    def loop(ended: threading.Event) -> None:
        try:
            with arenas(arena_nbytes) as arena:
                while job := source.take():
                    work(job[0], arena)
        except BaseException as error:  # it is raised again by the caller's thread
            source.fail(error)
            stop(error)
        finally:
            ended.set()

    deadline = None if timeout_s is None else Deadline(timeout_s)
    count = max(1, min(threads, budget_nbytes // max(arena_nbytes, 1)))
    if count == 1 and deadline is None:
        loop(threading.Event())
        if source.error is not None:
            raise source.error
        if meanwhile is not None:
            meanwhile()
        return
    # Events, since after an interrupted `Thread.join` a running thread counts as ended.
    ends = [threading.Event() for _ in range(count)]
    workers = [
        threading.Thread(target=loop, args=(ended,), name=f"reknit-worker-{k}", daemon=True)
        for k, ended in enumerate(ends)
    ]
    try:
        _begin_some(workers)
        if meanwhile is not None:
            try:
                meanwhile()
            except Exception as error:  # raised below, unless a worker has failed before
                source.fail(error)
                stop(error)
        in_time = _wait(_begun(workers, ends), deadline, source)
    except BaseException as error:  # an interrupt: no thread may write after the call has ended
        source.fail(error)
        stop(error)
        _wait(_begun(workers, ends), deadline)
        raise
    if in_time:
        for worker, _ in _begun(workers, ends):
            worker.join()  # they have set their events, so this does not block
    else:
        source.fail(_late(what(), timeout_s))
    if source.error is not None:
        raise source.error


def _begin_some(workers: Sequence[threading.Thread]) -> None:
    """Start as many workers as possible; one is enough.  Raises `ShortageError` without any."""
    for number, worker in enumerate(workers):
        try:
            start_worker(worker)
        except ShortageError:
            if number == 0:
                raise
            return


def _begun(workers: Sequence[threading.Thread], ends: Sequence[threading.Event]) -> list[_Worker]:
    """Return the workers that were started, each with the event of its end."""
    return [pair for pair in zip(workers, ends, strict=True) if pair[0].ident is not None]


def _wait(
    workers: Sequence[_Worker], deadline: Deadline | None, source: _JobSource[Any] | None = None
) -> bool:
    """Wait for the ends of all workers, at most until the deadline; return whether all have ended.

    With their `source`, a thread that died of a lack of memory before its first line fails the jobs, too.
    """
    for worker, ended in workers:
        while not ended.wait(_LOOK_S if deadline is None else min(_LOOK_S, deadline.remaining())):
            if source is not None and not worker.is_alive() and not ended.is_set():
                source.fail(ShortageError("there is too little memory: a thread ended before its first line"))
                break
            if deadline is not None and deadline.passed():
                return False
    return True


def _late(what: str, timeout_s: float | None) -> DeadlineError:
    return DeadlineError(
        f"{what} did not finish within {timeout_s:g} s",
        remedy="see whether the storage answers; if it is only slow, allow more time with `timeout_s`",
    )
