"""Who still writes checkpoints?  The answers of real agents are in tests/faults/test_restart.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reknit.cli import agents
from reknit.engine.stored.agents import AtWork

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Command

FOUND = [AtWork(71, 0, "/runs/step_1", 0.0), AtWork(71, 0, "/runs/step_2", 60.0), AtWork(9, None, None, None)]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[list[AtWork]]:
    """Let the program find these agents: the first list at its first look, and so on."""
    prepared: list[list[AtWork]] = []
    monkeypatch.setattr(agents, "at_work", lambda root: prepared.pop(0))
    monkeypatch.setattr(agents, "_PAUSE_S", 0.0)
    return prepared


def test_agents_are_listed_with_what_they_work_on(command: Command, looks: list[list[AtWork]]) -> None:
    looks.append(FOUND)
    ran = command("agents", "/runs")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        "PID  RANK  PATH            SINCE (UTC)",
        " 71     0  /runs/step_1    1970-01-01 00:00:00",
        " 71     0  /runs/step_2    1970-01-01 00:01:00",
        "  9     -  (about to end)  -",
    ]


def test_waiting_ends_when_no_agent_is_left(command: Command, looks: list[list[AtWork]]) -> None:
    looks += [FOUND, FOUND[:1], []]
    ran = command("agents", "--wait", "/runs")
    assert (ran.code, ran.err) == (0, "reknit: waiting for 2 agents\n")
    assert ran.out == "no agent on this host is at work for checkpoints in /runs\n"
    assert looks == []


def test_json_has_all_that_is_known(command: Command, looks: list[list[AtWork]]) -> None:
    looks += [FOUND, []]
    assert command("agents", "--json", "/runs").json[0] == {
        "pid": 71,
        "rank": 0,
        "path": "/runs/step_1",
        "since": 0.0,
    }
    assert command("agents", "--json", "--wait", "/runs").json == []


def test_a_folder_is_meant_as_it_is_seen_from_here(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def at_work(root: str) -> list[AtWork]:
        asked.append(root)
        return []

    monkeypatch.setattr(agents, "at_work", at_work)
    monkeypatch.chdir(tmp_path)
    command("agents", "runs")
    command("agents", "s3://bucket/runs")
    assert asked == [f"{tmp_path}/runs", "s3://bucket/runs"]
