"""Operations of stores, summed over ranks: requests, bytes, latencies, errors by host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.monitor.files import KnownNames, OperationRows
from reknit.monitor.storage_figures import (
    Bar,
    StorageFigures,
    error_texts,
    histogram,
    histogram_lines,
    storage_figures,
    storage_rows,
    time_text,
)
from tests.monitor.records import operation

if TYPE_CHECKING:
    from reknit.events.records import StorageRecord


def waited(rank: int, seconds: float, name: str = "write", **more: Any) -> StorageRecord:
    known: dict[str, Any] = {"nbytes": 1 << 30, "at_once": rank, "host": f"host{rank // 2}"}
    return operation(name, rank=rank, seconds=seconds, **(known | more))


def figures() -> dict[tuple[str, str], StorageFigures]:
    """Return the operations of four ranks, of which one waited long and two failed."""
    rows = OperationRows(KnownNames())
    for rank, seconds in enumerate((0.001, 0.001, 0.003, 2.0)):
        failed: dict[str, Any] = (
            {} if rank < 2 else {"outcome": "DeadlineError", "nbytes": 0, "retries": rank}
        )
        rows.append(waited(rank, seconds, **failed))
    rows.append(waited(0, 5e-5, "get", nbytes=0))
    return storage_figures(rows)


def test_a_table_adds_up_all_ranks() -> None:
    rows = storage_rows(figures(), 4.0)
    assert rows[0] == (
        "write", "s3://bucket", "4", "1", "512.0 MiB/s", "1.02 ms", "2 s", "2 s", "3", "5", "2"
    )  # fmt: skip
    assert rows[1] == ("get", "s3://bucket", "1", "0.25", "-", "50 us", "50 us", "50 us", "0", "0", "0")
    assert storage_rows(figures(), 0.0)[0][3:5] == ("-", "-")


def test_errors_are_named_with_their_host_and_number() -> None:
    assert list(error_texts(figures())) == ["2 times DeadlineError from write of s3://bucket on host1"]


def test_a_histogram_has_a_bar_for_each_power_of_two() -> None:
    bars = histogram(figures()["write", "s3://bucket"])
    assert bars[0] == Bar(1024e-6, 2)
    assert bars[2] == Bar(4096e-6, 1)
    assert bars[-1] == Bar(2**21 / 1e6, 1)
    assert len(bars) == 12
    assert histogram(StorageFigures()) == []
    lines = list(histogram_lines(figures(), width=10))
    assert lines[0] == "latencies of write (s3://bucket):"
    assert lines[1].split() == ["up", "to", "1.02", "ms", "2", "#" * 10]
    assert lines[2].split() == ["up", "to", "2.05", "ms", "0"]
    assert "latencies of get (s3://bucket):" in lines


def test_times_are_short() -> None:
    texts = {0.0: "0 us", 0.00005: "50 us", 0.25: "250 ms", 75.0: "75 s"}
    assert {seconds: time_text(seconds) for seconds in texts} == texts
