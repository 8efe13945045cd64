"""Each option that a user sets is the one that its reader sees: a trainer, its agent, a promotion."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.engine.background import agent_job as agent_jobs
from reknit.engine.background import save_maker
from reknit.engine.background.ahead import Ahead
from reknit.engine.loading import load as load_story
from reknit.engine.saving import save as save_story
from reknit.engine.stored import promote as promoting
from reknit.options import CommOptions, LoadOptions, SaveOptions
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
COMM = CommOptions(fan_out=3, connect_timeout_s=77.0)

SAVE: dict[str, Any] = {
    "check_replicas": "all",
    "allow_pickle": True,
    "max_file_nbytes": 1 << 30,
    "durability": "process",
    "timeout_s": 123.0,
    "on_error": "warn",
    "reuse": False,
    "promote_to": "process://reach-there/1",
    "threads": 3,
    "inflight_nbytes": 31 * MIB,
    "stage": "lazy",
    "when_busy": "skip",
    "host_nbytes": 96 * MIB,
    "piece_nbytes": 8 * MIB,
    "priority": "normal",
    "exit_wait_s": 11.0,
    "events": None,
    "progress": False,
    "comm": COMM,
}
LOAD: dict[str, Any] = {
    "only": ("model/*",),
    "transforms": (),
    "cast": True,
    "allow_shape_mismatch": ("model/*",),
    "allow_pickle": True,
    "verify": "full",
    "replicas": ("process://reach-there/1",),
    "timeout_s": 124.0,
    "threads": 3,
    "inflight_nbytes": 31 * MIB,
    "gap_nbytes": None,
    "share": "never",
    "events": None,
    "progress": False,
    "comm": COMM,
}
UNSET = {"events", "transforms", "gap_nbytes"}
"""Options that have tests of their own, or mean nothing beside these."""

OF_THE_TRAINER = {
    "comm",
    "events",
    "exit_wait_s",
    "host_nbytes",
    "max_file_nbytes",
    "on_error",
    "priority",
    "progress",
    "promote_to",
    "stage",
    "when_busy",
}
"""What only the trainer decides by, or hands over in another form."""


def state() -> dict[str, Any]:
    return {"model": {"w": np.arange(1000.0)}}


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    for name in ("reach", "reach-there"):
        ProcessMemory.clear(name)
    yield
    reknit.close()


def test_every_option_has_a_value_here_that_is_not_its_default() -> None:
    for kind, values in ((SaveOptions, SAVE), (LoadOptions, LOAD)):
        assert set(values) == {field.name for field in fields(kind)}
        default = kind()
        assert {name for name, value in values.items() if getattr(default, name) == value} == UNSET & set(
            values
        )


def test_a_save_that_waits_sees_each_option(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    own, copying = save_story.save, promoting.promote

    def save(job: Any, *more: Any) -> Any:
        seen.append(job.options)
        return own(job, *more)

    def promote(job: Any, *more: Any) -> Any:
        seen.append(job.options)
        return copying(job, *more)

    monkeypatch.setattr(save_story, "save", save)
    monkeypatch.setattr(promoting, "promote", promote)
    background = {"stage", "when_busy", "host_nbytes", "piece_nbytes", "priority", "exit_wait_s"}
    options = SaveOptions(**{name: value for name, value in SAVE.items() if name not in background})
    reknit.save("process://reach/1", state(), options=options)
    assert seen == [options, options]


def test_a_save_in_the_background_and_its_promotion_see_each_option(monkeypatch: pytest.MonkeyPatch) -> None:
    of_trainer, of_agent, of_promotion = [], [], []
    staged, made, copying = Ahead.hand_over, agent_jobs.agent_job, promoting.promote

    def hand_over(self: Any, save: Any) -> None:
        of_trainer.append(self.job.options)
        staged(self, save)

    def agent_job(*given: Any) -> Any:
        of_agent.append((job := made(*given)).options)
        return job

    def promote(job: Any, *more: Any) -> Any:
        of_promotion.append(job.options)
        return copying(job, *more)

    monkeypatch.setattr(Ahead, "hand_over", hand_over)
    monkeypatch.setattr(save_maker, "agent_job", agent_job)
    monkeypatch.setattr(promoting, "promote", promote)
    options = SaveOptions(**SAVE)
    reknit.save("process://reach/1", state(), wait=False, options=options).promoted(60)
    assert of_trainer
    assert all(found == options for found in of_trainer)
    for found in (*of_agent, *of_promotion):
        expected = replace(options, **{name: getattr(found, name) for name in OF_THE_TRAINER})
        assert found == expected
    assert (len(of_agent), len(of_promotion)) == (1, 1)


def test_a_load_sees_each_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for place in ("process://reach/1", "process://reach-there/1"):
        reknit.save(place, state())
    seen = []
    own = load_story.load

    def load(job: Any) -> Any:
        seen.append(job.options)
        return own(job)

    monkeypatch.setattr(load_story, "load", load)
    options = LoadOptions(**LOAD)
    reknit.load("process://reach/1", state(), options=options)
    assert seen == [options]
