"""Each sink against the real thing: the records of a save and a load are there afterwards."""

from __future__ import annotations

import json
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit import sinks
from reknit.cli.main import main
from reknit.errors import MissingExtraError, StorageError
from reknit.events.outlet import LostRecords
from reknit.events.records import DroppedRecord, Record
from reknit.monitor.files import RecordFiles
from reknit.monitor.operations import read_operations
from tests.monitor.records import operation, phase
from tests.resources import small_disk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STATE = {"model": {"w": np.arange(1 << 18, dtype=np.float32)}}


LOST = DroppedRecord(5, "host0", 1_790_000_000.0)
A_SAVE: list[Record] = [
    phase("collect", ended=1_790_000_000.5, seconds=0.25),
    phase("plan", started=1_790_000_000.6, ended=1_790_000_000.7, seconds=0.1, process="agent"),
    operation("write"),
    operation("write", outcome="DeadlineError", retries=3),
    phase("write", started=1_790_000_000.7, ended=1_790_000_001.0, seconds=0.5, process="agent"),
    phase("commit", started=1_790_000_000.5, ended=1_790_000_001.1, seconds=0.6, process="agent"),
    phase("save"),
    LOST,
]


# DuckDB


def test_duckdb_has_all_that_a_save_told_and_reports_read_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("duckdb")
    import duckdb

    sink = sinks.DuckDB(f"{tmp_path}/events/")
    lines = f"{tmp_path}/lines/"
    options = reknit.SaveOptions(events=[sink, lines])
    for step, wait in ((1, True), (2, False)):
        reknit.save(tmp_path / f"{step}", STATE, step=step, wait=wait, options=options).result(60)
    assert reknit.close(60)
    assert sinks.flush(60)
    from_lines, from_database = (read_operations([place]) for place in (lines, f"{tmp_path}/events"))
    assert [str(one) for one in from_database.operations] == [str(one) for one in from_lines.operations]
    for ours, theirs in zip(from_database.operations, from_lines.operations, strict=True):
        assert ours.storage == theirs.storage
        for mine, other in zip(
            sorted(ours.events, key=lambda e: (e.ended, e.phase)),
            sorted(theirs.events, key=lambda e: (e.ended, e.phase)),
            strict=True,
        ):
            assert mine.ended == pytest.approx(other.ended, abs=1e-5)
            assert (mine.lane, mine.seconds, mine.nbytes, mine.step) == (
                other.lane, other.seconds, other.nbytes, other.step
            )  # fmt: skip
    assert main(["report", f"{tmp_path}/events"]) == 0
    assert "latencies of" in capsys.readouterr().out
    with duckdb.connect(sink.path, read_only=True) as database:
        found = database.execute(
            "SELECT count(*) FROM phases WHERE phase = 'save' AND outcome = 'ok'"
        ).fetchone()
    assert found == (2,)


