"""An argument of a wrong type, in every public call: the error names it and the types that are allowed."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from tests.test_keywords import called

if TYPE_CHECKING:
    from pathlib import Path

STATE: dict[str, Any] = {"model": {"w": np.ones(4)}}

NEEDED: dict[str, dict[str, Any]] = {
    "save": {"path": "new", "state": STATE},
    "load": {"path": "ckpt", "state": STATE},
    "prepare": {"path": "new"},
    "promote": {"path": "ckpt", "to": "copy"},
    "cool": {"path": "ckpt", "to": "cold"},
    "note": {"path": "ckpt", "metrics": {"loss": 1.0}},
    "connect": {"rank": 0, "size": 1, "at": "meet"},
    "Checkpointer": {"root": "run"},
    "Tier": {"root": "run"},
    "phase": {"name": "data"},
    "policies.without": {"items": "optimizer"},
    **{call: {"path": "ckpt"} for call in ("open", "verify", "pin", "unpin", "delete")},
    **{call: {"root": "runs"} for call in ("latest", "steps", "watch")},
}
"""Other arguments that a call needs."""

BESIDE = {
    ("Checkpointer", "tiers"): {},
    ("connect", "token"): {"rank": 0, "size": 1, "at": "tcp://127.0.0.1:9"},
}
"""Other arguments for one argument that excludes the usual ones."""

LATER = {
    ("Checkpointer", "wait"): "raised by its first save, on all ranks",
    ("Checkpointer", "options"): "raised by its first save, on all ranks",
    ("Checkpointer", "load_options"): "raised by its first load, on all ranks",
    ("Tier", "every"): "raised by the Checkpointer that it is for",
    ("Tier", "keep"): "raised by the Checkpointer that it is for",
}
ANYTHING = {
    ("PerRank", "value"): "any value can differ between ranks",
    ("sinks.MLflow", "run_id"): "looked up by MLflow",
    ("sinks.OpenTelemetry", "tracer_provider"): "duck-typed by OpenTelemetry",
    ("sinks.Prometheus", "registry"): "duck-typed by Prometheus",
}
NOT_MADE = {"PendingSave", "Checkpoint"}
"""Classes whose objects reknit makes."""

ALSO_CALLED = {
    **dict.fromkeys(("path", "root", "to", "at"), "place"),
    **dict.fromkeys(("save", "keep"), "policy"),
    "since": "step",
}
"""The words by which errors may call an argument instead."""


class Wrong:
    """A value of a type that no argument has."""

    def __repr__(self) -> str:
        return "<wrong>"


def arguments() -> list[tuple[str, Any, str]]:
    """Return every argument of every public call."""
    found = []
    for name, call in called():
        if name in NOT_MADE:
            continue
        for parameter in inspect.signature(call).parameters.values():
            variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if not variable and (name, parameter.name) not in LATER | ANYTHING:
                found.append((name, call, parameter.name))
    return found


UNTYPED = {
    ("PerRank", "value"): "any value can differ between ranks",
    ("PerRank", "mesh"): "a DeviceMesh of torch, which need not be installed",
    ("RngState", "mesh"): "a DeviceMesh of torch, which need not be installed",
    ("register_framework", "framework"): "an object or a factory of one",
    ("sinks.OpenTelemetry", "tracer_provider"): "of a library that need not be installed",
    ("sinks.Prometheus", "registry"): "of a library that need not be installed",
    ("sinks.TensorBoard", "writer"): "of a library that need not be installed",
    ("sinks.WandB", "run"): "of a library that need not be installed",
}


def test_an_editor_knows_what_an_argument_takes() -> None:
    vague = []
    for name, call, argument in arguments():
        annotation = str(inspect.signature(call).parameters[argument].annotation)
        if {"object", "Any"} & set(annotation.split(" | ")) and (name, argument) not in UNTYPED:
            vague.append((name, argument, annotation))
    assert vague == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, with the checkpoints that the calls need."""
    monkeypatch.chdir(tmp_path)
    reknit.save("ckpt", STATE, step=1)
    reknit.save("runs/step_00000001", STATE, step=1)
    return tmp_path


def ended(under_way: Any) -> None:
    """Wait for a save, or enter a phase."""
    if hasattr(under_way, "result"):
        under_way.result()
    if hasattr(under_way, "__enter__"):
        under_way.__enter__()


def answer(name: str, call: Any, argument: str) -> str:
    """Return the message of a call with a wrong value of an argument, an empty one if the call takes it."""
    given = BESIDE.get((name, argument), NEEDED.get(name, {})) | {argument: Wrong()}
    kinds = inspect.signature(call).parameters
    first = [each for each in kinds if each in given and kinds[each].kind is kinds[each].POSITIONAL_ONLY]
    try:
        ended(call(*(given.pop(each) for each in first), **given))
    except reknit.UsageError as error:
        return error.message
    return ""


def test_an_argument_of_a_wrong_type_is_named(folder: Path) -> None:
    found = arguments()
    assert len(found) > 200
    unnamed = {}
    for name, call, argument in found:
        said = answer(name, call, argument)
        is_named = argument in said or ALSO_CALLED.get(argument, "\0") in said
        is_shown = "<wrong>" in said or "Wrong" in said
        # Where another argument is missing, the error names that one.
        if "needs" not in said and not (is_named and is_shown):
            unnamed[name, argument] = said
        assert sorted({path.name for path in folder.iterdir()} - {"meet"}) == ["ckpt", "runs"], (
            name,
            argument,
        )
    assert unnamed == {}


@pytest.mark.usefixtures("folder")
def test_numbers_of_numpy_are_numbers() -> None:
    assert reknit.close(np.float32(1.0))
    assert reknit.latest("runs", timeout_s=np.int64(3)) is not None
