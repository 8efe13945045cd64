"""The notes that the ranks of the demo write while they run, and their reader."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reknit.dataloader import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Journal:
    """What the first rank of a run wrote down."""

    losses: dict[int, float] = field(default_factory=dict)
    first: int = 0
    loaded: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""


def read_journal(path: Path) -> Journal:
    """Read the JSON lines of a run, which may still be writing them."""
    journal = Journal()
    lines = path.read_text() if path.exists() else ""
    for line in lines[: lines.rfind("\n") + 1].splitlines():
        record = json.loads(line)
        if "loss" in record:
            journal.losses[record["step"]] = record["loss"]
        elif "first" in record:
            journal.first = record["first"]
        elif "notes" in record:
            journal.loaded = record
        else:
            journal.fingerprint = record["fingerprint"]
    return journal


def read_ledger(ledger: Path, rank: int) -> list[dict[str, Any]]:
    """Return the batches that a rank wrote down, but for a line that is still being written."""
    path = Path(f"{ledger}-{rank}.jsonl")
    lines = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in lines[: lines.rfind("\n") + 1].splitlines()]


def by_source(batches: Sequence[Any]) -> dict[int, list[Any]]:
    """Return what was consumed of each source, in the order in which it was."""
    found: dict[int, list[Any]] = {}
    for samples in batches:
        for row in samples:
            found.setdefault(row[COLUMNS.index("source")], []).append(row)
    return found
