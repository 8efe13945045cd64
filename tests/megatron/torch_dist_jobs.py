"""Jobs with folders that Megatron-Core itself saves (torch_dist), in every form of its optimizers."""

from __future__ import annotations

import os
import warnings
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import reknit
from reknit.integrations import megatron
from tests.megatron.jobs import _change_options, _forget, compare
from tests.megatron.layouts import Layout

if TYPE_CHECKING:
    from tests.megatron.gpt import Trained

FULLY, BY_BUCKET, BY_BUFFER = "fully_reshardable", "dp_reshardable", "dp_zero_gather_scatter"
_SMALL = Layout(2, layers=2, multiple=4)
_TP2 = replace(_SMALL, tp=2, multiple=2)
_UNTIED = replace(_SMALL, pp=2, tied=False)
_MOE = replace(_SMALL, experts=4, ep=2)

SAVED: dict[str, tuple[Layout, str | None, dict[str, Any]]] = {
    "fully": (replace(_TP2, bf16=True), FULLY, {"non_homogeneous_layers": False}),
    "fully-fp32": (_UNTIED, FULLY, {}),
    "fully-vpp": (replace(_SMALL, pp=2, vp=2, layers=4), FULLY, {}),
    "fully-moe": (_MOE, FULLY, {"non_homogeneous_layers": False, "chained_optim_avoid_prefix": False}),
    "fully-single-experts": (_MOE, FULLY, {"singleton_local_shards": True}),
    "by-bucket": (replace(_SMALL, bucket=2000, overlap=True), BY_BUCKET, {}),
    "by-bucket-bf16": (replace(_TP2, bf16=True), BY_BUCKET, {}),
    "by-bucket-moe": (_MOE, BY_BUCKET, {}),
    "by-buffer": (replace(_SMALL, bf16=True, bucket=2000, overlap=True), BY_BUFFER, {}),
    "float16": (replace(_TP2, bf16=True, distributed=False), None, {}),
    "float16-moe": (replace(_MOE, bf16=True, distributed=False), None, {}),
    "fp32": (replace(_SMALL, pp=2, distributed=False), None, {}),
}
"""Each folder: its layout, the form of its distributed optimizer, and more options of the state dict."""

RESHAPED: dict[str, dict[str, Layout]] = {
    "fully": {
        "pp2": replace(_SMALL, bf16=True, pp=2),
        "not distributed": replace(_SMALL, bf16=True, distributed=False),
    },
    "fully-fp32": {
        "tp2": replace(_TP2, tied=False),
        "not distributed": replace(_UNTIED, pp=1, distributed=False),
    },
    "fully-vpp": {"tp2": replace(_TP2, layers=4)},
    "fully-moe": {"ep1": replace(_MOE, ep=1)},
    "float16": {"dp2": replace(_SMALL, bf16=True)},
    "fp32": {"tp2": _TP2},
}
"""Other layouts of as many ranks that load a folder."""

CUT_BY_MEGATRON = ("fully-vpp",)
"""Folders in which Megatron saved zeros as states: a stage with tied embeddings has two buckets."""


