"""How many events a second does a sink take, and what do good and bad sinks cost a save?  Prints JSON.

Run: python benchmarks/events/run.py [--events 500000] [--mb 100] [--repeat 15] [--saves 300]

Saves beside a sink that hangs, fails, is full or lies are compared with saves beside a good sink and without
one.  Saves of 1 MB take milliseconds, so that any wait and the cost of the records show.  Each round has one
save beside each sink and two without a sink, in a random order.  A ratio is the median over the rounds: the
time of a save by that of the save without a sink of its round.  The times are those until the save is
committed, and of the processor, in the calling thread and in all threads.  ``more_us`` is the median of the
differences.  The ratios of the two saves without a sink are the noise.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from prometheus_client import CollectorRegistry

import reknit
from reknit import sinks
from reknit.monitor.outlet import Outlet
from reknit.monitor.records import PhaseRecord, Record, StorageRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.locations import Sink


def records(number: int) -> list[Record]:
    """Return events of many ranks, half of them operations of stores."""
    now, found = time.time(), list[Record]()
    for n in range(number // 2):
        common: dict[str, Any] = {"rank": n % 64, "step": n // 1000, "started": now, "outcome": "ok"}
        common |= {"action": "save", "path": f"run/step_{n // 1000}", "host": "host", "process": "agent"}
        place = {"dp": 3, "tp": 1}
        found.append(
            PhaseRecord(phase="write", seconds=1.5, nbytes=1 << 30, ended=now + 1, coordinate=place, **common)
        )
        found.append(
            StorageRecord(
                operation="write",
                store="s3://bucket",
                seconds=0.1,
                nbytes=8 << 20,
                retries=0,
                at_once=4,
                **common,
            )
        )
    return found


def rate(sink: Sink, reported: list[Record]) -> dict[str, float]:
    """Return the events per second that pass through a ring into a sink, and the caller's cost of `put`."""
    outlet = Outlet(sink, "sink", capacity=len(reported))
    begin = time.perf_counter()
    for record in reported:
        outlet.put(record)
    put_s = time.perf_counter() - begin
    while not outlet.flush(600):
        time.sleep(0.01)
    whole_s = time.perf_counter() - begin
    return {"events_per_s": round(len(reported) / whole_s), "put_us": round(put_s / len(reported) * 1e6, 2)}


def overhead(folder: Path, nbytes: int, repeat: int) -> dict[str, Any]:
    """Return the milliseconds of saves with all sinks off and on, in turns.

    ``whole``: until the checkpoint exists.  ``call``: until `save` returns.  ``thread`` and ``process``: CPU
    time of the calling thread until then, and of its process until the checkpoint exists, with all sinks.
    """
    state = {"model": {"w": np.random.default_rng(0).random(nbytes // 8)}}
    everything: list[Any] = [
        f"{folder}/lines/",
        sinks.DuckDB(f"{folder}/database/"),
        sinks.Prometheus(CollectorRegistry()),
        sinks.OpenTelemetry(),
    ]
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for wait in (True, False):
        turns = found[f"wait={wait}"] = {"without": [], "with": []}
        for number in range(repeat + 2):
            for kind in tuple(turns)[:: 1 if number % 2 else -1]:
                options = reknit.SaveOptions(
                    events=everything if kind == "with" else None, durability="process"
                )
                turns[kind].append(_times(folder / "checkpoint", state, wait, options))
    reknit.close()
    return {name: _compared(turns["without"][2:], turns["with"][2:]) for name, turns in found.items()}


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


def beside_sinks(folder: Path, num_saves: int, nbytes: int) -> dict[str, Any]:
    """Return for each sink the ratio of the times of saves, and the longest save in milliseconds.

    Raises `AssertionError` if a save is not committed.
    """
    hanging = Hanging()
    kinds: dict[str, Any] = {
        "none": None,
        "none again": None,
        "good": Good(),
        "hanging": hanging,
        "failing": Failing(),
        "full": Full(),
        "lying": Lying(),
    }
    state = {"model": {"w": np.random.default_rng(0).random(nbytes // 8)}}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    names = list(kinds)
    try:
        for number in range(num_saves + 2):
            for name in random.Random(number).sample(names, len(names)):
                options = reknit.SaveOptions(events=kinds[name], durability="process")
                place = folder / f"{name}-{number}"
                found[name].append(_times(place, state, True, options))
    finally:
        hanging.released.set()
    later = {name: times[2:] for name, times in found.items()}
    return {
        name: {
            "ratio": _ratio(times, later["none"], "whole"),
            "more_us": _more_us(times, later["none"]),
            "ratio_thread_cpu": _ratio(times, later["none"], "thread"),
            "ratio_process_cpu": _ratio(times, later["none"], "process"),
            "median_ms": round(statistics.median(each["whole"] for each in times), 3),
            "quick_ms": round(statistics.quantiles((each["whole"] for each in times), n=10)[0], 3),
            "longest_ms": round(max(each["whole"] for each in found[name]), 1),
        }
        for name, times in later.items()
    }


def _ratio(times: list[dict[str, float]], others: list[dict[str, float]], what: str) -> float:
    """Return the median over the rounds of the ratio of two times."""
    return round(statistics.median(a[what] / b[what] for a, b in zip(times, others, strict=True)), 4)


def _more_us(times: list[dict[str, float]], others: list[dict[str, float]]) -> float:
    """Return the median over the rounds of the difference of two times, in microseconds."""
    differences = (a["whole"] - b["whole"] for a, b in zip(times, others, strict=True))
    return round(statistics.median(differences) * 1e3, 1)


def _times(place: Path, state: dict[str, Any], wait: bool, options: reknit.SaveOptions) -> dict[str, float]:
    """Save once, and return the times that it took in milliseconds."""
    begin, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
    pending = reknit.save(place, state, wait=wait, options=options)
    call, thread = time.perf_counter() - begin, time.thread_time() - thread
    pending.result()
    whole, process = time.perf_counter() - begin, time.process_time() - process
    assert reknit.latest(place.parent) == str(place)
    shutil.rmtree(place)
    return {"whole": whole * 1e3, "call": call * 1e3, "thread": thread * 1e3, "process": process * 1e3}


def _compared(without: list[dict[str, float]], others: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians, and the additional time of the median save with all sinks on."""
    medians = {
        name: [statistics.median(each[name] for each in times) for times in (without, others)]
        for name in without[0]
    }
    return {
        name: {"without": round(a, 3), "with": round(b, 3), "per cent more": round(100 * (b / a - 1), 2)}
        for name, (a, b) in medians.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=500_000)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--saves", type=int, default=300)
    args = parser.parse_args()
    reported = records(args.events)
    with tempfile.TemporaryDirectory() as folder:
        answer: dict[str, Any] = {
            "DuckDB": rate(sinks.DuckDB(f"{folder}/events.duckdb"), reported),
            "JsonLines": rate(sinks.JsonLines(f"{folder}/events.jsonl"), reported),
            "Prometheus": rate(sinks.Prometheus(CollectorRegistry()), reported),
            "OpenTelemetry, no SDK": rate(sinks.OpenTelemetry(), reported),
            f"save of {args.mb} MB": overhead(Path(folder), args.mb * 1_000_000, args.repeat),
            "saves of 1 MB beside sinks": beside_sinks(Path(folder), args.saves, 1_000_000),
            f"saves of {args.mb} MB beside sinks": beside_sinks(
                Path(folder), args.saves // 2, args.mb * 1_000_000
            ),
        }
    print(json.dumps(answer, indent=2))


if __name__ == "__main__":
    main()
