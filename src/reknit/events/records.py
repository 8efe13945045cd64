"""The records: phases, operations of stores, and the number of records that a sink has missed."""

from __future__ import annotations

import socket
from typing import Annotated, Any

from msgspec import Meta, Struct, field, structs

HOST = socket.gethostname()

MOVING = ("write", "read", "copy")
"""The phases whose bytes go to storage, or come from it."""

WAITING = ("assign", "commit", "agree", "locate", "save", "load", "prepare", "open", "wait", "back_pressure")
"""The phases in which ranks wait for each other, so that one slow rank makes all of them slow."""

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Number = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e11)]
Difference = Annotated[float, Meta(ge=-1e11, le=1e11)]
Time = Annotated[float, Meta(ge=0.0, le=1e11, description="seconds since the epoch")]
"""Anyone may have written a file of events: a value outside these bounds makes its line invalid."""


class _Plain(Struct, frozen=True, gc=False):
    def as_dict(self) -> dict[str, Any]:
        """Return plain data, one key per field."""
        return structs.asdict(self)


class PhaseRecord(_Plain, frozen=True, gc=False, kw_only=True):
    """One finished phase.

    `started` and `ended` are wall-clock times in seconds since the epoch, `seconds` is a monotonic duration.
    For a phase that runs in several threads at once, `seconds` is the sum over the threads.  `outcome` is
    ``"ok"`` or the name of an error type.  `process` is ``"trainer"`` or ``"agent"``.  `coordinate` is the
    rank's place in the parallel grid, such as ``{"dp": 0, "tp": 1}``, as far as the framework gives it.
    `behind_s` is how far the clock of the host is behind that of rank 0, measured in the last round of all
    ranks, or None before the first round.  Reports add it to `started` and `ended`.  `detail` has other
    facts, such as the remedy of an error.

    Fields with a default may be missing in the events of older versions.
    """

    phase: str
    rank: Count
    step: Number | None
    started: Time
    seconds: Seconds
    nbytes: Count
    outcome: str
    action: str
    path: str
    ended: Time = 0.0
    host: str = ""
    process: str = "trainer"
    coordinate: dict[str, Number] = field(default_factory=dict)
    behind_s: Difference | None = None
    detail: str = ""

    @property
    def end(self) -> float:
        """When the phase ended; not before it started, even if the clock was set back."""
        return self.ended if self.ended >= self.started else self.started + self.seconds

    @property
    def elapsed_s(self) -> float:
        """Seconds from start to end."""
        return self.end - self.started

    @property
    def busy_s(self) -> float:
        """Seconds of work: fewer than from start to end if the threads also did other work."""
        return min(self.seconds, self.elapsed_s)

    @property
    def lane(self) -> str:
        """The phase with its process: an agent has phases of the same names as its trainer."""
        return self.phase if self.process == "trainer" else f"{self.phase} ({self.process})"


class StorageRecord(_Plain, frozen=True, gc=False, kw_only=True):
    """One finished operation of a store: ``"create"``, ``"write"``, ``"read"``, ``"commit"``, ...

    `seconds` is the time from the call to its return, with all its `retries`.  `at_once` is the number of
    operations of this process and store that were under way when it began, itself included.  `store` is the
    part of the URL that names a service, such as ``s3://bucket``, or ``file``.  The outcome of a look for a
    file that does not exist is ``"ok"`` too.  The other fields are as in a `PhaseRecord`.
    """

    operation: str
    store: str
    rank: Count
    step: Number | None
    started: Time
    seconds: Seconds
    nbytes: Count
    outcome: str
    retries: Count
    at_once: Count
    action: str
    path: str
    host: str = ""
    process: str = "trainer"


class DroppedRecord(_Plain, frozen=True, gc=False):
    """`num_dropped` records before this one were lost, because the sink failed or was too slow."""

    num_dropped: Count
    host: str = ""
    started: Time = 0.0

    def __str__(self) -> str:
        return f"{self.num_dropped} before this were lost"


Record = PhaseRecord | StorageRecord | DroppedRecord
"""The records that sinks take."""


def record_of(fields: dict[str, Any]) -> Record:
    """Return the record that `as_dict` made these fields of."""
    if "phase" in fields:
        return PhaseRecord(**fields)
    return StorageRecord(**fields) if "operation" in fields else DroppedRecord(**fields)
