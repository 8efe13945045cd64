"""Several processes of a launcher that nothing connects: no call acts alone unless it is asked to."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.distributed as dist

import reknit
from reknit import environment, plugins
from reknit.api import ranks
from reknit.errors import UsageError
from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

INIT = "torch.distributed.init_process_group()"
JAX_INIT = "jax.distributed.initialize()"

CALLS: dict[str, Callable[..., Any]] = {
    "save": lambda path, state, **more: reknit.save(path / "a", state, **more),
    "overwrite": lambda path, state, **more: reknit.save(path / "a", state, overwrite=True, **more),
    "background": lambda path, state, **more: reknit.save(path / "a", state, wait=False, **more).result(60),
    "load": lambda path, state, **more: reknit.load(path / "there", state, **more),
    "prepare": lambda path, state, **more: reknit.prepare(path / "a", state, **more),
    "Checkpointer": lambda path, state, **more: reknit.Checkpointer(path / "run", **more).close(),
    "watch": lambda path, state, **more: next(iter(reknit.watch(path, idle_s=0.01, **more)), None),
}


def state() -> dict[str, Any]:
    return {"model": {"w": np.ones(4)}}


def launched(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in variables:
        monkeypatch.setenv(name, variables[name])


def test_a_process_that_is_not_connected_to_the_others_makes_no_call_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, WORLD_SIZE="2", RANK="1")
    for name, call in CALLS.items():
        folder = tmp_path / name
        reknit.save(folder / "there", state(), group=reknit.alone())
        with pytest.raises(UsageError) as error:
            call(folder, state())
        assert error.value.message == (
            "torchrun or a launcher like it started 2 processes (WORLD_SIZE=2), but this one is not "
            "connected to the others: each would act alone, on the same path"
        )
        assert f"call {INIT}" in str(error.value).replace(f" or {JAX_INIT}", ""), name
        assert "pass group=reknit.alone()" in str(error.value), name
        assert [path.name for path in folder.iterdir()] == ["there"], name
        call(folder, state(), group=reknit.alone())


def test_every_launcher_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, str], str]] = [
        ({"JAX_NUM_PROCESSES": "4"}, "a launcher of JAX started 4 processes (JAX_NUM_PROCESSES=4)"),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, "Open MPI started 8 processes (OMPI_COMM_WORLD_SIZE=8)"),
        ({"MV2_COMM_WORLD_SIZE": "8"}, "MVAPICH started 8"),
        ({"PMI_SIZE": "2"}, "MPI started 2"),
        ({"SLURM_NTASKS": "16"}, "Slurm started 16 processes (SLURM_NTASKS=16)"),
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "bash"}, "Slurm started 16"),
        ({"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "4"}, "Slurm started 4"),
        ({"SLURM_NTASKS": "16", "WORLD_SIZE": "128"}, "torchrun or a launcher like it started 128"),
    ]
    for variables, started in cases:
        with monkeypatch.context() as patch:
            launched(patch, **variables)
            with pytest.raises(UsageError) as error:
                reknit.save(tmp_path / "a", state())
        assert error.value.message.startswith(started)
        assert list(tmp_path.iterdir()) == [], started


def test_a_process_that_was_started_alone_acts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[dict[str, str]] = [
        {},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": ""},
        {"WORLD_SIZE": "many"},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "16", "SLURM_JOB_NAME": "interactive"},  # a shell of salloc
        {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "16", "SLURM_PROCID": "3", "WORLD_SIZE": "1"},  # torchrun in each task
    ]
    for variables in cases:
        with monkeypatch.context() as patch:
            launched(patch, **variables)
            reknit.save(tmp_path / "a", state(), overwrite=True)
            assert reknit.load(tmp_path / "a", state()).step is None, variables


def test_the_call_that_is_missing_is_that_of_the_framework_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[tuple[str, ...], dict[str, str], str]] = [
        (("torch",), {"WORLD_SIZE": "2"}, f"call {INIT} before"),
        ((), {"WORLD_SIZE": "2"}, f"call {INIT} before"),
        (("jax",), {"SLURM_NTASKS": "2"}, f"call {JAX_INIT} before"),
        (("torch", "jax"), {"SLURM_NTASKS": "2"}, f"call {INIT} or {JAX_INIT} before"),
        (("torch",), {"JAX_NUM_PROCESSES": "2"}, f"call {JAX_INIT} before"),
    ]
    monkeypatch.setitem(plugins.ROWS, "reknit.jobs", {})
    monkeypatch.setattr(ranks, "current_job", lambda: None)
    for modules, variables, calls in cases:
        with monkeypatch.context() as patch:
            launched(patch, **variables)
            for name in ("torch", "jax"):
                patch.delitem(sys.modules, name, raising=False)
            for name in modules:
                patch.setitem(sys.modules, name, ModuleType(name))
            with pytest.raises(UsageError) as error:
                ranks.acting(None, reknit.CommOptions())
        assert calls in str(error.value)


def test_a_process_group_decides_whatever_the_launcher_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        reknit.save(tmp_path / "a", state())
    finally:
        dist.destroy_process_group()
    assert reknit.verify(tmp_path / "a").ok


def test_a_shell_of_slurm_that_names_no_tasks_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, SLURM_JOB_NAME="bash", SLURM_JOB_ID="7")
    assert environment.launch() is None
