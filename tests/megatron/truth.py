"""What do Megatron's own objects hold?  Gathered from every rank, and joined without reknit.

Two things differ from the tested code.  Megatron uses the other one of its key spaces, with one key for each
expert and for each half of a gated layer.  States are expanded to the size of their parameters before they
are cut.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.megatron.gpt import Trained

Piece = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.Tensor]
OPTIONS = ("lr", "weight_decay", "betas", "eps", "wd_mult", "lr_mult", "max_lr", "min_lr")


def truth(trained: Trained) -> dict[str, Any]:
    """Return all whole tensors by name, and options and steps of the optimizer by parameter, on every rank.

    Raises `AssertionError` if copies differ or elements are missing.
    """
    mine = [*_model(trained), *_optimizer(trained)]
    options = dict(_options(trained))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, options))
    whole: dict[str, torch.Tensor] = {}
    known: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for pieces, theirs in everyone:
        for piece in pieces:
            _put(piece, whole, known)
        for name, value in theirs.items():
            assert values.setdefault(name, value) == value, name
    holes = [name for name, seen in known.items() if not bool(seen.all())]
    assert not holes, holes
    return {**_joined(whole), **values}


def _put(piece: Piece, whole: dict[str, torch.Tensor], known: dict[str, torch.Tensor]) -> None:
    name, shape, offsets, lengths, data = piece
    total = whole.setdefault(name, torch.zeros(shape, dtype=data.dtype))
    seen = known.setdefault(name, torch.zeros(shape, dtype=torch.bool))
    at = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
    data = data.reshape(lengths)
    here = ~torch.isnan(data)
    both = here & seen[at]
    assert torch.equal(total[at][both], data[both]), f"copies of {name} differ"
    total[at] = torch.where(here, data, total[at])
    seen[at] |= here


def _joined(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join the halves of gated layers, under the names of a model in one process."""
    joined = {}
    for name, tensor in whole.items():
        plain = re.sub(r"\.experts\.experts\.(\d+)\.", r".experts.local_experts.\1.", name)
        half = re.search(r"linear_fc1\.(weight|bias)_([wv])", plain)
        if half is None:
            joined[plain] = tensor
        elif half[2] == "w":
            other = whole[name.replace(half[0], half[0][:-1] + "v")]
            joined[plain.replace(half[0], half[0][:-2])] = torch.cat([tensor, other])
    return joined


def _leaves(trained: Trained) -> Iterator[Any]:
    for chunk in trained.chunks:
        inner = chunk
        while hasattr(inner, "module"):
            inner = inner.module
        found = inner.sharded_state_dict(metadata={"singleton_local_shards": True})
        for leaf in found.values():
            if isinstance(leaf, (ShardedTensor, ShardedTensorFactory)):
                yield leaf


def _cut(leaf: Any, local: torch.Tensor, suffix: str = "") -> Iterator[Piece]:
    """Yield the pieces that Megatron makes of a tensor in the place of the leaf's."""
    built = [leaf]
    if isinstance(leaf, ShardedTensorFactory):
        built = leaf.build_fn(leaf.key, local, leaf.replica_id, None)
    for part in built:
        data = part.data if isinstance(leaf, ShardedTensorFactory) else local
        lengths = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        name = f"{part.key}{suffix}"
        yield name, tuple(part.global_shape), tuple(part.global_offset), lengths, data.detach().clone()


def _model(trained: Trained) -> Iterator[Piece]:
    for leaf in _leaves(trained):
        yield from _cut(leaf, leaf.data.detach())


def _optimizer(trained: Trained) -> Iterator[Piece]:
    leaves = {id(leaf.data): leaf for leaf in _leaves(trained)}
    for parameter, start, stop, states, _ in _states(trained):
        for name, state in states.items():
            if isinstance(state, torch.Tensor) and state.ndim:
                local = torch.full(parameter.shape, torch.nan, dtype=state.dtype)
                local.view(-1)[start:stop] = state.detach().reshape(-1)
                yield from _cut(leaves[id(parameter)], local, f"@{name}")


def _states(trained: Trained) -> Iterator[tuple[Any, int, int, dict[str, Any], dict[str, Any]]]:
    """Yield each parameter that this rank's optimizers step, with its range, its states, and its group."""
    chain = getattr(trained.optimizer, "chained_optimizers", [trained.optimizer])
    for optimizer in chain:
        torch_optimizer = optimizer.optimizer
        if hasattr(optimizer, "gbuf_ranges"):
            groups = torch_optimizer.param_groups
            groups = torch_optimizer.param_groups
            found = {_key(main): (main, group) for group in groups for main in group["params"]}
            for parameter in optimizer.model_param_gbuf_map:
                held = optimizer._get_model_param_range_map(parameter)["param"]
                low = parameter.dtype != torch.float32
                part = parameter.main_param if low else parameter.view(-1)[held.start : held.end]
                main, group = found[_key(part)]
                states = dict(torch_optimizer.state[main])
                if low:
                    states["master"] = main
                yield parameter, held.start, held.end, states, group
            continue
        mains = {id(p): p for group in torch_optimizer.param_groups for p in group["params"]}
        for chunk in trained.chunks:
            for parameter in chunk.parameters():
                main = getattr(parameter, "main_param", parameter)
                if id(main) not in mains:
                    continue
                states = dict(torch_optimizer.state[main])
                if main is not parameter:
                    states["master"] = main
                group = next(g for g in torch_optimizer.param_groups if any(p is main for p in g["params"]))
                yield parameter, 0, parameter.numel(), states, group


def _key(main: torch.Tensor) -> tuple[int, int]:
    """Return the memory of a tensor that an optimizer updates: Megatron's own numbers of it can be wrong."""
    return main.data_ptr(), main.numel()


def _options(trained: Trained) -> Iterator[tuple[str, Any]]:
    leaves = {id(leaf.data): leaf for leaf in _leaves(trained)}
    for parameter, _, _, states, group in _states(trained):
        leaf = leaves[id(parameter)]
        step = states["step"] if "step" in states else group.get("step")
        options = {key: group[key] for key in OPTIONS if key in group}
        yield f"{_one_key(leaf)}@options", {**options, "step": None if step is None else float(step)}


def _one_key(leaf: Any) -> str:
    """Return the name of the parameter behind a leaf."""
    key: str = leaf.key
    return re.sub(r"\.experts\.experts\.(\d+)\.", r".experts.local_experts.\1.", key)
