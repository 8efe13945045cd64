"""Reports at a prompt and in a notebook, and the lines of the log: short, and escaped where that is HTML."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

import reknit
from reknit.engine.outcome import PendingSave, SaveOutcome
from reknit.options import PromotionTarget
from reknit.storage.registry import register
from reknit.testing.world import run_ranks
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from reknit.comm.group import Group


def state(value: float = 1) -> dict[str, Any]:
    return {"model": {f"w{n}": np.full(1024, value) for n in range(40)}, "extra": {"epoch": 1}}


def test_a_save_and_its_report_tell_in_a_line_what_they_are(tmp_path: Path) -> None:
    pending = reknit.save(tmp_path / "a", state(), step=7)
    report = pending.result()
    assert repr(pending).startswith(f"<PendingSave path: {tmp_path / 'a'}, step: 7, now: committed, ")
    assert repr(report).startswith(f"<SaveReport path: {tmp_path / 'a'}, step: 7, size: ")
    assert "KiB" in repr(report)
    assert len(repr(report)) < 300 + len(str(tmp_path))
    other = reknit.save(tmp_path / "<b>", state(), step=7)
    for shown in (other, other.result()):
        html = shown._repr_html_()
        assert html.startswith(f"<table><caption>{type(shown).__name__}</caption>")
        assert "&lt;b&gt;" in html
        assert "<b>" not in html


def test_a_save_under_way_tells_how_far_it_is() -> None:
    outcome = SaveOutcome("/x", 3, promote_to=[PromotionTarget("/y")])
    pending = PendingSave(outcome)
    assert repr(pending) == "<PendingSave path: /x, step: 3, now: staging, promoted to: /y (not yet)>"
    outcome.note_staged()
    assert "now: staged, being written" in repr(pending)
    outcome.end(reknit.errors.CommitError("a hole", rank=1, remedy="mend it"))
    assert "now: failed: CommitError: a hole [rank 1], promoted to: /y (failed)" in repr(pending)
    skipped = SaveOutcome("/x")
    skipped.end(reknit.errors.SkippedError("busy"))
    assert repr(PendingSave(skipped)) == "<PendingSave path: /x, now: skipped>"


def test_a_load_report_counts_names_and_shows_the_first(tmp_path: Path) -> None:
    reknit.save(tmp_path / "a", state())
    report = reknit.load(tmp_path / "a", state(0))
    assert repr(report) == (
        f"<LoadReport path: {tmp_path / 'a'}, restored: 41 tensors and values, 320.0 KiB>"
    )
    other = state()
    for n in range(5):
        other["model"][f"<b>{n}"] = other["model"].pop(f"w{n}")
    report = reknit.load(tmp_path / "a", other, strict=False)
    assert "missing: 5 (model/<b>0, model/<b>1, model/<b>2, ...)" in repr(report)
    assert "cast" not in repr(report), "empty lists are left out"
    html = report._repr_html_()
    assert html.startswith("<table><caption>LoadReport</caption>")
    assert "model/&lt;b&gt;0" in html
    assert "<b>" not in html


def test_other_reports_and_an_open_checkpoint_are_short_too(tmp_path: Path) -> None:
    reknit.save(tmp_path / "a", state(), step=2)
    with reknit.open(tmp_path / "a") as checkpoint:
        assert "step: 2" in repr(checkpoint)
        assert "items: model (40 tensors, 0 values), extra (0 tensors, 1 values)" in repr(checkpoint)
        assert "<th" in checkpoint._repr_html_()
    assert "ok: True" in repr(reknit.verify(tmp_path / "a"))
    promoted = reknit.promote(tmp_path / "a", tmp_path / "b")
    assert f"source: {tmp_path / 'a'}, step: 2, copied: " in repr(promoted)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_what_is_shown_is_one_short_line_whatever_it_is_about() -> None:
    outcome = SaveOutcome("/x" * 2000 + "/last", 3, promote_to=[PromotionTarget("/y" * 2000)])
    outcome.end(reknit.errors.CommitError("hole\r" * 2000, remedy="mend it"))
    shown = repr(PendingSave(outcome))
    assert shown.startswith("<PendingSave path: /x/x")
    assert "/last, step: 3, now: failed: CommitError: " in shown, "paths differ at their ends"
    assert len(shown) < 600
    assert len(shown.splitlines()) == 1


def test_what_cannot_be_shown_is_its_kind() -> None:
    outcome = SaveOutcome("/x")
    outcome.end(Unspeakable())
    assert repr(PendingSave(outcome)) == "<PendingSave>"
    assert repr(object.__new__(reknit.Checkpoint)) == "<Checkpoint>"
    assert repr(object.__new__(reknit.Checkpointer)) == "<Checkpointer>"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines about ends; a slow machine also logs the progress."""
    return [line for line in caplog.messages if line.startswith(("saved ", "loaded "))]


def test_what_went_well_is_one_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "reknit"):
        reknit.save(tmp_path / "a", state(), step=7)
        reknit.load(tmp_path / "a", state(0))
    saved, loaded = lines(caplog)
    assert saved.startswith(f"saved {tmp_path / 'a'} (step 7): ")
    assert " KiB by 1 rank in " in saved
    assert saved.endswith("/s")
    assert loaded.startswith(f"loaded {tmp_path / 'a'} (step 7): 320.0 KiB in ")
    assert loaded.endswith("/s")
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_only_rank_0_tells_what_all_ranks_did(caplog: pytest.LogCaptureFixture) -> None:
    register("shown", lambda url, durability: ProcessMemory(url.rpartition("/")[2]))

    def save_and_load(group: Group) -> None:
        for wait in (True, False):
            reknit.save(f"shown://{wait}", state(), wait=wait, group=group).result()
        reknit.load("shown://True", state(0), group=group)

    with caplog.at_level(logging.INFO, "reknit"):
        run_ranks(2, save_and_load)
    reknit.close()
    assert sorted(line.split()[0] for line in lines(caplog)) == ["loaded", "saved", "saved"]
    assert sum("by 2 ranks in" in record.getMessage() for record in caplog.records) == 2
    assert sum("blocked training for" in record.getMessage() for record in caplog.records) == 1
    assert sum("to rank 0 of 2 in" in record.getMessage() for record in caplog.records) == 1
