"""What is recorded: phases, operations of stores, and how much was lost; all as plain frozen values."""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from typing import Any

HOST = socket.gethostname()


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """One finished phase.

    `started` and `ended` are wall-clock times in seconds since the epoch, `seconds` is a monotonic duration;
    for a phase whose work runs in several threads at once it is their sum.  `outcome` is ``"ok"`` or the name
    of an error type.  `process` is ``"trainer"`` or ``"agent"``.  `coordinate` is the rank's place in the
    parallel grid, such as ``{"dp": 0, "tp": 1}``, as far as the framework tells it and it is known by then.
    `behind_s` is how far the clock of the host is behind that of rank 0, as the last round of all ranks
    showed, None before one.  Reports add it to `started` and `ended`.  `detail` is what else there is to
    say, such as the remedy of an error.
    """

    phase: str
    rank: int
    step: int | None
    started: float
    seconds: float
    nbytes: int
    outcome: str
    action: str
    path: str
    ended: float
    host: str
    process: str
    coordinate: dict[str, int]
    behind_s: float | None = None
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, one key per field."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """One finished operation of a store: ``"create"``, ``"write"``, ``"read"``, ``"commit"``, ...

    `seconds` are those from the call to its return, with all its `retries`.  `at_once` counts the operations
    of this process and store that were under way when it began, itself included.  `store` is the part of the
    URL that names a service, such as ``s3://bucket``, or ``file``.  The answer that there is nothing under a
    name is ``"ok"`` too.  The rest is as in a `PhaseRecord`.
    """

    operation: str
    store: str
    rank: int
    step: int | None
    started: float
    seconds: float
    nbytes: int
    outcome: str
    retries: int
    at_once: int
    action: str
    path: str
    host: str
    process: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, one key per field."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DroppedRecord:
    """Tells a sink that `num_dropped` records before this one were lost, as it failed or was too slow."""

    num_dropped: int
    host: str
    started: float

    def __str__(self) -> str:
        return f"{self.num_dropped} before this were lost"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, one key per field."""
        return asdict(self)


Record = PhaseRecord | StorageRecord | DroppedRecord
"""What sinks take."""


def record_of(fields: dict[str, Any]) -> Record:
    """Return what `as_dict` made these of."""
    if "phase" in fields:
        return PhaseRecord(**fields)
    return StorageRecord(**fields) if "operation" in fields else DroppedRecord(**fields)
