"""Copies between devices and host memory, on streams of their own and with deadlines."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import ExitStack, contextmanager, suppress
from time import sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.engine.memory.elements import copy, itemsize, rectangles, stage
from reknit.engine.memory.workers import SPAN_NBYTES, Arena, borrowed
from reknit.errors import DeadlineError, ReknitError
from reknit.events.phase import Deadline
from reknit.types import devices
from reknit.types.box import flat_range_boxes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType

    from numpy.typing import NDArray


_PAUSES_S = (0.0001, 0.002)

_kept: dict[int, tuple[Sequence[Mark], object]] = {}
"""Memory that devices which did not finish in time may still use, by the identity of its marks."""


class Mark(NamedTuple):
    """A place in the work of a device."""

    event: Any
    device: Any

    def is_ahead(self) -> bool:
        """Return whether the device has yet to reach the mark; a device that has failed never will."""
        return devices.is_under_way(self.event, self.device)


class SideStreams:
    """The side streams of some devices, one for each; in errors, `what` names the copied data."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._streams: dict[Any, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._streams.values())

    def follow(self, device: Any) -> Any:
        """Return the side stream of a device.

        Copies on it run after all the work that this thread has queued on its current stream of the device
        before the first call.
        """
        if device not in self._streams:
            stream = devices.side_stream(device)
            with devices.on_device(device):
                try:
                    stream.wait_stream(devices.current_stream(device))
                except RuntimeError as error:  # of earlier work
                    raise devices.failed(error, device) from error
            self._streams[device] = stream
        return self._streams[device]

    def mark(self, device: Any, event: Any = None) -> Mark:
        """Mark the end of the work queued so far on the stream of a device; an earlier `event` is reused."""
        with devices.on_device(device):
            try:
                event = event or devices.new_event(device)
                event.record(self._streams[device])
            except RuntimeError as error:
                raise devices.failed(error, device) from error
        return Mark(event, device)

    def marks(self) -> list[Mark]:
        """Mark the end of the work queued so far on each stream."""
        return [self.mark(device) for device in self._streams]

    def wait(self, marks: Sequence[Mark], deadline: Deadline) -> None:
        """Wait until the devices have reached all marks; sleeps, and waits for no other work of a device.

        Raises the first error of a device, once all marks were waited for, and `DeadlineError`.
        """
        failure = None
        for mark in marks:
            try:
                self._wait(mark, deadline)
            except ReknitError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _wait(self, mark: Mark, deadline: Deadline) -> None:
        pause_s, (event, device) = _PAUSES_S[0], mark
        with devices.on_device(device):
            while not _has_come(event, device):
                if deadline.passed():
                    raise DeadlineError(
                        f"{device} had not copied {self._what} within {deadline.seconds:g} s: it is still "
                        "busy with work that was queued before",
                        remedy="look for a collective that waits for a rank that is gone, or raise timeout_s",
                    )
                sleep(min(pause_s, deadline.remaining()))
                pause_s = min(_PAUSES_S[1], 2 * pause_s)


def _has_come(event: Any, device: Any) -> bool:
    # Polled, since a wait for an event of torch has no deadline.
    try:
        return bool(event.query())
    except RuntimeError as error:
        raise devices.failed(error, device) from error


def keep_until(marks: Sequence[Mark], memory: object) -> None:
    """Keep memory until devices have reached some marks, however long that takes."""
    _kept[id(marks)] = marks, memory


def drop_kept() -> None:
    """Free the kept memory whose marks the devices have reached."""
    for number, (marks, _) in list(_kept.items()):
        if not any(mark.is_ahead() for mark in marks):
            _kept.pop(number, None)


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


GATHER_NBYTES = 64 << 20
"""Memory per device for the short arrays that are copied together."""

PIECE_NBYTES = 8 << 20
"""Memory per device in which a large array that is not contiguous is laid out, piece after piece.

Larger pieces are hardly faster: on an H200, 4 GiB took 0.107 s in pieces of 8 MiB, and 0.093 s in 32.
"""