def test_each_record_is_read_once_as_it_was_written(tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [(sinks.JsonLines, ".jsonl"), (sinks.DuckDB, ".duckdb")]
    for sink, suffix in cases:
        pytest.importorskip("duckdb")
        path, files = tmp_path / f"events{suffix}", RecordFiles()
        for invalid in (1, 2):
            sink(path).take([*A_SAVE, phase("write", behind_s=1e300)])
            assert sorted(files.read(path), key=str) == sorted(A_SAVE, key=str), sink
            assert files.num_invalid == invalid, sink


def test_duckdb_has_the_rest_of_a_batch_with_a_wrong_record(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    sink = sinks.DuckDB(tmp_path / "events.duckdb")
    with pytest.raises(LostRecords):
        sink.take([*A_SAVE, phase("write", nbytes="many")])
    sink.take(A_SAVE)
    sink.rest()
    assert len(read_operations([str(tmp_path)]).operations[0].events) == 2 * 5


def test_duckdb_waits_for_somebody_who_has_the_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader waits for a process that writes, and a writer for one that reads."""
    duckdb = pytest.importorskip("duckdb")
    sink = sinks.DuckDB(tmp_path / "events.duckdb")
    sink.take(A_SAVE)
    sink.rest()
    connect, refused = duckdb.connect, list[Any]()

    def busy(*args: Any, **more: Any) -> Any:
        if len(refused) % 3 < 2:
            refused.append(more)
            raise duckdb.IOException("could not set lock on the file: another process has it")
        refused.append(more)
        return connect(*args, **more)

    monkeypatch.setattr(duckdb, "connect", busy)
    sink.take(A_SAVE)
    sink.rest()
    assert len(refused) == 3
    assert len(read_operations([str(tmp_path)]).operations[0].events) == 2 * 5
    assert len(refused) == 6


def test_a_database_of_a_stranger_reads_no_other_file(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    (tmp_path / "secret").write_text("secret")
    with duckdb.connect(str(tmp_path / "events.duckdb")) as made:
        made.execute(f"CREATE VIEW phases AS SELECT content AS phase FROM read_text('{tmp_path}/secret')")
    with pytest.raises(StorageError, match="not a database of events"):
        list(RecordFiles().read(tmp_path / "events.duckdb"))


def test_a_database_is_read_without_access_to_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    duckdb = pytest.importorskip("duckdb")
    sinks.DuckDB(tmp_path / "events.duckdb").take(A_SAVE)
    connect, given = duckdb.connect, list[Any]()

    def connected(*args: Any, **options: Any) -> Any:
        given.append(options["config"]["enable_external_access"])
        return connect(*args, **options)

    monkeypatch.setattr(duckdb, "connect", connected)
    assert list(RecordFiles().read(tmp_path / "events.duckdb"))
    assert given == ["false"]


def test_a_file_of_lines_that_several_write_at_once_has_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    many = 40 * A_SAVE

    def append() -> None:
        sink = sinks.JsonLines(path)
        for _ in range(10):
            sink.take(many)

    threads = [threading.Thread(target=append) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = path.read_bytes().splitlines()
    assert len(lines) == 4 * 10 * len(many)
    assert all(json.loads(line)["host"] == "host0" for line in lines)


# A full disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "1m") as mounted:
        yield mounted


def test_a_path_that_no_file_can_have_is_told_at_once(tmp_path: Path) -> None:
    for name in ("a" * 300, "a/" * 3_000, "a\0b", "a" * 5_000 + "/", "file.jsonl/x"):
        (tmp_path / "file.jsonl").touch()
        with pytest.raises(reknit.StorageError, match="cannot append to the event file"):
            sinks.JsonLines(f"{tmp_path}/{name}")


@pytest.mark.parametrize("kind", ["lines", "database"])
def test_a_full_disk_for_events_disturbs_no_save_and_is_told(
    kind: str, disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("duckdb")
    place = f"{disk}/events/"
    options = reknit.SaveOptions(events=place if kind == "lines" else sinks.DuckDB(place))

    def save(step: int) -> None:
        reknit.save(tmp_path / f"{step}", STATE, step=step, options=options)
        assert sinks.flush(60)

    save(0)
    with (disk / "rest").open("wb", buffering=0) as rest, suppress(OSError):
        while rest.write(bytes(4096)):
            pass
    with (disk / "rest").open("ab", buffering=0) as rest, suppress(OSError):
        while rest.write(b"x"):
            pass
    for step in (1, 2, 3):
        save(step)
    assert "No space left" in caplog.text
    assert caplog.text.count("events are lost") <= 3, "once for each outage"
    (disk / "rest").unlink()
    save(4)
    operations, _, num_dropped, _ = read_operations([place])
    assert {0, 4} <= {operation.step for operation in operations}
    assert num_dropped > 0


# Prometheus


def test_prometheus_is_given_counts_latencies_and_the_last_success() -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    sink = sinks.Prometheus(registry)
    sink.take(
        [*A_SAVE, phase("commit", outcome="CommitError"), phase("save", outcome="CommitError", ended=2e9)]
    )

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("reknit_phase_seconds_count", action="save", phase="write", process="agent") == 1
    assert value("reknit_phase_bytes_total", action="save", phase="write", process="agent") == 1 << 30
    assert value("reknit_storage_seconds_bucket", operation="write", store="s3://bucket", le="1.0") == 2
    assert value("reknit_storage_bytes_total", operation="write", store="s3://bucket") == 200
    assert value("reknit_storage_retries_total", operation="write", store="s3://bucket") == 3
    assert (
        value("reknit_storage_errors_total", operation="write", store="s3://bucket", outcome="DeadlineError")
        == 1
    )
    assert value("reknit_last_success_timestamp_seconds", action="save") == 1_790_000_001.25
    assert value("reknit_last_step", action="save") == 7
    assert (
        value(
            "reknit_phase_failures_total",
            action="save",
            phase="commit",
            process="trainer",
            outcome="CommitError",
        )
        == 1
    )
    assert value("reknit_events_dropped_total") == 5
    assert b"run/step_7" not in generate_latest(registry), "labels of which there are ever more"
    with pytest.raises(reknit.UsageError, match="Prometheus sink already"):
        sinks.Prometheus(registry)
    sink.take(A_SAVE)
    assert value("reknit_events_dropped_total") == 10, "the first one goes on"


def test_names_of_users_phases_do_not_grow_without_bound() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    sink = sinks.Prometheus(registry)
    sink.take([phase(f"step {number}", action="training", outcome=f"E{number}") for number in range(1000)])
    assert prometheus_client.generate_latest(registry).count(b"reknit_phase_seconds_count") == 201
    found = {"action": "training", "phase": "other", "process": "trainer"}
    assert registry.get_sample_value("reknit_phase_seconds_count", found) == 800


# OpenTelemetry


def test_opentelemetry_gets_a_span_for_a_save_with_its_phases_below() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    sink = sinks.OpenTelemetry(provider)
    sink.take(A_SAVE[:4])
    assert exporter.get_finished_spans() == ()
    sink.take([*A_SAVE[4:], phase("evaluate", action="training", outcome="KeyError")])
    spans = {span.name: span for span in exporter.get_finished_spans()}
    names = {span.context.span_id: name for name, span in spans.items() if span.context}
    above = {name: names[span.parent.span_id] for name, span in spans.items() if span.parent}
    assert above == {"collect": "save", "commit": "save", "plan": "commit", "write": "commit"}
    save = spans["save"]
    assert (save.start_time, save.end_time) == (1_790_000_000_250_000_000, 1_790_000_001_250_000_000)
    assert dict(save.attributes or {})["reknit.coordinate.dp"] == 1
    assert spans["evaluate"].status.description == "KeyError"


# Trackers


def test_tensorboard_shows_seconds_and_throughput_of_rank_0(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    sink = sinks.TensorBoard(writer)
    sink.take([*A_SAVE, phase("save", rank=1, path="other")])
    writer.close()
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    scalars = {
        name: [(one.step, one.value) for one in shown.Scalars(name)] for name in shown.Tags()["scalars"]
    }
    assert scalars["reknit/save/seconds"] == [(7, 1.0)]
    assert scalars["reknit/save/GiB_per_s"] == [(7, 1.0)]
    assert scalars["reknit/save/write_s"] == [(7, 0.5)]
    assert scalars["reknit/save/failed"] == [(7, 0.0)]


def test_mlflow_has_the_figures_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("saves")
    with mlflow.start_run() as run:
        sink = sinks.MLflow()
    with pytest.raises(reknit.UsageError, match="no run of MLflow"):
        sinks.MLflow()
    sink.take(A_SAVE)
    (figure,) = mlflow.MlflowClient().get_metric_history(run.info.run_id, "reknit/save/commit_s")
    assert (figure.step, figure.value) == (7, 0.6)


def test_wandb_has_the_figures_on_an_axis_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=tmp_path)
    try:
        sinks.WandB(run).take(A_SAVE)
        assert run.summary["reknit/save/write_s"] == 0.5
        assert run.summary["reknit/step"] == 7
    finally:
        run.finish()


def test_what_is_no_tracker_is_refused() -> None:
    cases: list[Callable[[], object]] = [lambda: sinks.TensorBoard(None), lambda: sinks.WandB(3)]
    for make in cases:
        with pytest.raises(reknit.UsageError):
            make()


def test_an_own_phase_is_a_figure_of_its_own() -> None:
    reported: list[tuple[str, float, int]] = []

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            reported.append((name, value, step))

    sinks.TensorBoard(Writer()).take([phase("evaluate", action="training", step=3)])
    assert reported == [("reknit/training/evaluate_s", 1.0, 3)]


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[str, Callable[[], object]]] = [
        ("duckdb", lambda: sinks.DuckDB("x.duckdb")),
        ("prometheus_client", sinks.Prometheus),
        ("opentelemetry", sinks.OpenTelemetry),
        ("mlflow", sinks.MLflow),
    ]
    for package, make in cases:
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match="needs the package"):
            make()


def test_many_saves_that_never_end_leave_little_behind() -> None:
    from reknit.monitor.opentelemetry import OpenOperations

    operations = OpenOperations()
    for step in range(1000):
        assert list(operations.add([phase("write", step=step)])) == []
    assert len(list(operations.add([phase("save", step=step) for step in range(1000)]))) == 1000
    kept = OpenOperations()
    list(kept.add([phase("write", step=step) for step in range(1000)]))
    lengths = [len(phases) for phases in kept.add([phase("save", step=step) for step in range(936, 1000)])]
    assert lengths == [2] * 64
    (long,) = kept.add([*[phase("write")] * 5000, phase("save")])
    assert len(long) == 1001
