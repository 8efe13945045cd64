"""A keyword that a call does not have: the error names the place of the keyword, or the one that is meant."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit
from reknit.errors import KeywordError, StateError, from_wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STATE: dict[str, Any] = {"model": {"w": np.ones(4)}}
SAVE, LOAD, COMM = reknit.SaveOptions, reknit.LoadOptions, reknit.CommOptions
save: Any = lambda **more: reknit.save("nowhere", STATE, **more)  # noqa: E731
load: Any = lambda **more: reknit.load("nowhere", STATE, **more)  # noqa: E731
run: Any = reknit.Checkpointer


def test_a_wrong_keyword_says_the_nearest_right_one_or_its_place() -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: save(stage="lazy"), "pass options=reknit.SaveOptions(stage='lazy')"),
        (
            lambda: save(stage="lazy", threads=2, options=SAVE()),
            "pass options=reknit.SaveOptions(..., stage='lazy', threads=2)",
        ),
        (lambda: save(fan_out=2), "pass options=reknit.SaveOptions(comm=reknit.CommOptions(fan_out=2))"),
        (lambda: save(wiat=False), "did you mean 'wait'?"),
        (
            lambda: save(timeout=60),
            "did you mean 'timeout_s'?  pass options=reknit.SaveOptions(timeout_s=60)",
        ),
        (
            lambda: save(zzz=1),
            "reknit.save takes path, state, step, wait, overwrite, metadata, options, group",
        ),
        (
            lambda: save(wiat=False, reuse=False),
            "did you mean 'wait'?  pass options=reknit.SaveOptions(reuse=False)",
        ),
        (
            lambda: load(verfy="full"),
            "did you mean 'verify'?  pass options=reknit.LoadOptions(verify='full')",
        ),
        (lambda: load(verify="full"), "pass options=reknit.LoadOptions(verify='full')"),
        (lambda: load(wait=False), "wait is a keyword of reknit.save: wait=False"),
        (lambda: load(strcit=False), "did you mean 'strict'?"),
        (lambda: SAVE(wait=False), "wait is a keyword of reknit.save itself: wait=False"),  # type: ignore[call-arg]
        (lambda: SAVE(cast=True), "cast is an option of reknit.LoadOptions: cast=True"),  # type: ignore[call-arg]
        (lambda: SAVE(fan_out=2), "pass comm=reknit.CommOptions(fan_out=2)"),  # type: ignore[call-arg]
        (lambda: SAVE(stag="lazy"), "did you mean 'stage'?"),  # type: ignore[call-arg]
        (lambda: LOAD(strict=False), "strict is a keyword of reknit.load itself: strict=False"),  # type: ignore[call-arg]
        (lambda: COMM(fanout=2), "did you mean 'fan_out'?"),  # type: ignore[call-arg]
        (lambda: run("nowhere", keeep=2), "did you mean 'keep'?"),
        (lambda: run("nowhere", stage="lazy"), "pass options=reknit.SaveOptions(stage='lazy')"),
        (lambda: run("nowhere", verify="full"), "pass load_options=reknit.LoadOptions(verify='full')"),
        (lambda: run.save(None, 1, STATE, metric={}), "did you mean 'metrics'?"),
        (lambda: run.resume(None, STATE, strict=False), "strict is a keyword of reknit.load: strict=False"),
        (lambda: reknit.latest("nowhere", pendng="wait"), "did you mean 'pending'?"),  # type: ignore[call-arg]
        (lambda: reknit.policies.every(step=5), "did you mean 'steps'?"),  # type: ignore[call-arg]
        (lambda: reknit.transforms.rename("a", "b", option=True), "did you mean 'optional'?"),  # type: ignore[call-arg]
        (lambda: reknit.Tier("nowhere", kep=1), "did you mean 'keep'?"),  # type: ignore[call-arg]
    ]
    for call, remedy in cases:
        with pytest.raises(KeywordError, match=r"reknit\.\S+ has no (keyword|option) '") as caught:
            call()
        assert caught.value.remedy == remedy
        assert isinstance(caught.value, reknit.UsageError)
        assert isinstance(caught.value, TypeError), "as any call of Python says it"


def test_a_mapping_in_place_of_options_is_taken_apart_into_what_belongs_where(tmp_path: Path) -> None:
    expected = {
        "wait": "wait is a keyword of reknit.save itself: wait=1",
        "stage": "pass options=reknit.SaveOptions(stage=1)",
        "stag": "did you mean 'stage'?",
        "cast": "cast is an option of reknit.LoadOptions: cast=1",
    }
    for name, remedy in expected.items():
        with pytest.raises(reknit.UsageError, match=r"options is a reknit\.SaveOptions here") as caught:
            save(options={name: 1})
        assert caught.value.remedy == remedy
    with pytest.raises(reknit.UsageError) as caught:
        save(options={"wait": False, "stage": "lazy"})
    assert caught.value.remedy == (
        "pass options=reknit.SaveOptions(stage='lazy'); wait is a keyword of reknit.save itself: wait=False"
    )


def test_what_has_to_have_a_name_says_so() -> None:
    with pytest.raises(KeywordError, match=r"reknit\.save takes 2 arguments .* names, not 3") as caught:
        reknit.save("nowhere", STATE, 100)  # type: ignore[call-arg]
    assert caught.value.remedy == "pass by their names step, wait, overwrite, metadata, options, group"
    with pytest.raises(KeywordError, match=r"reknit\.SaveOptions takes no arguments .* names, not 1"):
        SAVE("lazy")  # type: ignore[call-arg, arg-type]


def test_a_type_error_from_inside_of_a_call_is_taken_for_no_wrong_argument(tmp_path: Path) -> None:
    class Failing:
        def state_dict(self) -> dict[str, Any]:
            raise TypeError("mine")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    like_python: list[dict[str, Any]] = [{}, {"step": np.int64(3)}, {"step": torch.tensor(3)}]
    for given in [*like_python, {"overwrite": np.bool_(True)}]:
        with pytest.raises(StateError, match="could not be saved: TypeError: mine") as caught:
            reknit.save(tmp_path / "x", {"failing": Failing()}, **given)
        assert type(caught.value.__cause__) is TypeError


def test_the_error_reaches_other_processes_as_it_is() -> None:
    with pytest.raises(KeywordError) as caught:
        save(stage="lazy")
    assert type(from_wire(caught.value.to_wire())) is KeywordError


def public() -> list[tuple[str, Any]]:
    """Return everything that users call, with its public name."""
    spaces = {"": reknit, "policies.": reknit.policies, "transforms.": reknit.transforms}
    spaces["sinks."] = reknit.sinks
    named = ((space, module, name) for space, module in spaces.items() for name in module.__all__)
    return [(f"{space}{name}", getattr(module, name)) for space, module, name in named]


NOT_CALLED = {
    *("SavedStep", "policies.Facts", "policies.Moment", "policies.Policy", "sinks.Sink", "transforms.Rule")
}


def called() -> list[tuple[str, Any]]:
    """Return the public calls, without the classes of their results."""
    made = {name for name, one in public() if isinstance(one, type) and issubclass(one, Exception)}
    made |= {name for name, _ in public() if name.endswith("Report")} | NOT_CALLED
    return [(name, call) for name, call in public() if callable(call) and name not in made]


def test_every_public_call_says_what_is_meant_and_keeps_its_signature() -> None:
    assert len(called()) > 40
    for name, call in called():
        checked = vars(call)["__init__"] if isinstance(call, type) else call
        assert "__wrapped__" in vars(checked), f"{name} lacks @checked_call"
        assert inspect.signature(checked) == inspect.signature(checked.__wrapped__), name
        if not isinstance(call, type):
            assert pickle.loads(pickle.dumps(call)) is call


def test_options_are_still_values() -> None:
    options = SAVE(threads=2)
    assert pickle.loads(pickle.dumps(options)) == options
    assert dataclasses.replace(options, threads=3).threads == 3
    with pytest.raises(KeywordError, match="'thread'"):
        dataclasses.replace(options, thread=3)  # type: ignore[call-arg]


def test_a_name_that_reknit_does_not_have_asks_for_the_nearest() -> None:
    for name, meant in (("sav", "save"), ("checkpointer", "Checkpointer"), ("LoadOption", "LoadOptions")):
        with pytest.raises(AttributeError, match=f"no attribute {name!r}: did you mean {meant!r}"):
            getattr(reknit, name)
    for name in ("zzzzzz", "__sav__"):
        with pytest.raises(AttributeError, match=f"has no attribute {name!r}$"):
            getattr(reknit, name)
