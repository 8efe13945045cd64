"""Names that differ by a prefix, and the transform that is shown for them, taken literally."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit
from reknit.engine.loading.root import prefix_hint
from tests.running.cases import one_by_one_in

if TYPE_CHECKING:
    from pathlib import Path

Names = dict[str, Any]


def net() -> Names:
    return {"0.weight": np.ones(3), "0.bias": np.ones(2), "body.1.weight": np.ones(1)}


def put(prefix: str, names: Names) -> Names:
    return {f"{prefix}{name}": value for name, value in names.items()}


def shown_by(error: reknit.MismatchError) -> reknit.LoadOptions:
    """Return the options in the remedy, as a user gets them who pastes the text."""
    pasted = re.search(r"pass options=(reknit\.LoadOptions\(.*\))$", str(error), re.MULTILINE)
    assert pasted is not None, error
    return eval(pasted[1], {"reknit": reknit})  # type: ignore[no-any-return]


def zeros(state: dict[str, Names]) -> dict[str, Names]:
    return {
        item: {name: np.zeros_like(value) for name, value in names.items()} for item, names in state.items()
    }


def fixed(path: Path, saved: dict[str, Names], target: dict[str, Names]) -> str:
    """Save, load in vain, load with the remedy of the error, and return the error."""
    reknit.save(path, saved)
    with pytest.raises(reknit.MismatchError) as caught:
        reknit.load(path, target)
    report = reknit.load(path, target, options=shown_by(caught.value))
    assert report.missing == report.unexpected == ()
    assert all(array.all() for names in target.values() for array in names.values())
    return str(caught.value)


def test_a_prefix_of_either_side_is_said_with_the_transform_that_works(tmp_path: Path) -> None:
    for prefix, folder in one_by_one_in(tmp_path, ["module.", "_orig_mod.", "model.", "_orig_mod.module."]):
        wrapped, plain = {"model": put(prefix, net())}, {"model": net()}
        reported = fixed(folder / "a", wrapped, zeros(plain))
        assert f"-> all names differ by the prefix {prefix!r} in the checkpoint: pass options=" in reported
        reported = fixed(folder / "b", plain, zeros(wrapped))
        assert f"-> all names differ by the prefix {prefix!r} in the target: pass options=" in reported


def test_a_wrapper_in_the_middle_of_names_is_said(tmp_path: Path) -> None:
    inside = {
        name.replace("1.", "1._orig_mod.").replace("0.", "0._orig_mod."): v for name, v in net().items()
    }
    reported = fixed(tmp_path / "a", {"model": inside}, zeros({"model": net()}))
    assert "all names differ by the wrapper '_orig_mod' in the checkpoint" in reported
    reknit.save(tmp_path / "b", {"model": net()})
    with pytest.raises(reknit.MismatchError, match=r"'_orig_mod' in the target: .* pass the module itself"):
        reknit.load(tmp_path / "b", {"model": inside})


@pytest.mark.parametrize(("wrapped", "trained"), [("checkpoint", False), ("target", True)])
def test_an_optimizer_is_mended_with_its_model_before_and_after_its_first_step(
    tmp_path: Path, wrapped: str, trained: bool
) -> None:
    def state(outer: bool, steps: bool) -> dict[str, Any]:
        inner = torch.nn.Linear(3, 2)
        model = torch.nn.ModuleDict({"model": inner}) if outer else inner
        optimizer = torch.optim.AdamW(model.parameters())
        if steps:
            inner(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved, target = state(wrapped == "checkpoint", True), state(wrapped == "target", trained)
    reknit.save(tmp_path / "x", saved)
    with pytest.raises(
        reknit.MismatchError, match=f"differ by the prefix 'model.' in the {wrapped}"
    ) as caught:
        reknit.load(tmp_path / "x", target)
    reknit.load(tmp_path / "x", target, options=shown_by(caught.value))
    for one, other in zip(saved["model"].parameters(), target["model"].parameters(), strict=True):
        assert torch.equal(one, other)
        mine, theirs = saved["optimizer"].state[one], target["optimizer"].state[other]
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])


def test_a_lenient_load_that_would_restore_nothing_shows_the_transform_too(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", {"model": put("module.", net())})
    target = zeros({"model": net()})
    with pytest.raises(reknit.MismatchError, match="no tensor of the target would be restored") as caught:
        reknit.load(tmp_path / "x", target, strict=False)
    assert len(reknit.load(tmp_path / "x", target, options=shown_by(caught.value)).restored) == 3


def test_a_transform_is_not_shown_where_it_would_break_what_fits() -> None:
    reported = prefix_hint(["m/module.a"], {"m/a"}, ["m/b"])
    assert reported is not None
    assert "prefix 'module.' in the target" in reported
    assert "transforms" not in reported
    reported = prefix_hint(["m/a"], {"m/module.a"}, [], free=False)
    assert reported is not None
    assert "transforms" not in reported, "a load has one rule of names"


def test_names_that_only_partly_differ_by_a_prefix_are_said_to_be_most_or_are_not_mentioned() -> None:
    reported = prefix_hint(["m/a", "m/b", "m/new"], {"m/module.a", "m/module.b"}, [])
    assert reported is not None
    assert reported.startswith("most names differ by the prefix 'module.' in the checkpoint")
    assert prefix_hint(["m/a", "m/new", "m/other"], {"m/module.a"}, []) is None
    assert prefix_hint(["m/a", "w"], {"n/a", "x"}, []) is None
    assert prefix_hint([], set(), []) is None