def gathered(lot: Sequence[tuple[int, Any]], nbytes: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yield the first bytes of arrays on one device, as many as `nbytes` has at their places."""
    torch = sys.modules["torch"]
    parts = []
    for place, source in lot:
        numel = nbytes[place] // itemsize(source)
        if source.is_contiguous():
            parts.append(source.view(-1)[:numel].view(torch.uint8))
            continue
        for box in flat_range_boxes(source.shape, 0, numel):
            parts.append(source[box.slices()].reshape(-1).contiguous().view(torch.uint8))
    data, start = torch.cat(parts).cpu().numpy(), 0
    for place, _ in lot:
        yield place, data[start : start + nbytes[place]]
        start += nbytes[place]


class Staging:
    """The copies of one save to host memory; copies from devices run beside the work of the devices.

    `sources` are the `bits` arrays that will be copied.  The copies wait for the work that is queued now on
    the current streams of this thread; for a device not among the sources, at its first copy.  Work that is
    queued later runs beside the copies: until `wait` returns, it must not write to any source.  The bytes
    given to `add` must stay in place while copies are `under_way`, even after an error.  One thread at a time
    may use this.

    To memory that is not pinned, devices copy `by_way` of pinned buffers, if they are given.
    """

    def __init__(self, sources: Iterable[Any] = (), by_way: BounceBuffers | None = None) -> None:
        self._by_way = by_way
        self._side = SideStreams("what is saved")
        self._ends: dict[Any, Mark] = {}
        for source in sources:
            if devices.is_queued(source):
                self._side.follow(source.device)

    def add(self, source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
        """Begin to copy `numel` elements from element `first` (row-major) of a `bits` array to `out`.

        Bytes from a device with streams have arrived when `wait` has returned, all others when this returns.
        If `out` is not pinned and there are no buffers, this call lasts until torch has copied.
        """
        if not numel or not devices.is_queued(source):
            stage(source, first, numel, out)
        elif self._by_way is None:
            self._queue(source, first, numel, out)
        else:
            size = source.element_size()
            for begin, buffer in self._by_way.parts(out, size, self._side):
                self._queue(source, first + begin // size, len(buffer) // size, buffer)

    def wait(self, timeout_s: float) -> None:
        """Wait until all copies added so far are made.

        Raises the first error of a device, once all devices were waited for, and `DeadlineError`.
        """
        self._side.wait(list(self._ends.values()), Deadline(timeout_s))
        if self._by_way is not None:
            self._by_way.empty()

    def under_way(self) -> bool:
        """Return whether a device may still write to bytes that were given to `add`."""
        return any(end.is_ahead() for end in self._ends.values())

    def _queue(self, source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
        stream = self._side.follow(source.device)
        # The source may be freed before the copy has run: torch must not reuse its memory until then.
        source.record_stream(stream)
        try:
            with devices.on_stream(stream):
                if source.is_contiguous():
                    copy(source.view(-1)[first : first + numel], out, non_blocking=True)
                else:
                    _gather(source, first, numel, out)
        finally:
            # Also after an error: copies queued before it still write to `out`, so `wait` includes them.
            before = self._ends.get(source.device)
            self._ends[source.device] = self._side.mark(source.device, before and before.event)


class BounceBuffers:
    """Two pinned buffers in turn, by way of which devices copy to memory that is not pinned.

    While devices copy to one buffer, the host copies the parts in the other to their places.
    """

    def __init__(self, buffers: Sequence[NDArray[np.uint8]], timeout_s: float) -> None:
        self._turns, self._timeout_s = deque(_BounceBuffer(buffer) for buffer in buffers), timeout_s

    @classmethod
    def pinned(cls, most_nbytes: int, device: Any, timeout_s: float) -> BounceBuffers | None:
        """Return new buffers for copies of up to `most_nbytes`; None without pinned memory."""
        nbytes = min(most_nbytes, SPAN_NBYTES)
        buffers = [devices.pinned(nbytes, device) for _ in range(2)]
        found = [buffer for buffer in buffers if buffer is not None]
        return cls(found, timeout_s) if len(found) == len(buffers) else None

    def parts(
        self, out: NDArray[np.uint8], itemsize: int, side: SideStreams
    ) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield the offset of each part of `out`, and the place in a buffer to which it is copied first."""
        begin = 0
        while begin < len(out):
            buffer = self._turns[0]
            start = -(-buffer.end // itemsize) * itemsize
            nbytes = min(len(out) - begin, (len(buffer.memory) - start) // itemsize * itemsize)
            if nbytes <= 0:
                buffer.ends = side.marks()
                self._turns.rotate(-1)
                side.wait(self._turns[0].ends, Deadline(self._timeout_s))
                self._turns[0].empty()
                continue
            buffer.end = start + nbytes
            part = buffer.memory[start : buffer.end]
            buffer.parts.append((part, out[begin : begin + nbytes]))
            yield begin, part
            begin += nbytes

    def empty(self) -> None:
        """Copy all parts to their places, after all devices have copied."""
        for buffer in self._turns:
            buffer.empty()


class _BounceBuffer:
    """A pinned buffer: parts up to `end`, the place of each, and the marks after which they are complete."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory, self.end = memory, 0
        self.parts: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
        self.ends: Sequence[Mark] = ()

    def empty(self) -> None:
        for part, out in self.parts:
            out[:] = part
        self.parts, self.end, self.ends = [], 0, ()


def _gather(source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
    """Copy elements that are not contiguous, laid out piece after piece on the device.

    Each temporary is allocated on the side stream, so that the next piece reuses its memory in order.
    """
    itemsize = source.element_size()
    step = max(PIECE_NBYTES // itemsize, 1)
    for begin in range(0, numel, step):
        count = min(step, numel - begin)
        piece = out[begin * itemsize : (begin + count) * itemsize]
        for rectangle, part in rectangles(source, first + begin, count, piece):
            copy(rectangle.contiguous(), part, non_blocking=True)


def copied_later(source: Any) -> bool:
    """Return whether a `bits` array is one run of memory, which can be copied beside other work."""
    if isinstance(source, np.ndarray):
        return bool(source.flags.c_contiguous)
    return devices.is_queued(source) and bool(source.is_contiguous())


def changes(data: Any) -> int | None:
    """Return torch's counter of the changes in place of a tensor; None if it has no such counter.

    All views of a tensor share the counter, including those of `detach()`, so pass the shard's data, not its
    `bits`.  **An equal number proves nothing.**  These change values without being counted: `tensor.data` and
    NumPy views; optimizers with ``fused=True`` (parameters and states, all but `step`); every operation on a
    DTensor, for its local tensor; the running statistics of batch norm; `broadcast`, `all_reduce`, `scatter`
    and `recv`; replayed CUDA graphs; foreign kernels.

    Arrays of other libraries, and tensors made in inference mode, have no counter.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(data, torch.Tensor) or data.is_inference():
        return None
    return int(data._version)