def state_dict(trained: Trained, form: str | None, more: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    """Return the state dict of a training script."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import ShardedObject
    from megatron.core.transformer.enums import AttnBackend

    metadata = {"chained_optim_avoid_prefix": True, "non_homogeneous_layers": True, **more}
    if form is not None:
        metadata["distrib_optim_sharding_type"] = form
    chunks = [chunk.module.sharded_state_dict(metadata=metadata) for chunk in trained.chunks]
    names = ["model"] if len(chunks) == 1 else [f"model{n}" for n in range(len(chunks))]
    models = dict(zip(names, chunks, strict=True))
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    random = {"seed": [*place], "numpy": np.random.get_state(), "torch": torch.full((3,), float(sum(place)))}
    grid = trained.layout.pp, trained.layout.tp
    both = models["model"] if len(chunks) == 1 else models
    return {
        "args": Namespace(lr=0.5, dtype=torch.bfloat16, backend=AttnBackend.unfused, path=None),
        "iteration": 7,
        "opt_param_scheduler": {"max_lr": 0.5, "num_steps": 7},
        **models,
        "rng_state": ShardedObject(
            "rng_state", [random], grid, place, replica_id=parallel_state.get_data_parallel_rank()
        ),
        "optimizer": trained.optimizer.sharded_state_dict(both, is_loading=loading, metadata=metadata),
    }


def save_all(root: str, names: tuple[str, ...]) -> None:
    """Train, and let Megatron save, each of these folders, with the expected tensors beside it."""
    from megatron.core import dist_checkpointing

    from tests.megatron import gpt, truth

    for name in names:
        layout, form, more = SAVED[name]
        trained = gpt.build(layout)
        _change_options(trained)
        if dist.get_rank() == 0:
            os.makedirs(f"{root}/{name}")
        dist.barrier()
        dist_checkpointing.save(state_dict(trained, form, more, loading=False), f"{root}/{name}")
        known = truth.truth(trained)
        if dist.get_rank() == 0:
            torch.save(known, f"{root}/{name}.truth")


def load_each(root: str, layouts: dict[str, dict[str, Layout]]) -> dict[str, Any]:
    """Load folders into live models and optimizers, and return the differences, or the error."""
    from tests.megatron import gpt, truth

    differing: dict[str, Any] = {}
    for name, into in layouts.items():
        expected = torch.load(f"{root}/{name}.truth", weights_only=False)
        for number, (way, layout) in enumerate(into.items()):
            trained = gpt.build(layout, steps=number % 2, seed=1)
            _forget(trained, keep_states=number % 2 == 1)
            try:
                report = reknit.load(f"{root}/{name}", trained.state())
            except reknit.ReknitError as error:
                differing[f"{name} into {way}"] = str(error)
                continue
            assert report.step == 7
            assert not report.unexpected, report.unexpected
            differing[f"{name} into {way}"] = compare(expected, truth.truth(trained))
            gpt.train(trained, 1)
    return differing


def load_as_script(root: str, layouts: dict[str, dict[str, Layout]]) -> dict[str, Any]:
    """Load folders by the calls of a script, with Megatron and with reknit, and return the differences."""
    from megatron.core import dist_checkpointing

    differing: dict[str, Any] = {}
    for name, into in layouts.items():
        _, form, more = SAVED[name]
        for way, layout in into.items():
            loaded: list[Any] = []
            for load in (dist_checkpointing.load, megatron.load):
                state = _prepared(layout, form or FULLY, more)
                if way != "same":  # Megatron keys random states by the grid, and refuses another one
                    del state["rng_state"]
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    loaded.append(load(state, f"{root}/{name}"))
            differing[f"{name} into {way}"] = _unlike(loaded[0], loaded[1], "")
    return differing


def _prepared(layout: Layout, form: str, more: dict[str, Any]) -> dict[str, Any]:
    from tests.megatron import gpt

    trained = gpt.build(layout, steps=0, seed=1)
    _forget(trained, keep_states=False)
    return state_dict(trained, form if layout.distributed else None, more, loading=True)


def _unlike(one: Any, other: Any, path: str) -> list[str]:
    """Return the paths at which two loaded values differ; padding between parameters may be NaN."""
    if isinstance(one, Namespace) and isinstance(other, Namespace):
        one, other = vars(one), vars(other)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
        return [] if same else [path]
    if isinstance(one, np.ndarray):
        return [] if np.array_equal(one, other) else [path]
    if type(one) is not type(other):
        return [f"{path}: {one!r:.80} and {other!r:.80}"]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{path}: {one.keys() ^ other.keys()}"]
        return [found for key in one for found in _unlike(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [path]
        pairs = zip(one, other, strict=True)
        return [found for n, pair in enumerate(pairs) for found in _unlike(*pair, path=f"{path}/{n}")]
    if hasattr(one, "getvalue"):
        one, other = one.getvalue(), other.getvalue()
    return [] if one == other else [f"{path}: {one!r:.80} and {other!r:.80}"]


def load_live_optimizer(root: str, name: str) -> Any:
    """Load a folder by a script whose state dict has the optimizer itself, and return the differences."""
    from tests.megatron import gpt, truth

    layout, form, more = SAVED[name]
    trained = gpt.build(layout, steps=0, seed=1)
    _forget(trained, keep_states=False)
    state = state_dict(trained, form, more, loading=True) | {"optimizer": trained.optimizer}
    loaded = megatron.load(state, f"{root}/{name}")
    expected = torch.load(f"{root}/{name}.truth", weights_only=False)
    return compare(expected, truth.truth(trained)), loaded["iteration"], loaded["args"].backend.name


def save_and_load_by_buffers(root: str, name: str) -> Any:
    """Save the sharded state dict of an optimizer by its buffers with reknit, and load it again."""
    from tests.megatron import gpt

    layout, form, more = SAVED[name]
    trained = gpt.build(layout)
    state = state_dict(trained, form, more, loading=False)
    path = f"{root}/script-{name}"
    megatron.save(state, path, options=reknit.SaveOptions(durability="process", timeout_s=60))
    loaded = megatron.load(_prepared(layout, form or FULLY, more), path)
    from reknit.integrations.megatron.sharded import unwrapped

    return _unlike(unwrapped(state["optimizer"]), loaded["optimizer"], "")


def load_into_optimizer(root: str, name: str) -> Any:
    """Load a folder by a script's state dict and the optimizer's own load; return the differences."""
    from tests.megatron import gpt, truth

    layout, form, more = SAVED[name]
    trained = gpt.build(layout, steps=0, seed=1)
    state = state_dict(trained, form, more, loading=True)
    trained.optimizer.load_state_dict(megatron.load(state, f"{root}/{name}")["optimizer"])
    expected = torch.load(f"{root}/{name}.truth", weights_only=False)
    return compare(expected, truth.truth(trained))


def run_page(root: str, name: str, snippet: str) -> list[str]:
    """Run the code of a page twice, first with a folder of Megatron, and return the differences."""
    from tests.megatron import gpt, truth

    os.chdir(f"{root}/page")
    layout, _, _ = SAVED[name]
    expected = torch.load(f"{root}/{name}.truth", weights_only=False)
    differing: list[str] = []
    for step in (8, 9):
        trained = gpt.build(layout, steps=0, seed=step)
        names: dict[str, Any] = {"model": trained.chunks, "optimizer": trained.optimizer}
        exec(snippet, names)
        assert names["step"] + 1 == step
        differing += compare(expected, truth.truth(trained))
    return differing
