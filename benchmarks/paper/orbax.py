"""Tables 1 to 5 of the Orbax paper, scaled down: reknit and Orbax itself on the same JAX job on the CPU.

Every process of a job calls both by turns, to fresh folders.  Tables 1 and 2 have one process with four
devices, table 3 one with eight.  For tables 4 and 5 each replica is a process of its own; up to 32 replicas
on an object store are threads with NumPy, without Orbax.  Loaded arrays are compared with the saved arrays.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any

from benchmarks.paper.jobs import orbax_job as job
from benchmarks.paper.jobs import replicas
from benchmarks.paper.jobs.orbax_job import Mode
from benchmarks.paper.jobs.places import started
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
    "within": "all replicas share two cores and one disk, and no network limits them",
    "chunks": "the files are in the page cache, from which parts of a chunk are read as quickly",
    "read": "a verified read begins and ends with a block of 4 MiB",
}

# The factors of the paper's own comparisons; those of table 5 for 8 replicas are missing there.
PAPER_2 = {"background_s": (0.57, 1.29, 1.34), "load_s same": (0.79, 0.97, 1.1)}
PAPER_3 = {"2-2-2 to 1-8-1": (3.37, 5.68), "2-2-2 to 1-2-1": (1.94, 2.39)}
PAPER_4: dict[int, tuple[float, ...]] = {2: (1.67,), 4: (1.98,), 8: (2.35,)}
PAPER_5: dict[int, tuple[float, ...]] = {2: (0.79,), 4: (1.55,), 8: ()}


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
        "tables 4 and 5, 16 and 32 replicas of JAX": "two cores do not serve so many processes; the rows of "
        "the object store, where ranks are threads with NumPy, have them",
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
            "reknit syncs and verifies; Orbax compresses, does not sync files, and has no digests.",
        ],
    )


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def _failed(found: dict[str, Any], what: str) -> dict[str, str]:
    return {f"{who}, {what}": each["failed"][-200:] for who, each in found.items() if "failed" in each}


def _within(
    what: str, found: dict[str, Any], quantity: str, pair: tuple[str, str], paper: Sequence[float]
) -> list[Row]:
    """Return the row of two modes of one contestant, which is the paper's own comparison."""
    if any("failed" in found[who] for who in pair):
        return []
    figures = {who: found[who][quantity] for who in pair}
    why = WHY["chunks" if "table 3" in what else "within"]
    return [Row(f"{what}, {pair[0]} over {pair[1]}", "s", figures, pair[1], pair[0], paper, why)]


def _pair(found: dict[str, Any], quantity: str, others: Sequence[str]) -> dict[str, list[float]]:
    return {who: found[who][quantity] for who in (OURS, *others) if "failed" not in found[who]}


def _tables_1_and_2(scratch: str) -> tuple[list[Row], dict[str, str]]:
    """Return P50 and P90 of blocking, background and load, and the same without OCDBT."""
    mib, rounds = (8, 2) if small() else (128, 20)
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
        if quantity in PAPER_2:
            rows += _within(f"table 2: {what}", found, quantity, (ORBAX, FORMATS[2].name), PAPER_2[quantity])
    files = {who: [each["files"][-1]] for who, each in found.items() if "failed" not in each}
    rows.append(Row("table 2: files of a checkpoint", "files", files, ORBAX))
    return rows, _failed(found, "tables 1 and 2")


def _table_3(scratch: str) -> tuple[list[Row], dict[str, str]]:
    """Return times and bytes of loads onto other meshes."""
    mib, rounds = (8, 1) if small() else (128, 5)
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
        if shift in PAPER_3:
            pair = (CHUNKED[2].name, ORBAX)
            rows += _within(f"table 3, {shift}: load", found, f"load_s {shift}", pair, PAPER_3[shift])
        read = _pair(found, f"sum_read_nbytes {shift}", (ORBAX, CHUNKED[2].name))
        exact = {who: [int(median(values))] for who, values in read.items()}
        rows.append(Row(f"table 3, {shift}: bytes read", "bytes", exact, ORBAX, why=WHY["read"]))
    return rows, _failed(found, "table 3")


def _mean(values: Sequence[float]) -> str:
    return f"{mean(values):.3g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")


def _tables_4_and_5(scratch: str) -> tuple[list[Row], dict[str, str]]:
    """Return the times of saves and loads of replicated arrays, and the bytes written and read."""
    mib, rounds = (8, 1) if small() else (32, 4)
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
        rows += _within(
            f"table 4, {count} replicas: save", found, "save_s", (ORBAX, one_writes), PAPER_4[count]
        )
        written = _pair(found, "most_wrote_nbytes", there)
        exact = {who: [int(median(values))] for who, values in written.items()}
        if one_writes in there:
            what = f"table 4, {count} replicas: bytes that one process writes at most"
            rows.append(Row(what, "bytes", exact, one_writes))
        each = REPLICAS[1].name
        for ours, other, mode in ((OURS, ORBAX, "one replica reads"), (each, one_writes, "each reads all")):
            if other in there:
                figures = {who: found[who]["load_s same"] for who in (ours, other)}
                what = f"table 5, {count} replicas: load, {mode}"
                rows.append(Row(what, "s", figures, other, ours, why=WHY["load"]))
        for pair in ((ORBAX, one_writes), (OURS, each)):
            rows += _within(f"table 5, {count} replicas: load", found, "load_s same", pair, PAPER_5[count])
        reads = {who: found[who]["sum_read_nbytes same"] for who in (OURS, each, *there)}
        exact = {who: [int(median(values))] for who, values in reads.items()}
        what = f"table 5, {count} replicas: bytes read by all"
        rows.append(Row(what, "bytes", exact, each))
    return rows, failed


def _server() -> str | None:
    """Return the reason why no object store is there, or None."""
    if find_spec("obstore") is None:
        return "obstore is not installed"
    if why := started("s3"):
        return why
    prepare("s3")
    return None


def _on_a_store() -> list[Row]:
    """Return the operations of reknit on an object store, with reads shared and not."""
    rows = []
    mib = 8 if small() else 32
    each = "each reads all"
    for count in (2, 4) if small() else (2, 4, 8, 16, 32):
        shared, alone = (
            replicas.count(str(folder("s3")), count, mib=mib, arrays=32, share=share)
            for share in ("always", "never")
        )
        name = f"S3, {count} replicas, {mib} MiB"
        rows += [
            Row(f"{name}: operations of a save", "operations", {OURS: [shared.save]}),
            Row(
                f"{name}: operations of a load", "operations", {OURS: [shared.load], each: [alone.load]}, each
            ),
            Row(
                f"{name}: bytes read", "bytes", {OURS: [shared.read_nbytes], each: [alone.read_nbytes]}, each
            ),
            Row(
                f"{name}: bytes that one replica writes at most",
                "bytes",
                {OURS: [shared.most_written_nbytes], "the whole state": [mib << 20]},
                "the whole state",
            ),
        ]
    return rows
