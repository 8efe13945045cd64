"""The cost of a sink of events for each event, and of good and bad sinks for a save.

Saves beside a sink that hangs, fails, is full or lies are compared with saves without one.  They take
milliseconds, so that any wait and the cost of the records show.  A second contestant without a sink shows the
noise.
"""

from __future__ import annotations

import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

import reknit
from benchmarks.table.rounds import Row
from benchmarks.turns import in_turn
from reknit import sinks
from reknit.events.outlet import Outlet
from reknit.events.records import PhaseRecord, Record, StorageRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.table.sizes import Sizes
    from benchmarks.timing import Bench
    from reknit.locations import Sink

NONE = "without a sink"


def rows(bench: Bench, sizes: Sizes) -> list[Row]:
    """Measure the sinks by themselves, and then beside small and large saves."""
    folder = Path(bench.folder).absolute()
    folder.mkdir(exist_ok=True)
    reported = _records(sizes.events)
    found = []
    for name, sink in _own(folder / "alone").items():
        row = Row(f"an event into {name}, of {sizes.events:,}", "µs")
        row.add("reknit", "ours", _seconds(sink, reported) / len(reported) * 1e6)
        found.append(row)
    found += beside_sinks(folder, sizes.sink_saves, 1)
    found += beside_sinks(folder, sizes.sink_saves // 10, sizes.warm_mb)
    bench.drop(bench.folder)
    return found


def _own(folder: Path) -> dict[str, Sink]:
    """Return the sinks of reknit that need no server."""
    from prometheus_client import CollectorRegistry

    return {
        "DuckDB": sinks.DuckDB(f"{folder}/events.duckdb"),
        "JsonLines": sinks.JsonLines(f"{folder}/events.jsonl"),
        "Prometheus": sinks.Prometheus(CollectorRegistry()),
        "OpenTelemetry, no SDK": sinks.OpenTelemetry(),
    }


def _records(number: int) -> list[Record]:
    """Return events of many ranks, half of them operations of stores."""
    now, found = time.time(), list[Record]()
    for n in range(number // 2):
        common: dict[str, Any] = {"rank": n % 64, "step": n // 1000, "started": now, "outcome": "ok"}
        common |= {"action": "save", "path": f"run/step_{n // 1000}", "host": "host", "process": "agent"}
        place = {"dp": 3, "tp": 1}
        found.append(
            PhaseRecord(phase="write", seconds=1.5, nbytes=1 << 30, ended=now + 1, coordinate=place, **common)
        )
        store: dict[str, Any] = {"operation": "write", "store": "s3://bucket", "retries": 0, "at_once": 4}
        found.append(StorageRecord(seconds=0.1, nbytes=8 << 20, **store, **common))
    return found


def _seconds(sink: Sink, reported: list[Record]) -> float:
    """Return the seconds in which events pass through a ring into a sink."""
    outlet = Outlet(sink, "sink", capacity=len(reported))
    begin = time.perf_counter()
    for record in reported:
        outlet.put(record)
    while not outlet.flush(600):
        time.sleep(0.01)
    return time.perf_counter() - begin


class Good:
    """A sink that needs no time."""

    def take(self, records: Sequence[Record]) -> None:
        """Return."""


class Hanging:
    """A sink that returns from its first call only when it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def take(self, records: Sequence[Record]) -> None:
        """Wait."""
        self.released.wait()


class Failing:
    """A sink that fails each time."""

    def take(self, records: Sequence[Record]) -> None:
        """Raise."""
        raise ConnectionError("the server refuses all records")


class Full:
    """A sink that writes to a disk without room."""

    def take(self, records: Sequence[Record]) -> None:
        """Write, which the system refuses."""
        with open("/dev/full", "wb", buffering=0) as file:
            for record in records:
                file.write(repr(record).encode())


class Lying:
    """A sink that keeps no record, empties each batch, and is equal to everything."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "sinks.JsonLines('/events')"

    def take(self, records: Sequence[Record]) -> None:
        """Return as after a success."""
        cast("list[Record]", records).clear()


def beside_sinks(folder: Path, num_saves: int, mb: int) -> list[Row]:
    """Return the time and the CPU time of saves beside each kind of sink, by turns.

    Raises `AssertionError` if a save is not committed.
    """
    hanging = Hanging()
    kinds: dict[str, Any] = {
        NONE: None,
        "none again": None,
        "good": Good(),
        "hanging": hanging,
        "failing": Failing(),
        "full": Full(),
        "lying": Lying(),
        "all of its own": list(_own(folder / "all").values()),
    }
    state = {"model": {"w": np.random.default_rng(0).random(mb * 1_000_000 // 8)}}
    ways = {kind: partial(_saved, folder / "saves", state, sink) for kind, sink in kinds.items()}
    try:
        taken = in_turn(ways, num_saves)
    finally:
        hanging.released.set()
    assert not taken.failed, taken.failed
    return [
        _row(f"save of {mb} MB beside sinks: {kind}, {what}", taken.of(what), kind)
        for kind in list(kinds)[1:]
        for what in ("time", "CPU time")
    ]


def _row(name: str, figures: Mapping[str, list[float]], kind: str) -> Row:
    row = Row(name, "s")
    row.add("reknit", "ours", *figures[kind])
    row.add(NONE, "limit", *figures[NONE])
    return row


def _saved(above: Path, state: dict[str, Any], sink: Any, number: int) -> dict[str, float]:
    """Save once, and return the seconds until the checkpoint exists."""
    options = reknit.SaveOptions(events=sink, durability="process")
    begin, process = time.perf_counter(), time.process_time()
    reknit.save(above / f"step_{number + 1}", state, options=options).result()
    figures = {"time": time.perf_counter() - begin, "CPU time": time.process_time() - process}
    assert reknit.latest(above) == str(above / f"step_{number + 1}")
    shutil.rmtree(above)
    return figures
