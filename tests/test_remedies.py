"""Remedies of errors: a case causes an error, and then follows the remedy."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import reknit
from reknit.errors import ReknitError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Case = tuple[Callable[[Path], Any], str, Callable[[Path, str], Any]]


class Extra(nn.Module):
    """A module with an extra state that `form` makes."""

    def __init__(self, form: Callable[[bytes], Any]) -> None:
        super().__init__()
        self.form, self.held = form, b"held"

    def get_extra_state(self) -> Any:
        return self.form(self.held)

    def set_extra_state(self, state: Any) -> None:
        self.held = state if isinstance(state, bytes) else state.getvalue()


def pair() -> nn.ModuleDict:
    return nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})


def written(folder: Path, state: dict[str, Any]) -> Path:
    if not (folder / "saved").exists():
        reknit.save(folder / "saved", state)
    return folder / "saved"


def halves(folder: Path, **more: Any) -> Any:
    """Load float32 values into float16."""
    path = written(folder, {"m": {"w": np.ones(4, np.float32), "head": np.ones(2)}})
    return reknit.load(path, {"m": {"w": np.zeros(4, np.float16), "head": np.zeros(2)}}, **more)


def shorter(folder: Path, **more: Any) -> Any:
    """Load a tensor of four elements into one of three."""
    path = written(folder, {"m": {"w": np.ones(4), "head": np.ones(2)}})
    return reknit.load(path, {"m": {"w": np.zeros(3), "head": np.zeros(2)}}, **more)


def prefixed(folder: Path, **more: Any) -> Any:
    path = written(folder, {"m": {f"module.{name}": np.ones(2) for name in ("v", "w")}})
    return reknit.load(path, {"m": {name: np.zeros(2) for name in ("v", "w")}}, **more)


def stepped(folder: Path) -> reknit.Checkpointer:
    """Return a run with a step."""
    run = reknit.Checkpointer(folder / "run", wait=True)
    run.save(1, {"m": {"w": np.ones(4), "v": np.ones(1)}}, force=True)
    return run


def options(call: Callable[..., Any]) -> Callable[[Path, str], Any]:
    """Return a function that makes a call with the keywords that a remedy names."""
    names = {"reknit": reknit, "LoadOptions": reknit.LoadOptions, "call": call}

    def follow(folder: Path, said: str) -> Any:
        said = said if said.startswith(("options", "strict")) else f"options={said}"
        return eval(f"call(folder, {said.replace('(...)', '')})", names | {"folder": folder})

    return follow


def resized(folder: Path, said: str) -> Any:
    assert said.startswith("LoadOptions(allow_shape_mismatch=")
    return shorter(folder, options=reknit.LoadOptions(allow_shape_mismatch=("m/w",)))


def states_of(generator: Any) -> dict[str, Any]:
    held = generator.bit_generator
    return {"rng": {"state": held.state, "seeds": held.seed_seq.state}}


def spawned_again(folder: Path, _: str) -> None:
    """Save the states that a remedy names, and compare the generator that is made of them."""
    generator, saved = np.random.default_rng(7), states_of(np.random.default_rng())
    generator.spawn(2)
    generator.random()
    reknit.save(folder / "y", states_of(generator))
    reknit.load(folder / "y", saved)
    other = np.random.default_rng(np.random.SeedSequence(**saved["rng"]["seeds"]))
    other.bit_generator.state = saved["rng"]["state"]
    assert other.random() == generator.random()
    assert other.spawn(1)[0].random() == generator.spawn(1)[0].random()


CASES: dict[str, Case] = {
    "another dtype": (halves, r"LoadOptions\(cast=True\)", options(halves)),
    "another shape": (shorter, r"LoadOptions\(allow_shape_mismatch=\.\.\.\)", resized),
    "a lenient load": (shorter, r"strict=False", options(shorter)),
    "a step of a run": (
        lambda folder: stepped(folder).load({"m": {"w": np.zeros(3)}}),
        r"reknit\.load\(\.\.\., strict=False\).* reknit\.load\('[^']*', state, \.\.\.\)",
        lambda _, said: eval(
            said.partition("; for a part of the step: ")[2].replace("...", "strict=False"),
            {"reknit": reknit, "state": {"m": {"w": np.zeros(3), "v": np.zeros(1)}}},
        ),
    ),
    "a prefix": (prefixed, r"options=reknit\.LoadOptions\(.*\)\]\)", options(prefixed)),
    "an extra state as BytesIO": (
        lambda folder: reknit.save(folder / "x", {"m": Extra(io.BytesIO)}),
        r"the bytes that its getvalue\(\) returns",
        lambda folder, _: reknit.save(folder / "x", {"m": Extra(bytes)}),
    ),
    "a generator that spawns": (
        lambda folder: reknit.save(folder / "x", {"rng": np.random.default_rng(7)}),
        r"its bit_generator\.state, .* its bit_generator\.seed_seq\.state .*SeedSequence\(\*\*saved\)",
        spawned_again,
    ),
    "one name of two modules": (
        lambda folder: reknit.save(folder / "x", {"m": [nn.Linear(2, 2), nn.Linear(2, 2)]}),
        r"putting each under a key of its own",
        lambda folder, _: reknit.save(folder / "x", {"m": {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}}),
    ),
    "one name of two parameters": (
        lambda folder: reknit.save(
            folder / "x", {**(both := pair()), "optimizer": torch.optim.SGD(both.parameters())}
        ),
        r"an nn\.ModuleDict",
        lambda folder, _: reknit.save(
            folder / "x", {"both": (both := pair()), "optimizer": torch.optim.SGD(both.parameters())}
        ),
    ),
    "an optimizer without a model": (
        lambda folder: reknit.save(folder / "x", {"optimizer": torch.optim.SGD(pair().parameters())}),
        r"make the optimizer from named_parameters\(\)",
        lambda folder, _: reknit.save(
            folder / "x", {"optimizer": torch.optim.SGD(list(pair().named_parameters()))}
        ),
    ),
    "a bare module": (
        lambda folder: reknit.save(folder / "x", pair()),  # type: ignore[arg-type]
        r"wrap it: (\{.*\})",
        lambda folder, said: reknit.save(folder / "x", eval(said[len("wrap it: ") :], {"model": pair()})),
    ),
    "an item name of NumPy": (
        lambda folder: reknit.save(folder / "x", {np.str_("m"): 1}),
        r"str\(\) of it",
        lambda folder, _: reknit.save(folder / "x", {str(np.str_("m")): 1}),
    ),
}


def test_a_remedy_can_be_followed(tmp_path: Path) -> None:
    for case, (cause, words, follow) in CASES.items():
        folder = tmp_path / case
        folder.mkdir()
        with pytest.raises(ReknitError) as caught:
            cause(folder)
        said = re.search(words, str(caught.value))
        assert said is not None, str(caught.value)
        follow(folder, said[0])


def test_an_extra_state_as_bytes_comes_back(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", {"m": Extra(bytes)})
    other = Extra(bytes)
    other.held = b""
    reknit.load(tmp_path / "x", {"m": other})
    assert other.held == b"held"
