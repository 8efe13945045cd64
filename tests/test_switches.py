"""Global settings of a process are restored after each call: after errors, with other threads, in forks."""

from __future__ import annotations

import faulthandler
import gc
import locale
import logging
import os
import random
import resource
import signal
import socket
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit
from reknit.comm.group import quietly
from reknit.errors import StateError
from reknit.policies import at, on_preemption
from reknit.storage.wrappers.retrying import RetryingStorage, RetryPolicy
from reknit.system import Switch, without_collections
from reknit.testing.faulty_storage import Fault, FaultyStorage
from tests.forks import fork, in_fork
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 60


def switches() -> dict[str, Any]:
    """Return the global settings of this process, and the next numbers of its random generators."""
    handlers = {each: signal.getsignal(each) for each in signal.valid_signals()}
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "folder": os.getcwd(),
        "umask": [line for line in status if line.startswith("Umask")],
        "handlers": handlers,
        "signal mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "timers": [
            signal.getitimer(getattr(signal, name))[1] for name in dir(signal) if name.startswith("ITIMER_")
        ],
        "faulthandler": faulthandler.is_enabled(),
        "warnings": list(warnings.filters),
        "logging": [(each.level, each.disabled, tuple(each.handlers)) for each in loggers()],
        "logging disabled": logging.root.manager.disable,
        "python": (sys.getswitchinterval(), sys.getrecursionlimit(), sys.excepthook, threading.excepthook),
        "paths": list(sys.path),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "threads": threading.stack_size(),
        "sockets": socket.getdefaulttimeout(),
        "locale": locale.setlocale(locale.LC_ALL),
        "limits": [
            resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")
        ],
        "priority": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)),
        "numpy": (np.geterr(), np.geterrcall(), np.get_printoptions()["precision"]),
        "random": random.getstate(),
        "random of numpy": repr(np.random.get_state()),
        "random of torch": torch.get_rng_state().tolist(),
        "torch": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_anomaly_enabled(),
            torch.get_float32_matmul_precision(),
        ),
    }


def loggers() -> list[logging.Logger]:
    return [logging.getLogger(name) for name in (None, "reknit", "reknit.comm", "asyncio", "grpc")]


