"""One optimizer: a run that was saved and loaded, compared bit for bit with a run that never stopped."""

from __future__ import annotations

import io
import random
import shutil
import tempfile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

import reknit

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[[nn.Module], Any]
    Step = Callable[[nn.Module, Any, Callable[[], Any]], None]

BEFORE, AFTER = 3, 4
"""Steps before the save, and after it."""


class Outcome(NamedTuple):
    """The result of one way to resume: `ok`, and else the reason."""

    ok: bool
    why: str = ""


class Trial(NamedTuple):
    """The results of an optimizer: with its own methods, with reknit, and whether its states reshard."""

    own: Outcome
    ours: Outcome
    cuts: bool


def net(seed: int) -> nn.Module:
    """Return a small model with matrices, vectors and a norm."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))


def train(model: nn.Module, optimizer: Any, step: Step, first: int, count: int) -> None:
    """Take `count` steps on fixed batches."""
    for number in range(first, first + count):
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 + number))

        def loss(batch: torch.Tensor = batch) -> Any:
            return model(batch).square().mean()

        step(model, optimizer, loss)


def usual(model: nn.Module, optimizer: Any, loss: Callable[[], Any]) -> None:
    """Take a step as most training loops do."""
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def run(make: Make, step: Step = usual) -> Trial:
    """Train, save in both ways, go on; resume twice from that, and compare the weights."""
    _seed()
    model = net(0)
    optimizer = make(model)
    train(model, optimizer, step, 0, BEFORE)
    stream = io.BytesIO()
    own: Outcome | None = None
    try:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    except Exception as error:  # any code of the optimizer
        own = Outcome(False, _text(error))
    folder = tempfile.mkdtemp(prefix="optimizers-")
    try:
        ours, cuts = _saved(folder, model, optimizer)
        _seed()
        train(model, optimizer, step, BEFORE, AFTER)
        own = own or _resumed(lambda m, o: _load_own(stream, m, o), make, step, model)
        if ours.ok:
            ours = _resumed(
                lambda m, o: reknit.load(folder + "/c", {"model": m, "optimizer": o}), make, step, model
            )
        return Trial(own, ours, cuts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _saved(folder: str, model: nn.Module, optimizer: Any) -> tuple[Outcome, bool]:
    """Save, and return whether all states are as large as their parameters, or single numbers."""
    try:
        reknit.save(folder + "/c", {"model": model, "optimizer": optimizer})
    except Exception as error:  # any code of the optimizer
        return Outcome(False, "save: " + _text(error)), False
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    with reknit.open(folder + "/c") as checkpoint:
        tensors = {name: spec.shape for name, spec in checkpoint.tensors["optimizer"].items()}
    return Outcome(True), all(_cuts(name, shape, shapes) for name, shape in tensors.items())


def _cuts(name: str, shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]]) -> bool:
    part, _, rest = name.partition("/")
    whole = shapes.get(rest.partition("/")[0])
    fits = whole is not None and (shape in ((), whole) or (len(shape) == len(whole) and 1 in shape))
    return part == "state" and fits


def _load_own(stream: io.BytesIO, model: nn.Module, optimizer: Any) -> None:
    stream.seek(0)
    saved = torch.load(stream, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def _resumed(load: Callable[[nn.Module, Any], Any], make: Make, step: Step, want: nn.Module) -> Outcome:
    try:
        _seed()
        model = net(1)
        optimizer = make(model)
        load(model, optimizer)
        _seed()
        train(model, optimizer, step, BEFORE, AFTER)
    except Exception as error:  # any code of the optimizer
        return Outcome(False, _text(error))
    pairs = zip(want.state_dict().values(), model.state_dict().values(), strict=True)
    return Outcome(True) if all(torch.equal(*pair) for pair in pairs) else Outcome(False, "other weights")


def _seed() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
