"""A save beside every kind of bad sink: it is committed, no thread of it waits, and a warning comes."""

from __future__ import annotations

import json
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit import sinks
from reknit.events.outlet import CallingSink, Outlet
from reknit.events.records import PhaseRecord
from reknit.monitor.files import RecordFiles
from tests.events.test_outlet import ends
from tests.monitor.records import phase
from tests.resources import small_disk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from reknit.events.records import Record

LIMIT_S = 60.0
STATE = {"model": {"w": np.arange(1000, dtype=np.float32)}}


class Plain:
    """A sink that takes everything."""

    def take(self, records: Sequence[Record]) -> None:
        """Take records."""


class Hanging(Plain):
    def __init__(self, free: threading.Event) -> None:
        self._free = free

    def take(self, records: Sequence[Record]) -> None:
        self._free.wait(LIMIT_S)


class HangingRepr(Hanging):
    def __repr__(self) -> str:
        self._free.wait(LIMIT_S)
        return "late"


class WrongRepr(Plain):
    def __repr__(self) -> str:
        raise ValueError("repr")


class WrongHash(Plain):
    def __hash__(self) -> int:
        raise ValueError("hash")


class WrongEqual(Plain):
    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise ValueError("eq")


class UntoldError(Exception):
    def __str__(self) -> str:
        raise ValueError("str")


class Failing(Plain):
    def take(self, records: Sequence[Record]) -> None:
        raise UntoldError


class WrongAttributes(Plain):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Greedy(Plain):
    """It changes the records that it was given."""

    def take(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, PhaseRecord):
                record.coordinate.clear()
        records.clear()  # type: ignore[attr-defined]


class Leaving(Plain):
    def take(self, records: Sequence[Record]) -> None:
        raise SystemExit(3)


@pytest.fixture
def free() -> Iterator[threading.Event]:
    """An event that ends all hanging sinks."""
    event = threading.Event()
    yield event
    event.set()


def a_pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe.jsonl")
    return f"{folder}/pipe.jsonl"


def below_a_file(folder: Path) -> str:
    (folder / "file").touch()
    return f"{folder}/file/events.jsonl"


BAD: dict[str, Callable[[Path, threading.Event], Any]] = {
    "hangs": lambda _, free: Hanging(free),
    "hangs in its name": lambda _, free: HangingRepr(free),
    "has a wrong name": lambda *_: WrongRepr(),
    "has no hash": lambda *_: WrongHash(),
    "compares wrongly": lambda *_: [WrongEqual(), WrongEqual()],
    "raises errors without text": lambda *_: Failing(),
    "has wrong attributes": lambda *_: WrongAttributes(),
    "changes its records": lambda *_: Greedy(),
    "leaves": lambda *_: Leaving(),
    "pipe without reader": lambda folder, _: a_pipe(folder),
    "below a file": lambda folder, _: below_a_file(folder),
    "too long": lambda folder, _: f"{folder}/{'a' * 300}.jsonl",
}


@pytest.mark.parametrize("name", BAD)
def test_a_save_beside_a_bad_sink_is_committed(name: str, tmp_path: Path, free: threading.Event) -> None:
    def save(step: int, wait: bool) -> None:
        options = reknit.SaveOptions(events=events)
        reknit.save(tmp_path / f"{step}", STATE, step=step, wait=wait, options=options).result(LIMIT_S)

    events = BAD[name](tmp_path, free)
    for step, wait in enumerate((True, True, False, False)):
        assert ends(partial(save, step, wait))
        target = {"model": {"w": np.zeros(1000, np.float32)}}
        reknit.load(tmp_path / f"{step}", target, options=reknit.LoadOptions(events=events))
        assert np.array_equal(target["model"]["w"], STATE["model"]["w"])
    assert reknit.close(LIMIT_S)


def test_a_full_disk_takes_no_save(tmp_path: Path) -> None:
    with small_disk(tmp_path, "1m") as disk:
        (disk / "rest").write_bytes(bytes((1 << 20) - (16 << 10)))
        options = reknit.SaveOptions(events=f"{disk}/events.jsonl")
        for step in range(100):
            reknit.save(tmp_path / f"{step}", STATE, step=step, options=options).result(LIMIT_S)
        sinks.flush(LIMIT_S)
        assert reknit.latest(tmp_path) == f"{tmp_path}/99"


def test_a_folder_of_events_that_is_gone_is_made_again(tmp_path: Path) -> None:
    events = tmp_path / "deep" / "events.jsonl"
    for step in (1, 2):
        with reknit.phase("eat", events=events, step=step):
            pass
        assert sinks.flush(LIMIT_S)
        assert json.loads(events.read_text())["step"] == step
        events.unlink()
        events.parent.rmdir()


def test_the_current_folder_may_be_gone_and_no_later_one_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    options = reknit.SaveOptions(events="events.jsonl")
    reknit.save(tmp_path / "x", STATE, options=options).result(LIMIT_S)
    monkeypatch.chdir(tmp_path)
    assert sinks.flush(LIMIT_S)
    assert not (tmp_path / "events.jsonl").exists()
    assert "the current folder of the save was gone" in caplog.text


def test_all_lines_go_to_the_folder_that_was_the_current_one_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = sinks.JsonLines("events.jsonl")
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path / "later")
    lines.take([phase("write")])
    assert not any((tmp_path / "later").iterdir())
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 1


# One record that cannot be written


WRONG = [phase("write", nbytes="many"), phase("write", rank=object())]
MENDED = [phase("y\udcff"), phase("z", nbytes=np.int64(5)), phase("z", seconds=np.float32(0.5))]


@pytest.mark.parametrize("kind", ["lines", "duckdb", "function"])
def test_a_record_that_cannot_be_written_is_lost_alone(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("duckdb")
    taken: list[Record] = []

    def take(record: Any) -> None:
        json.dumps(record.as_dict() | {"nbytes": record.nbytes + 1})
        taken.append(record)

    place = tmp_path / f"events.{'duckdb' if kind == 'duckdb' else 'jsonl'}"
    sink: Any = {"lines": sinks.JsonLines, "duckdb": sinks.DuckDB}.get(kind, lambda _: CallingSink(take))(
        place
    )
    outlet = Outlet(sink, "the sink")
    good = [phase("write", rank=rank) for rank in range(50)]
    for record in (*good, *WRONG, *good) if kind == "function" else (*good, *WRONG, *MENDED, *good):
        outlet.put(record)
    assert outlet.flush(LIMIT_S)
    outlet.put(phase("after"))
    assert outlet.flush(LIMIT_S)
    if kind != "function":
        taken = list(RecordFiles().read(place))
    phases = [record.phase for record in taken if isinstance(record, PhaseRecord)]
    assert phases.count("write") == 100
    assert phases.count("after") == 1
    if kind != "function":
        assert (phases.count("y\\udcff"), phases.count("z")) == (1, 2)
        assert sum(getattr(record, "num_dropped", 0) for record in taken) == len(WRONG)
    assert caplog.text.count("events are lost: the sink: ") == 1
