"""Calls with arguments of `torch.save` and `torch.load`: each works, or the error names the right call."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import reknit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL = torch.nn.Linear(4, 4)
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())
STATE: dict[str, Any] = {"model": MODEL}
SWAPPED = "the path comes first"
A_FOLDER = "a checkpoint is a folder, not an open file"

# Any, since no type checker would let these calls pass.
save: Any = reknit.save
load: Any = reknit.load
prepare: Any = reknit.prepare


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, which has one checkpoint and files of other programs."""
    monkeypatch.chdir(tmp_path)
    reknit.save("ckpt", STATE)
    torch.save(MODEL.state_dict(), "old.pt")
    save_file(MODEL.state_dict(), "old.safetensors")
    return tmp_path


def test_a_habit_from_torch_is_answered_and_nothing_is_written(folder: Path) -> None:
    cases: list[tuple[Callable[[], Any], list[str]]] = [
        (lambda: save(STATE, "new"), [SWAPPED, "path='new'"]),
        (lambda: save(STATE, "new", wait=False).result(), [SWAPPED]),
        (lambda: save(MODEL.state_dict(), "new.pt"), [SWAPPED, "path='new.pt'"]),
        (lambda: save(MODEL, "new"), [SWAPPED]),
        (lambda: load(STATE, "ckpt"), [SWAPPED, "path='ckpt'"]),
        (lambda: prepare(STATE, "new"), [SWAPPED]),
        (lambda: reknit.open(STATE), [SWAPPED]),  # type: ignore[arg-type]
        (lambda: save(STATE), ["needs state", 'reknit.save(path, {"model": model})']),
        (lambda: save(), ["needs path and state"]),
        (lambda: load("ckpt"), ["needs state", 'reknit.load(path, {"model": model})', "reknit.open(path)"]),
        (lambda: save(io.BytesIO(), STATE), [A_FOLDER]),
        (lambda: load(io.BytesIO(), STATE), [A_FOLDER]),
        (lambda: prepare(io.BytesIO(), STATE), [A_FOLDER]),
        (lambda: save("new", MODEL), ['wrap it: {"model": model}']),
        (lambda: save("new", OPTIMIZER), ['wrap it: {"optimizer": optimizer}']),
        (lambda: save("new", OPTIMIZER.state_dict()), ["of an optimizer", '{"optimizer": optimizer}']),
        (lambda: save("new", [MODEL, OPTIMIZER]), ['{"model": model, "optimizer": optimizer}']),
        (lambda: load("ckpt", MODEL), ['wrap it: {"model": model}']),
        (lambda: load("ckpt", MODEL.state_dict()), ["no item 'weight', 'bias'", "{'model': ...}"]),
        (lambda: save("old.pt", STATE), ["a checkpoint is a folder", "choose another path"]),
        (lambda: save("old.pt/step_1", STATE), ["a checkpoint is a folder", "choose another path"]),
    ]
    for call, said in cases:
        with pytest.raises(reknit.ReknitError) as error:
            call()
        assert [part for part in said if part not in str(error.value)] == [], str(error.value)
        assert sorted(path.name for path in folder.iterdir()) == ["ckpt", "old.pt", "old.safetensors"], said


def test_a_file_of_another_program_is_loaded_where_it_is() -> None:
    for file in ("old.pt", "old.safetensors"):
        model = torch.nn.Linear(MODEL.in_features, MODEL.out_features)
        load(file, {"model": model})
        assert torch.equal(model.weight, MODEL.weight), file


def test_an_open_file_is_answered_without_its_bytes(folder: Path) -> None:
    with (folder / "new.pt").open("wb") as file, pytest.raises(reknit.UsageError, match=A_FOLDER):
        save(file, STATE)
    assert (folder / "new.pt").stat().st_size == 0


def test_a_path_that_ends_like_a_file_is_a_folder_as_any_other() -> None:
    reknit.save("step_1.pt", STATE, step=1)
    assert reknit.load("step_1.pt", STATE).step == 1


def test_a_state_dict_is_a_state_whose_items_are_its_tensors(caplog: pytest.LogCaptureFixture) -> None:
    saved = torch.nn.Sequential(MODEL).state_dict()
    reknit.save("bare", saved)
    into = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    assert "the state has 2 tensors as items of their own, such as '0.weight'" in caplog.text
    reknit.load("bare", into)
    assert all(torch.equal(into[name], saved[name]) for name in saved)


def test_states_with_few_items_are_saved_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    for state in ({"w": torch.zeros(2)}, {"model": MODEL, "a.b": 1}, {"a": {"b.c": torch.zeros(2)}}):
        reknit.save("few", state, overwrite=True)
        assert "items of their own" not in caplog.text, state


def test_a_run_refuses_what_is_no_state_before_it_says_that_it_begins() -> None:
    wrong: list[Any] = ["run", MODEL, [MODEL]]
    for state in wrong:
        with reknit.Checkpointer("run") as run, pytest.raises(reknit.UsageError, match="state is a mapping"):
            run.resume(state)
