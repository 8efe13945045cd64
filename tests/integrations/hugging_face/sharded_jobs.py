"""Jobs of two ranks whose models are cut by FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import reknit
from reknit.integrations import model_maps
from tests.integrations.hugging_face import tiny

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def load(kind: str, path: Path) -> dict[str, torch.Tensor]:
    """Load a checkpoint of Megatron into a model that is cut, and return its whole tensors."""
    model = tiny.build(kind, seed=3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    options = reknit.LoadOptions(transforms=model_maps.megatron_to_hugging_face(model.config))
    reknit.load(path, {"m": model}, options=options)
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
