"""Threads of a process save, load and close at once: they share one agent, and do not disturb each other."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.api import checks
from reknit.api.checks import background_of
from reknit.api.ranks import acting
from reknit.comm.group import SoloGroup
from reknit.options import CommOptions
from tests.forks import in_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

THREADS = 4
SOURCE = Path(reknit.__file__).parent
HELD = re.compile(r"^\w+ = (threading|DaemonExecutor|Switch)\b", re.MULTILINE)


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(make: Callable[[], Any]) -> int:
    """Call `make` in many threads at once, and return the number of different objects that they got."""
    begin = threading.Barrier(THREADS)

    def call() -> Any:
        begin.wait()
        return make()

    with ThreadPoolExecutor(THREADS) as pool:
        calls = [pool.submit(call) for _ in range(THREADS)]
        return len({id(each.result()) for each in calls})


def test_threads_that_come_at_once_are_in_one_group() -> None:
    for number in range(1_000_000, 1_000_200):
        options = CommOptions(generation=number)
        assert at_once(partial(lambda given: acting(None, given).group, options)) == 1


def test_threads_that_come_at_once_have_the_same_background_saves() -> None:
    for _ in range(100):
        group = SoloGroup()
        assert at_once(lambda group=group: background_of(group, in_process=False)) == 1  # type: ignore[misc]
        background_of(group, in_process=False).close(0.0)


def test_a_save_ends_well_while_another_thread_begins_the_first_to_another_kind_of_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SoloGroup()
    monkeypatch.setattr(
        background_of(group, in_process=False),
        "raise_unread_errors",
        lambda exclude: background_of(group, in_process=True),  # as if another thread called at this moment
    )
    assert reknit.save(tmp_path / "step", {"step": 1}, group=group).done()


def test_loads_and_closes_go_on_while_another_thread_saves_for_the_first_time(tmp_path: Path) -> None:
    reknit.save(tmp_path / "step", {"step": 1})
    over, groups = threading.Event(), list[SoloGroup]()

    def begin() -> None:
        while not over.is_set() and len(groups) < 2_000:
            groups.append(SoloGroup())
            background_of(groups[-1], in_process=False)

    with ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(begin)
        try:
            for _ in range(50):
                reknit.load(tmp_path / "step", {"step": 0})
                assert reknit.close()
        finally:
            over.set()
        beginning.result()
    assert reknit.close()


def test_a_process_that_is_forked_while_another_thread_looks_saves_up_can_load(tmp_path: Path) -> None:
    reknit.save(tmp_path / "step", {"step": 1})
    with checks.making:
        assert in_fork(lambda: reknit.load(tmp_path / "step", {"step": 0}) is not None)


def held_locks() -> dict[str, Any]:
    """Return the locks of all modules of reknit, and of the objects that these hold, by module and name."""
    for path in SOURCE.rglob("*.py"):
        if path.stem != "__init__" and HELD.search(path.read_text()):
            importlib.import_module(".".join(path.relative_to(SOURCE.parent).with_suffix("").parts))
    modules = {name: module for name, module in list(sys.modules.items()) if name.startswith("reknit.")}
    kinds = (type(threading.Lock()), type(threading.RLock()))
    locks: dict[str, Any] = {}
    for module, names in ((name, vars(module)) for name, module in modules.items()):
        for name, value in names.items():
            ours = type(value).__module__.startswith("reknit.")
            inner = getattr(value, "__dict__", {}) if ours else {}
            both = {name: value, **{f"{name}.{each}": held for each, held in inner.items()}}
            locks |= {f"{module}.{each}": held for each, held in both.items() if isinstance(held, kinds)}
    return locks


def test_a_forked_process_waits_for_no_lock_of_a_module_that_another_thread_held() -> None:
    locks = held_locks()
    assert {"reknit.api.checks.making", "reknit.events.outlet._finding"} <= locks.keys()
    holding, over = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as held:
            for lock in {id(lock): lock for lock in locks.values()}.values():
                held.enter_context(lock)
            holding.set()
            over.wait()

    def free() -> bool:
        return all([lock.acquire(timeout=0.1) for lock in held_locks().values()])

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    try:
        assert holding.wait(60)
        assert in_fork(free)
    finally:
        over.set()
        thread.join(60)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("steps", [[5] * THREADS, list(range(THREADS))])
def test_the_first_saves_of_a_run_may_come_from_threads_at_once(
    tmp_path: Path, steps: list[int], wait: bool
) -> None:
    for number in range(5):
        begin = threading.Barrier(THREADS)
        with reknit.Checkpointer(tmp_path / str(number), wait=wait) as run:

            def save(step: int, run: reknit.Checkpointer = run, begin: threading.Barrier = begin) -> set[int]:
                begin.wait()
                try:
                    saved = run.save(step, {"model": {"w": np.zeros(9)}})
                except reknit.UsageError:  # a thread that was faster has saved a later step
                    return set()
                assert saved is not None
                return {saved.result().step or 0}

            with ThreadPoolExecutor(THREADS) as pool:
                done = set().union(*pool.map(save, steps))
        assert max(steps) in done
        assert [each.step for each in reknit.steps(tmp_path / str(number))] == sorted(done)
