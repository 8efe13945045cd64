"""Streams on which copies run beside the work of devices, and waits for these copies, with deadlines."""

from __future__ import annotations

from time import sleep
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import DeadlineError, ReknitError
from reknit.types import devices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.monitor.phase import Deadline

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
