"""Can a model be trained on the simulated device, alone and with others?"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.accelerator.group import joined
from tests.devices import every_device, run_simulated

nn = torch.nn


def transformer() -> nn.Module:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(10, 8), layer, nn.Linear(8, 3))


def trained(device: str, make: Any, **options: Any) -> dict[str, torch.Tensor]:
    model = transformer().to(device)
    optimizer = make(model.parameters(), lr=1e-2, **options)
    tokens = torch.arange(20).view(4, 5).remainder(10).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


@every_device
def test_a_transformer_is_trained_as_on_the_host(device_type: str) -> None:
    for make, foreach in product((torch.optim.SGD, torch.optim.AdamW), (True, False)):
        here, there = (trained(device, make, foreach=foreach) for device in ("cpu", device_type))
        for name, parameter in here.items():
            # The gradient of the bias of the keys is only noise, which AdamW makes as large as any other.
            if make is torch.optim.SGD or not name.endswith("in_proj_bias"):
                assert torch.allclose(there[name], parameter, atol=1e-5), (make, foreach, name)


def sharded(device_type: str) -> list[list[torch.Tensor]]:
    """Train with FSDP2 on the device with several seeds, and on the host; return whole parameters."""
    device, place, rank = joined(device_type)
    found = []
    for seed, where in ((0, "cpu"), (1, place), (2, place)):
        device.reset(seed=seed, max_delay_us=2000)
        mesh = init_device_mesh(where.partition(":")[0], (2,))
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]).to(where)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(10 + rank)
        batch = torch.randn(4, 8).to(where)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        parameters: list[Any] = list(model.parameters())
        found.append([parameter.full_tensor().detach().cpu() for parameter in parameters])
    dist.destroy_process_group()
    return found


def test_fsdp2_gives_the_same_parameters_with_every_seed() -> None:
    host, *others = run_simulated(2, sharded, "cuda", joined=False)[0]
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(other, others[0], strict=True))
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(other, host, strict=True))
