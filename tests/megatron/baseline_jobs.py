"""Jobs that compare two versions of Megatron-Core, and Megatron's own checkpoints with those of reknit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import reknit
from tests.megatron.jobs import OPTIONS, _change_options, _forget, compare
from tests.megatron.layouts import Layout

if TYPE_CHECKING:
    from tests.megatron.gpt import Trained

SAVED = {
    "fp32": Layout(3, layers=2, multiple=2),
    "bf16": Layout(3, layers=2, multiple=2, bf16=True),
    "mixed": Layout(3, layers=2, multiple=2, bf16=True, mixed=True),
}
"""Three ranks, so that ranges of the optimizer end in the middle of rows and of a gated layer's halves."""

LOADED = {
    "fp32": {"dp2": Layout(2, layers=2, multiple=2), "tp2": Layout(2, layers=2, tp=2)},
    "bf16": {
        "dp2": Layout(2, layers=2, multiple=2, bf16=True),
        "pp2": Layout(2, layers=2, multiple=2, pp=2, bf16=True),
    },
    "mixed": {"dp2": Layout(2, layers=2, multiple=2, bf16=True, mixed=True)},
}
"""The vocabulary is padded to the same length everywhere."""

MODEL_SPACE = {"distrib_optim_sharding_type": "fully_sharded_model_space", "non_homogeneous_layers": True}
"""States of the optimizer in the space of the model, an option that Megatron-Core 0.16 no longer has."""


def save_all(root: str, by_megatron: bool) -> str:
    """Train and save each layout, by reknit and by Megatron itself, and return Megatron's version.

    Megatron's own states of a group of several dtypes are those of other parameters.
    """
    import megatron.core

    from tests.megatron import gpt, truth

    for name, layout in SAVED.items():
        trained = gpt.build(layout)
        _change_options(trained)
        report = reknit.save(f"{root}/{name}", trained.state(), step=2, options=OPTIONS).result()
        assert report.warnings == (), report.warnings
        if by_megatron and not layout.mixed:
            _save_by_megatron(f"{root}/{name}.megatron", trained)
        known = truth.truth(trained)
        if dist.get_rank() == 0:
            torch.save(known, f"{root}/{name}.truth")
    return str(megatron.core.__version__)


def load_all(root: str, by_megatron: bool) -> dict[str, list[str]]:
    """Load each checkpoint into other layouts, by reknit or by Megatron, and return the differences."""
    from tests.megatron import gpt, truth

    differing = {}
    for name, layouts in LOADED.items():
        expected = torch.load(f"{root}/{name}.truth", weights_only=False)
        for into, layout in layouts.items():
            if by_megatron and layout.mixed:
                continue
            trained = gpt.build(layout, steps=0, seed=1)
            _forget(trained, keep_states=False)
            if by_megatron:
                _load_by_megatron(f"{root}/{name}.megatron", trained)
            else:
                report = reknit.load(f"{root}/{name}", trained.state())
                assert report.step == 2
            differing[f"{name} into {into}"] = compare(expected, truth.truth(trained))
            gpt.train(trained, 1)
    return differing


def load_megatrons(root: str) -> dict[str, list[str]]:
    """Load Megatron's folders in the space of the model into other layouts, and return the differences."""
    from tests.megatron import gpt, truth

    differing = {}
    for name, layouts in LOADED.items():
        expected = torch.load(f"{root}/{name}.truth", weights_only=False)
        for into, layout in layouts.items() if not SAVED[name].mixed else ():
            trained = gpt.build(layout, steps=0, seed=1)
            _forget(trained, keep_states=False)
            reknit.load(f"{root}/{name}.megatron", trained.state())
            differing[f"{name} into {into}"] = compare(expected, truth.truth(trained))
    return differing


def _save_by_megatron(folder: str, trained: Trained) -> None:
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        os.mkdir(folder)
    dist.barrier()
    dist_checkpointing.save(_sharded(trained, loading=False), folder)


def _load_by_megatron(folder: str, trained: Trained) -> None:
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(_sharded(trained, loading=True), folder)
    trained.chunks[0].module.load_state_dict(loaded["model"])
    trained.optimizer.load_state_dict(loaded["optimizer"])


def _sharded(trained: Trained, *, loading: bool) -> dict[str, Any]:
    model = trained.chunks[0].module.sharded_state_dict(metadata=MODEL_SPACE)
    optimizer = trained.optimizer.sharded_state_dict(model, is_loading=loading, metadata=MODEL_SPACE)
    return {"model": model, "optimizer": optimizer}
