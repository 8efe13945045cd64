"""Copies between devices and host memory by worker threads, in order with the work of the caller."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from reknit.engine.memory.arena import Arena, borrowed
from reknit.engine.memory.elements import stage
from reknit.engine.memory.side_streams import Mark, SideStreams, drop_kept, keep_until
from reknit.errors import DeadlineError, ReknitError
from reknit.monitor.phase import Deadline
from reknit.types import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray


class Transfer:
    """The copies of one save or load between host memory and the devices of some `bits` arrays.

    The thread that saves or loads enters it as a context.  Copies that any thread makes in `copying` run
    after all the work that the entering thread had queued on its current streams of these devices.  When the
    context ends, all copies are made, so work that is queued later, on any stream, comes after them.  In
    errors, `what` names the copied data; a device has `timeout_s` for all copies.

    Without arrays on devices that have streams, it does nothing.
    """

    def __init__(self, arrays: Iterable[Any], what: str, timeout_s: float) -> None:
        self._timeout_s, self._is_late = timeout_s, False
        self._arrays = [array for array in arrays if devices.is_queued(array)]
        self._side = SideStreams(what)

    @property
    def is_needed(self) -> bool:
        """Whether any of the arrays is on a device that has streams."""
        return bool(self._arrays)

    def __enter__(self) -> Transfer:
        drop_kept()
        for array in self._arrays:
            self._side.follow(array.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Without an error, workers have waited for all their copies.
        if error is None or self._are_made():
            return
        for array in self._arrays:
            # torch must not reuse its memory while it is copied.
            with suppress(RuntimeError):
                array.record_stream(devices.side_stream(array.device))

    @contextmanager
    def copying(self, arena: Arena | None = None, name: Callable[[], str] | None = None) -> Iterator[None]:
        """Run the copies of the block in order; they are made when the block has ended.

        With an `arena` of `arenas`, copies may be under way until its memory is used again, and must have
        that arena as their source.  In errors, `name()` names the copied data.
        """
        if not self._arrays:
            yield
            return
        held = arena if isinstance(arena, _Ring) else None
        try:
            with ExitStack() as streams:
                for stream in self._side:
                    streams.enter_context(devices.on_stream(stream))
                try:
                    yield
                finally:  # also after an error: copies queued before it still use the memory
                    marks = self._side.marks()
        except BaseException:
            self._are_made()
            raise
        if held is None:
            self._wait(marks, name)
        else:
            held.hold(marks, name)

    @contextmanager
    def arenas(self, nbytes: int, num_buffers: int = 1) -> Iterator[Arena]:
        """Lend an arena for `copying`: `num_buffers` parts in turn, which are pinned if torch can."""
        if not self._arrays:
            with borrowed(nbytes) as arena:
                yield arena
            return
        device = self._arrays[0].device
        buffers = [devices.pinned(nbytes // num_buffers, device) for _ in range(num_buffers)]
        pinned = [buffer for buffer in buffers if buffer is not None]
        if len(pinned) < num_buffers:
            with borrowed(nbytes // num_buffers) as arena:
                yield arena
            return
        ring = _Ring(pinned, self._wait)
        try:
            yield ring
            ring.settle()
        except BaseException:
            if not self._are_made():
                keep_until(self._side.marks(), pinned)
            raise

    def _wait(self, marks: Sequence[Mark], name: Callable[[], str] | None = None) -> None:
        """Wait for marks, as `SideStreams.wait` does; in errors, `name()` names the copied data."""
        try:
            self._side.wait(marks, Deadline(0.0 if self._is_late else self._timeout_s))
        except ReknitError as error:
            self._is_late |= isinstance(error, DeadlineError)
            if name is not None:
                error.message += f"; it copied {name()}"
            raise

    def _are_made(self) -> bool:
        """Wait for all copies after an error; return whether they have ended, made or failed, in time."""
        with suppress(ReknitError):
            self._wait(self._side.marks())
        return not self._is_late


class _Ring(Arena):
    """Buffers of one worker in turn: one is filled while devices copy from another."""

    def __init__(
        self,
        buffers: Sequence[NDArray[np.uint8]],
        wait: Callable[[Sequence[Mark], Callable[[], str] | None], None],
    ) -> None:
        self.nbytes, self.bytes = len(buffers[0]), buffers[0]
        self._wait = wait
        self._rooms = deque(_Buffer(buffer) for buffer in buffers)

    def view(self, nbytes: int) -> NDArray[np.uint8]:
        """Return the first `nbytes` bytes of the next buffer, once no device copies from it."""
        self._rooms.rotate(-1)
        self._release(self._rooms[0])
        self.bytes = self._rooms[0].memory
        return self.bytes[:nbytes]

    def hold(self, marks: Sequence[Mark], name: Callable[[], str] | None) -> None:
        """Keep the buffer that was returned last unchanged until the marks are reached."""
        self._rooms[0].held.append((marks, name))

    def settle(self) -> None:
        """Wait until no device copies from any buffer."""
        for buffer in list(self._rooms):
            self._release(buffer)

    def _release(self, buffer: _Buffer) -> None:
        while buffer.held:
            self._wait(*buffer.held.pop())


class _Buffer:
    """A buffer of a ring, and the marks that devices have to reach before it is used again."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self.held: list[tuple[Sequence[Mark], Callable[[], str] | None]] = []


def queue(source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
    """Copy as `stage` does; for a device that has streams, `Transfer.copying` waits."""
    if not devices.is_queued(source):
        stage(source, first, numel, out)
        return
    try:
        stage(source, first, numel, out, non_blocking=True)
    except RuntimeError as error:
        failure = devices.failed(error, source.device)
        failure.message += f"; it was to come from {source.device}"
        raise failure from error
