"""The trainings that the tables save: FSDP of both generations, and Megatron-Core, each after one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tests.megatron.layouts import Layout


class Shape(NamedTuple):
    """The sizes of a model."""

    hidden: int
    layers: int


def fsdp(kind: str, shape: Shape) -> dict[str, Any]:
    """Return the model and the optimizer of a training with ``"FSDP1"`` or ``"FSDP2"`` over all ranks."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(shape.hidden, 4 * shape.hidden), nn.Linear(4 * shape.hidden, shape.hidden))
        for _ in range(shape.layers)
    ]
    model = _wrapped(kind, nn.Sequential(*blocks))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, shape.hidden)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def _wrapped(kind: str, model: Any) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "FSDP1":
        # With a mesh its state is in DTensors, else in ShardedTensors, which DCP's stager does not take.
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
            device_mesh=mesh,
        )
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def megatron(layout: Layout) -> Any:
    """Return a training of Megatron-Core in a layout; only ranks with ``warm="megatron"`` can build it."""
    from tests.megatron import gpt

    return gpt.build(layout, steps=1)


def gpt_layout(world: int, shape: Shape, tp: int = 1) -> Layout:
    """Return the layout of a GPT in mixed precision with a distributed optimizer."""
    from tests.megatron.layouts import Layout

    return Layout(
        world,
        hidden=shape.hidden,
        ffn=4 * shape.hidden,
        layers=shape.layers,
        bf16=True,
        multiple=4 // tp,
        tp=tp,
    )


def nbytes(state: Any) -> int:
    """Return the bytes of all tensors that a state holds on this rank."""
    import torch.distributed as dist

    from reknit.frameworks.registry import collect

    return sum(shard.nbytes for shard in collect(state, dist.get_rank(), dist.get_world_size()).shards)