def changed(before: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from `before`."""
    now = switches()
    return {name: (before[name], now[name]) for name in before if before[name] != now[name]}


class Own:
    """An object whose own code raises something, if only when it is loaded."""

    def __init__(self, saved: BaseException | None, loaded: BaseException | None) -> None:
        self.saved, self.loaded = saved, loaded

    def state_dict(self) -> dict[str, int]:
        if self.saved is not None:
            raise self.saved
        return {"x": 1}

    def load_state_dict(self, state: object) -> None:
        if self.loaded is not None:
            raise self.loaded


def held() -> dict[str, Any]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, "rng": reknit.RngState(), "array": np.ones(3)}


def fail_to_save(folder: Path, state: dict[str, Any]) -> None:
    for error, kind in ((ValueError("no"), StateError), (KeyboardInterrupt(), KeyboardInterrupt)):
        for wait in (True, False):
            with pytest.raises(kind):
                reknit.save(folder / "failed", {"own": Own(error, None)}, wait=wait).result()


def fail_to_load(folder: Path, state: dict[str, Any]) -> None:
    reknit.save(folder / "own", {"own": Own(None, None)})
    for error, kind in ((ValueError("no"), StateError), (KeyboardInterrupt(), KeyboardInterrupt)):
        with pytest.raises(kind):
            reknit.load(folder / "own", {"own": Own(None, error)})
    with pytest.raises(reknit.MismatchError):
        reknit.load(folder / "own", {"own": np.ones(3)})


def run(folder: Path, state: dict[str, Any]) -> None:
    policy = at(1) | on_preemption(signal.SIGUSR1)
    with reknit.Checkpointer(folder / "run", save=policy) as checkpointer:
        checkpointer.save(1, state)


def be_refused_a_run(folder: Path, state: dict[str, Any]) -> None:
    with pytest.raises(reknit.UsageError):
        reknit.Checkpointer(folder / "run", save=on_preemption(signal.SIGUSR1), later_steps="no")  # type: ignore[arg-type]


def retry(folder: Path, state: dict[str, Any]) -> None:
    plan = [Fault("away", number) for number in range(1, 9, 2)]
    storage = RetryingStorage(FaultyStorage(ProcessMemory("switches"), plan=plan), RetryPolicy(first_s=0.001))
    storage.put(folder.name, b"x", if_absent=False)
    assert sum(storage.retries.values())


CALLS: dict[str, Callable[[Path, dict[str, Any]], object]] = {
    "save": lambda folder, state: reknit.save(folder / "saved", state),
    "save in the background": lambda folder, state: reknit.save(folder / "b", state, wait=False).result(),
    "save in threads": lambda folder, state: reknit.save(
        f"process://{folder.name}", state, wait=False
    ).result(),
    "prepare": lambda folder, state: reknit.prepare(folder / "prepared", state),
    "load": lambda folder, state: reknit.load(folder / "saved", state),
    "load in inference mode": torch.inference_mode()(
        lambda folder, state: reknit.load(folder / "saved", state)
    ),
    "verify": lambda folder, state: reknit.verify(folder / "saved", "data"),
    "fail to save": fail_to_save,
    "fail to load": fail_to_load,
    "run": run,
    "be refused a run": be_refused_a_run,
    "retry": retry,
    "close": lambda folder, state: reknit.close(),
}


def test_no_call_leaves_a_switch_of_the_process_changed(tmp_path: Path) -> None:
    state, left = held(), {}
    for name, call in CALLS.items():
        before = switches()
        call(tmp_path, state)
        if difference := changed(before):
            left[name] = difference
    assert left == {}


class Loaded:
    """An object whose `load_state_dict` does nothing."""

    def load_state_dict(self, state: object) -> None:
        pass


class Gate(Loaded):
    """A state that holds a thread within a save."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()

    def state_dict(self) -> dict[str, int]:
        self.inside.set()
        assert self.go_on.wait(WAIT_S)
        return {"x": 1}

    def save(self, path: Path) -> threading.Thread:
        thread = threading.Thread(target=reknit.save, args=(path, {"a": self}))
        thread.start()
        while not self.inside.wait(0.01):
            assert thread.is_alive()
        return thread


def test_of_two_threads_that_save_the_first_that_begins_may_end_first(tmp_path: Path) -> None:
    before = switches()
    first, second = Gate(), Gate()
    one, other = first.save(tmp_path / "1"), second.save(tmp_path / "2")
    first.go_on.set()
    one.join()
    assert changed(before).keys() == {"collector"}
    second.go_on.set()
    other.join()
    assert changed(before) == {}


def test_a_process_that_is_forked_during_the_save_of_another_thread_has_no_switch_changed(
    tmp_path: Path,
) -> None:
    before = switches()["collector"]
    gate = Gate()
    saving = gate.save(tmp_path / "1")
    try:
        assert switches()["collector"] != before
        assert in_fork(lambda: switches()["collector"] == before)
    finally:
        gate.go_on.set()
        saving.join()
    assert switches()["collector"] == before


class Forking(Loaded):
    """A state whose own code forks; the child goes on inside of the save until that ends there, too."""

    def __init__(self) -> None:
        self.parent, self.child = os.getpid(), 0

    def state_dict(self) -> dict[str, int]:
        self.child = fork()
        if not self.child:
            signal.alarm(WAIT_S)
            raise ValueError("the child does not save")
        return {"x": 1}


def test_a_process_that_is_forked_inside_of_a_save_has_its_switches_back_at_its_end(tmp_path: Path) -> None:
    before, forking = switches()["collector"], Forking()
    try:
        reknit.save(tmp_path / "1", {"a": forking})
    except StateError:
        assert os.getpid() != forking.parent
    if os.getpid() != forking.parent:
        os._exit(0 if switches()["collector"] == before else 1)
    assert os.waitpid(forking.child, 0)[1] == 0
    assert switches()["collector"] == before


@pytest.fixture
def collector() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.enable()
    gc.set_threshold(*threshold)


@pytest.mark.usefixtures("collector")
def test_what_others_do_with_the_collector_meanwhile_stays() -> None:
    with without_collections():
        gc.disable()
    assert not gc.isenabled()
    with without_collections():
        gc.enable()
        gc.set_threshold(123, 4, 5)
    assert gc.isenabled()
    assert gc.get_threshold() == (123, 4, 5)


class Circle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.same = self


def searches() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()]


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("made", [1, 10_000])
def test_the_end_of_a_pause_searches_only_what_was_made_in_it(made: int) -> None:
    gc.collect()
    gc.freeze()  # a search of all objects takes seconds after other tests
    older: list[Any] = [[] for _ in range(10_000)]  # so many that a search of all objects is due
    gc.collect(1)
    gc.set_threshold(700, 1, 0)
    before = searches()
    with without_collections():
        with without_collections():
            circles = [Circle() for _ in range(made)]
        freed = [weakref.ref(circle) for circle in circles]
        circles.clear()
        assert searches() == before
    few: list[Any] = [[] for _ in range(100)]  # an allocation is where the collector begins by itself
    assert searches() == [before[0] + (made > 700), *before[1:]]
    assert all((circle() is None) == (made > 700) for circle in freed)
    del older, few


def test_a_variable_of_grpc_is_set_while_grpc_is_imported_unless_the_user_has_set_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, ours in (("GRPC_VERBOSITY", "ERROR"), ("GRPC_ENABLE_FORK_SUPPORT", "0")):
        monkeypatch.delenv(name, raising=False)
        with quietly():
            assert os.environ[name] == ours
        assert name not in os.environ
        monkeypatch.setenv(name, "of the user")
        with quietly():
            assert os.environ[name] == "of the user"
        assert os.environ[name] == "of the user"


def test_a_warning_says_that_grpc_acts_in_forked_processes_before_it_is_used_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cases = [
        (False, "", 0),
        (False, "0", 0),
        (False, "1", 1),
        (True, "", 1),
        (True, "false", 0),
        (True, "1", 1),
    ]
    for is_imported, value, warns in cases:
        caplog.clear()
        with monkeypatch.context() as patch:
            for module in ("reknit.comm.serving", "grpc"):
                patch.delitem(sys.modules, module, raising=False)
            patch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
            if is_imported:
                patch.setitem(sys.modules, "grpc", sys)
            if value:
                patch.setenv("GRPC_ENABLE_FORK_SUPPORT", value)
            with quietly():
                patch.setitem(sys.modules, "reknit.comm.serving", sys)
            with quietly():
                pass
        found = [each for each in caplog.messages if "GRPC_ENABLE_FORK_SUPPORT=0" in each]
        assert len(found) == warns, (is_imported, value)


def test_a_handler_of_a_signal_may_turn_a_switch_at_any_moment_of_a_block() -> None:
    turned: list[str] = []
    switch = Switch(lambda: turned.append("on"), lambda _: turned.clear())

    def block() -> None:
        with switch.turned():
            pass

    for moment in range(60):  # more than a block has lines
        left = [moment]

        def interrupt(frame: Any, event: str, argument: object) -> Any:
            left[0] -= 1  # noqa: B023
            if left[0] == 0:  # noqa: B023
                sys.settrace(None)
                block()
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            block()
        finally:
            sys.settrace(before)
        assert turned == []
