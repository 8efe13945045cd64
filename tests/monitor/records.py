"""Records of a save by many ranks, to vary."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from reknit.events.records import PhaseRecord, StorageRecord
from reknit.events.to_file import JsonLines
from reknit.monitor.operations import read_operations

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.events.records import Record
    from reknit.monitor.operations import RecordedOperation

SLOW, FAILED = 13, 6
"""The slow rank and the failed one of `sixteen_ranks`."""

BEGIN = 1_790_000_000.0
_COMMON: dict[str, Any] = {"rank": 0, "step": 7, "outcome": "ok", "action": "save", "path": "run/step_7"}
_PHASE = PhaseRecord(
    phase="",
    started=BEGIN + 0.25,
    seconds=1.0,
    nbytes=1 << 30,
    ended=BEGIN + 1.25,
    host="host0",
    coordinate={"dp": 1, "tp": 0},
    **_COMMON,
)
_OPERATION = StorageRecord(
    operation="",
    store="s3://bucket",
    started=BEGIN + 0.5,
    seconds=0.5,
    nbytes=100,
    retries=0,
    at_once=1,
    host="host0",
    process="agent",
    **_COMMON,
)


def phase(name: str, **more: Any) -> PhaseRecord:
    """Return the record of a phase of a save."""
    return replace(_PHASE, phase=name, **more)


def operation(name: str, **more: Any) -> StorageRecord:
    """Return the record of an operation of the save's store."""
    return replace(_OPERATION, operation=name, **more)


def of_rank(name: str, rank: int, start: float, seconds: float, **more: Any) -> PhaseRecord:
    """Return the record of a phase of a rank in a grid of four columns, with eight ranks on each host."""
    known: dict[str, Any] = {
        "started": BEGIN + start,
        "seconds": seconds,
        "nbytes": 0,
        "ended": BEGIN + start + seconds,
        "host": f"host{rank // 8}",
        "coordinate": {"dp": rank // 4, "tp": rank % 4},
    }
    return phase(name, rank=rank, **(known | more))


def recorded(*records: Record) -> RecordedOperation:
    """Return the save or load that these records are of, as a report reads it."""
    with tempfile.TemporaryDirectory() as folder:
        JsonLines(f"{folder}/events.jsonl").take(records)
        (found,) = read_operations([folder]).operations
    return found


def sixteen_ranks(folder: Path) -> RecordedOperation:
    """Write the events of a save in which one rank is slow and one fails, and return the read ones."""
    for rank in range(16):
        sink = JsonLines(str(folder / f"{rank // 8}.jsonl"))
        sink.take([of_rank("collect", rank, 0, 0.1)])
        sink.take([of_rank("write", rank, 0.1, 3 if rank == SLOW else 1, nbytes=1 << 30, process="agent")])
        if rank == FAILED:
            failed = {"outcome": "StorageFullError", "detail": "make room"}
            sink.take([of_rank("commit", rank, 1.1, 0.1, **failed)])
            sink.take([of_rank("assign", rank, 0, 1.2, **failed)])
    operations, num_invalid, *_ = read_operations([str(folder)])
    assert (len(operations), num_invalid) == (1, 0)
    return operations[0]
