"""Files of records that other processes append to, rotate, cut and replace."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from reknit.events.records import PhaseRecord
from reknit.events.to_file import JsonLines
from reknit.monitor.files import RecordFiles
from tests.events.test_outlet import ends
from tests.monitor.records import BEGIN, phase

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def failed(number: int) -> PhaseRecord:
    return phase("write", outcome=f"Error{number}")


@pytest.fixture
def outcomes(tmp_path: Path) -> Callable[[], list[str]]:
    """Return a function that returns the outcomes of all records that were added since its last call."""
    files = RecordFiles()

    def read() -> list[str]:
        paths = sorted(path for path in tmp_path.iterdir() if path.suffix == ".jsonl")
        records = (record for path in paths for record in files.read(path))
        return [record.outcome for record in records if isinstance(record, PhaseRecord)]

    return read


def test_a_torn_line_is_read_when_it_is_whole(tmp_path: Path, outcomes: Callable[[], list[str]]) -> None:
    JsonLines(tmp_path / "whole.jsonl").take([failed(1)])
    line = (tmp_path / "whole.jsonl").read_bytes()
    (tmp_path / "whole.jsonl").unlink()
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(line[:20])
    assert outcomes() == []
    torn.write_bytes(line)
    assert outcomes() == ["Error1"]


@pytest.mark.parametrize("change", ["renamed", "renamed within", "cut", "replaced", "removed"])
def test_a_file_that_is_rotated_or_written_anew_is_read(
    change: str, tmp_path: Path, outcomes: Callable[[], list[str]]
) -> None:
    file = tmp_path / "events.jsonl"
    JsonLines(file).take([failed(number) for number in range(20)])
    assert len(outcomes()) == 20
    if change == "renamed":
        file.rename(tmp_path / "events.jsonl.1")
    elif change == "renamed within":
        JsonLines(file).take([failed(50)])
        file.rename(tmp_path / "events.1.jsonl")
    elif change == "cut":
        file.write_bytes(b"")
    elif change == "replaced":
        JsonLines(tmp_path / "new.tmp").take([failed(60 + number) for number in range(20)])
        (tmp_path / "new.tmp").replace(file)
    else:
        file.unlink()
    JsonLines(file).take([failed(99)])
    late = {"renamed within": ["Error50"], "replaced": [f"Error{60 + number}" for number in range(20)]}
    assert sorted(outcomes()) == [*late.get(change, []), "Error99"]
    assert outcomes() == []


def test_a_file_that_is_written_anew_in_place_is_read_from_its_start(
    tmp_path: Path, outcomes: Callable[[], list[str]]
) -> None:
    file = tmp_path / "events.jsonl"
    JsonLines(file).take([failed(1)])
    assert outcomes() == ["Error1"]
    file.write_bytes(b"")
    JsonLines(file).take([phase("write", outcome="Another", started=BEGIN + 9), failed(2), failed(3)])
    assert len(outcomes()) == 3


def test_lines_that_are_not_records_are_counted_and_the_others_read(tmp_path: Path) -> None:
    file, files = tmp_path / "events.jsonl", RecordFiles()
    file.write_bytes(b'\xff\n{"phase": 3}\n[[[[\n\n{"operation":"x"}\n')
    JsonLines(file).take([failed(1)])
    assert [record.outcome for record in files.read(file) if isinstance(record, PhaseRecord)] == ["Error1"]
    assert files.num_invalid == 5


def test_a_path_without_a_file_is_an_error_and_never_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "to-nothing.jsonl").symlink_to("nowhere")
    (tmp_path / "to-itself.jsonl").symlink_to("to-itself.jsonl")
    refused: list[Path] = []

    def read() -> None:
        for path in tmp_path.iterdir():
            with pytest.raises(OSError, match=path.name):
                list(RecordFiles().read(path))
            refused.append(path)

    assert ends(read)
    assert len(refused) == 4
