"""Tables 1 to 5 of the Orbax paper, scaled down: reknit and Orbax itself on the same JAX job on the CPU.

Every process of a job calls both by turns, to fresh folders.  Tables 1 and 2 have one process with four
devices, table 3 one with eight.  For tables 4 and 5 each replica is a process of its own.  Loaded arrays are
compared with the saved arrays.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any

from benchmarks.orbax import job
from benchmarks.orbax.contestants import Mode
from benchmarks.paper.results import About, Measured, Row, small
from benchmarks.storage.places import folder, prepare

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ABOUT = About(
    name="orbax",
    source="Orbax, Tables 1 to 5",
    title="the tables of the Orbax paper, with Orbax beside reknit",
    paper="Orbax over DCP: blocking 0.5 to 0.6 times, background 0.6 to 3.4 times, load 1.4 to 2 times; "
    "OCDBT 0.57 to 1.34 times; subchunks 1.94 to 5.68 times when loads reshard; all replicas write 1.67 to "
    "2.39 times; one replica reads 0.79 to 4.93 times.",
)
OURS, ORBAX = "reknit", "Orbax"
PLAIN = (Mode(OURS, reknit=True), Mode(ORBAX))
FORMATS = (Mode(OURS, reknit=True), Mode(ORBAX), Mode("Orbax, no OCDBT", ocdbt=False))
SUBCHUNKS = 1 << 20
CHUNKED = (*PLAIN, Mode("Orbax, subchunks", chunk_nbytes=SUBCHUNKS))
REPLICAS = (
    Mode(OURS, reknit=True, share="always"),
    Mode("reknit, each reads all", reknit=True, share="never"),
    Mode(ORBAX, broadcast=True),
    Mode("Orbax, one writes, each reads all", replica_parallel=False),
)
SHIFTS = {"2-2-2 (no change)": (2, 2, 2), "2-2-2 to 1-8-1": (1, 8, 1), "2-2-2 to 1-2-1": (1, 2, 1)}
WHY = {
    "blocking": "a save into new memory of another process; Orbax copies nothing where the device is the CPU",
    "save": "reknit syncs its files and computes digests; Orbax does neither",
    "load": "reknit checks every byte against its digest; Orbax does not",
    "read": "a verified read begins and ends with a block of 4 MiB",
}


def measure(scratch: Path) -> Measured:
    """Measure every table for which the packages and servers are there."""
    if lacking := [name for name in ("jax", "orbax") if find_spec(name) is None]:
        return Measured([], {"all tables": f"{', '.join(lacking)} is not installed"})
    rows: list[Row] = []
    skipped = {
        "GPUs and TPUs": "devices are those of the host, so that no copy from a device is measured",
        "Orbax on an object store": "its paths of S3 need s3fs, which is not installed"
        if find_spec("s3fs") is None
        else "only reknit counts its operations there",
        "16 and 32 replicas": "each is a process of JAX, and two cores do not serve so many",
    }
    for part in (_tables_1_and_2, _table_3, _tables_4_and_5):
        found, failed = part(str(scratch))
        rows += found
        skipped |= failed
    if (reason := _server()) is None:
        rows += _on_a_store()
    else:
        skipped["requests to an object store"] = reason
    return Measured(
        rows,
        skipped,
        [
            "P50 and P90 are of 20 rounds; Orbax's time is divided by reknit's.",
            "reknit syncs and verifies; Orbax does not sync files and has no digests.",
        ],
    )


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def _failed(found: dict[str, Any], what: str) -> dict[str, str]:
    return {f"{who}, {what}": each["failed"][-200:] for who, each in found.items() if "failed" in each}


def _pair(found: dict[str, Any], quantity: str, others: Sequence[str]) -> dict[str, list[float]]:
    return {who: found[who][quantity] for who in (OURS, *others) if "failed" not in found[who]}


def _tables_1_and_2(scratch: str) -> tuple[list[Row], dict[str, str]]:
    """Return P50 and P90 of blocking, background and load, and the same without OCDBT."""
    mib, rounds = (8, 2) if small() else (256, 20)
    found = job.run(
        f"{scratch}/formats",
        FORMATS,
        mib=mib,
        arrays=32,
        mesh=(1, 4, 1),
        meshes={"same": (1, 4, 1)},
        rounds=rounds,
    )
    rows = []
    for what, quantity, why in (
        ("save, blocking", "blocking_s", WHY["blocking"]),
        ("save, background", "background_s", WHY["save"]),
        ("load", "load_s same", WHY["load"]),
    ):
        figures = _pair(found, quantity, (ORBAX,))
        rows.append(Row(f"table 1, {mib} MiB: {what}, P50", "s", figures, ORBAX, why=why))
        tails = {who: [_p90(values)] for who, values in figures.items()}
        rows.append(Row(f"table 1, {mib} MiB: {what}, P90", "s", tails, ORBAX, why=why))
        without = _pair(found, quantity, (FORMATS[2].name,))
        rows.append(Row(f"table 2: {what}, against no OCDBT", "s", without, FORMATS[2].name, why=why))
    files = {who: [each["files"][-1]] for who, each in found.items() if "failed" not in each}
    rows.append(Row("table 2: files of a checkpoint", "files", files, ORBAX))
    return rows, _failed(found, "tables 1 and 2")


def _table_3(scratch: str) -> tuple[list[Row], dict[str, str]]:
    """Return times and bytes of loads onto other meshes."""
    mib, rounds = (8, 1) if small() else (128, 8)
    found = job.run(
        f"{scratch}/shifts", CHUNKED, mib=mib, arrays=16, mesh=(2, 2, 2), meshes=SHIFTS, rounds=rounds
    )
    rows = []
    for shift in SHIFTS:
        for other in (ORBAX, CHUNKED[2].name):
            figures = _pair(found, f"load_s {shift}", (other,))
            spread = ", ".join(f"{who} {_mean(values)}" for who, values in figures.items())
            what = f"table 3, data-fsdp-tensor {shift}: load, against {other}"
            rows.append(Row(what, f"s (mean: {spread})", figures, other, why=WHY["load"]))
        read = _pair(found, f"sum_read_nbytes {shift}", (ORBAX, CHUNKED[2].name))
        exact = {who: [int(median(values))] for who, values in read.items()}
        rows.append(Row(f"table 3, {shift}: bytes read", "bytes", exact, ORBAX, why=WHY["read"]))
    return rows, _failed(found, "table 3")


def _mean(values: Sequence[float]) -> str:
    return f"{mean(values):.3g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")


def _tables_4_and_5(scratch: str) -> tuple[list[Row], dict[str, str]]:
    """Return the times of saves and loads of replicated arrays, and the bytes written and read."""
    mib, rounds = (8, 1) if small() else (64, 5)
    rows: list[Row] = []
    failed: dict[str, str] = {}
    one_writes = REPLICAS[3].name
    for count in (2,) if small() else (2, 4, 8):
        mesh = (count, 1, 1)
        found = job.run(
            f"{scratch}/replicas-{count}",
            REPLICAS,
            mib=mib,
            arrays=16,
            mesh=mesh,
            meshes={"same": mesh},
            rounds=rounds,
            processes=count,
        )
        failed |= _failed(found, f"tables 4 and 5, {count} replicas")
        there = [who for who in (ORBAX, one_writes) if "failed" not in found[who]]
        for other in there:
            mode = "all replicas write" if other == ORBAX else "one replica writes"
            figures = _pair(found, "save_s", (other,))
            what = f"table 4, {count} replicas: save, Orbax: {mode}"
            rows.append(Row(what, "s", figures, other, why=WHY["save"]))
        written = _pair(found, "most_wrote_nbytes", there)
        exact = {who: [int(median(values))] for who, values in written.items()}
        if one_writes in there:
            what = f"table 4, {count} replicas: bytes that one process writes at most"
            rows.append(Row(what, "bytes", exact, one_writes))
        each = REPLICAS[1].name
        for ours, other, mode in (
            (OURS, ORBAX, "one replica reads"),
            (each, one_writes, "each reads all"),
        ):
            if other in there:
                figures = {who: found[who]["load_s same"] for who in (ours, other)}
                what = f"table 5, {count} replicas: load, {mode}"
                rows.append(Row(what, "s", figures, other, ours, why=WHY["load"]))
        reads = {who: found[who]["sum_read_nbytes same"] for who in (OURS, each, *there)}
        exact = {who: [int(median(values))] for who, values in reads.items()}
        what = f"table 5, {count} replicas: bytes read by all"
        rows.append(Row(what, "bytes", exact, each))
    return rows, failed


def _server() -> str | None:
    """Return the reason why no object store is there, or None."""
    if find_spec("obstore") is None:
        return "obstore is not installed"
    if folder("s3") is None:
        return "no server is up: scripts/servers up s3"
    prepare("s3")
    return None


def _on_a_store() -> list[Row]:
    """Return the operations of reknit on an object store, with reads shared and not."""
    rows = []
    each = REPLICAS[1].name
    for count in (2,) if small() else (2, 4, 8):
        mesh = (count, 1, 1)
        found = job.run(
            str(folder("s3")),
            REPLICAS[:2],
            mib=8 if small() else 64,
            arrays=16,
            mesh=mesh,
            meshes={"same": mesh},
            rounds=1 if small() else 3,
            processes=count,
        )
        name = f"S3, {count} replicas"
        for what, quantity in (
            ("operations of a load", "sum_load_operations same"),
            ("operations of a save", "sum_save_operations"),
        ):
            figures = {who: [int(median(found[who][quantity]))] for who in (OURS, each)}
            if what.endswith("save"):  # saves are the same in both modes
                rows.append(Row(f"{name}: {what}", "operations", {OURS: figures[OURS]}))
            else:
                rows.append(Row(f"{name}: {what}", "operations", figures, each))
        times = {who: found[who]["load_s same"] for who in (OURS, each)}
        why = "the server is on the same machine, so that reading twice costs little"
        rows.append(Row(f"{name}: load", "s", times, each, why=why))
    return rows
