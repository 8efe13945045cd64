"""The first save in the background, which returns before its agent is there."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit import calls, ranks
from reknit.engine.background import background
from reknit.engine.background.trainer.agent_session import AgentSession
from reknit.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LIMIT_S = 60.0


class Held:
    """Agents of which each waits to join until it is let go, or fails with `error`."""

    def __init__(self, form: Callable[..., AgentSession]) -> None:
        self.go = threading.Event()
        self.error: Exception | None = None
        self._form = form

    def form(self, *arguments: Any) -> AgentSession:
        assert self.go.wait(LIMIT_S)
        if self.error is not None:
            arguments[-1].give_up()
            raise self.error
        return self._form(*arguments)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    reknit.close(LIMIT_S)
    held = Held(AgentSession.form)
    monkeypatch.setattr(AgentSession, "form", held.form)
    yield held
    held.go.set()
    reknit.close(LIMIT_S)


def test_it_has_the_state_the_metadata_and_the_circumstances_of_its_call(tmp_path: Path, held: Held) -> None:
    state: dict[str, Any] = {"model": {"w": np.full(100_000, 1.0)}, "extra": {"epoch": [1]}}
    metadata: dict[str, Any] = {"note": ["first"]}
    before = os.umask(0o077)
    try:
        pending = reknit.save(tmp_path / "a", state, wait=False, step=3, metadata=metadata)
        pending.staged(0)
    finally:
        os.umask(before)
    state["model"]["w"][:] = 2.0
    state["extra"]["epoch"].append(2)
    metadata["note"].append("second")
    assert not pending.done()
    held.go.set()
    report = pending.result(LIMIT_S)
    assert report.blocked_s < sum(phase.seconds for phase in report.phases) + 30
    with reknit.open(tmp_path / "a") as checkpoint:
        assert checkpoint.step == 3
        assert checkpoint.metadata == {"note": ["first"]}
        assert set(checkpoint.read("model", "w").tolist()) == {1.0}
    assert (tmp_path / "a" / "manifest.json").stat().st_mode & 0o777 == 0o600
    assert reknit.verify(tmp_path / "a", "data").ok


@pytest.mark.parametrize("wait", [True, False])
def test_the_next_save_comes_after_it(tmp_path: Path, held: Held, wait: bool) -> None:
    first = reknit.save(tmp_path / "a", {"x": np.zeros(9)}, wait=False)
    later = threading.Thread(
        target=reknit.save,
        args=(tmp_path / "a", {"x": np.ones(9)}),
        kwargs={"wait": wait, "overwrite": True},
    )
    later.start()
    held.go.set()
    first.result(LIMIT_S)
    later.join(LIMIT_S)
    reknit.close(LIMIT_S)
    state = {"x": np.full(9, 5.0)}
    reknit.load(tmp_path / "a", state)
    assert state["x"].tolist() == [1.0] * 9


def test_a_save_that_waits_for_it_too_long_fails_and_those_after_it_do_not(
    tmp_path: Path, held: Held
) -> None:
    first = reknit.save(tmp_path / "a", {"x": np.zeros(9)}, wait=False)
    options = reknit.SaveOptions(timeout_s=0.1)
    second = reknit.save(tmp_path / "b", {"x": np.zeros(9)}, wait=False, options=options)
    with pytest.raises(reknit.DeadlineError, match="has not taken over an earlier save within"):
        second.result(LIMIT_S)
    held.go.set()
    first.result(LIMIT_S)
    reknit.save(tmp_path / "c", {"x": np.zeros(9)}, wait=False).result(LIMIT_S)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def test_it_fails_if_no_agent_comes_and_the_next_one_starts_another(tmp_path: Path, held: Held) -> None:
    held.error = AgentError("no agent today")
    first = reknit.save(tmp_path / "a", {"x": np.zeros(9)}, wait=False)
    held.go.set()
    with pytest.raises(AgentError, match="no agent today"):
        first.result(LIMIT_S)
    held.error = None
    reknit.save(tmp_path / "a", {"x": np.zeros(9)}, wait=False).result(LIMIT_S)
    saves = calls.backgrounds[ranks.alone()][True]
    assert saves.arenas is not None
    assert len(saves.pending) == 1


def test_it_waits_for_its_agent_where_no_further_thread_can_be_had(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str, work: Callable[[], object]) -> None:
        raise reknit.errors.ShortageError("no more threads")

    monkeypatch.setattr(background, "start_thread", refused)
    threading.Timer(0.2, held.go.set).start()
    pending = reknit.save(tmp_path / "a", {"x": np.zeros(9)}, wait=False)
    assert held.go.is_set()
    assert pending.result(LIMIT_S).blocked_s >= 0.1


@pytest.mark.parametrize("state", [{"x": np.zeros(0)}, {"extra": {"epoch": 3}}])
def test_it_returns_early_though_there_is_nothing_to_copy(
    tmp_path: Path, held: Held, state: dict[str, Any]
) -> None:
    pending = reknit.save(tmp_path / "a", state, wait=False)
    assert not held.go.is_set()
    held.go.set()
    pending.result(LIMIT_S)
    assert reknit.verify(tmp_path / "a").ok


@pytest.mark.parametrize("lazy", [False, True])
def test_it_waits_for_its_agent_where_its_state_is_not_copied_yet(
    tmp_path: Path, held: Held, lazy: bool
) -> None:
    options = reknit.SaveOptions(stage="lazy") if lazy else reknit.SaveOptions(host_nbytes=64 << 20)
    threading.Timer(0.2, held.go.set).start()
    pending = reknit.save(
        tmp_path / "a", {"x": np.zeros(1 << 10 if lazy else 9 << 20)}, wait=False, options=options
    )
    assert held.go.is_set()
    assert pending.result(LIMIT_S).streamed is not lazy
