"""States of parameters that are DTensors, as optimizers make them: nested, local, or both."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from reknit.frameworks.registry import collect
from tests.frameworks.checkpoint import Checkpoint, assemble, load, portable
from tests.ranks import run
from tests.tables import table

ROWS = 5


class Nested(torch.optim.Optimizer):
    """Momentum in a list, and its squares in a dict, beside plain numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def local(self, tensor: Any) -> Any:
        return tensor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                value, gradient = self.local(parameter), self.local(parameter.grad)
                state = self.state[parameter]
                if not state:
                    state["buffers"] = [torch.zeros_like(value), 0, {"square": torch.zeros_like(value)}]
                    state["average"] = torch.zeros_like(value)
                    state["counts"] = torch.zeros(3)
                momentum, _, more = state["buffers"]
                momentum.mul_(0.5).add_(gradient)
                more["square"].mul_(0.5).addcmul_(gradient, gradient)
                state["average"].lerp_(value, 0.25)
                state["buffers"][1] += 1
                state["counts"] += 1
                value.sub_(momentum / (more["square"].sqrt() + 1) + 0.1 * state["average"], alpha=group["lr"])


class Local(Nested):
    """The same, with plain tensors of this rank's part."""

    def local(self, tensor: Any) -> Any:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


KINDS: dict[str, Any] = {"nested": Nested, "local": Local}


def build(kind: str, seed: int, steps: int) -> tuple[Any, Any]:
    values = torch.rand(ROWS, 3, generator=torch.Generator().manual_seed(seed))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    weight: Any = values if mesh is None else distribute_tensor(values, mesh, [Shard(0)])
    model = nn.ParameterDict({"w": nn.Parameter(weight)})
    optimizer = KINDS[kind](model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def train(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model["w"].square().sum().backward()
        optimizer.step()


def held(kind: str) -> Any:
    model, optimizer = build(kind, 0, 2)
    return portable(collect({"m": model, "o": optimizer}, dist.get_rank(), dist.get_world_size()))


def resumed(kind: str, checkpoint: Checkpoint, steps: int) -> Any:
    model, optimizer = build(kind, 1, steps)
    if dist.is_initialized():
        load({"m": model, "o": optimizer}, checkpoint, dist.get_rank(), dist.get_world_size())
    else:
        load({"m": model, "o": optimizer}, checkpoint)
    train(model, optimizer, 2)
    weight: Any = model["w"]
    kinds = {type(state) for state in (optimizer.state[weight]["average"], optimizer.state[weight]["counts"])}
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return whole.detach(), optimizer.state[weight]["buffers"][1], kinds


@table("kind", KINDS)
def test_an_optimizer_goes_on_with_the_kind_of_states_that_it_keeps(kind: str) -> None:
    checkpoint = assemble(run(2, held, kind))
    for path in ("average", "buffers/0", "buffers/2/square"):
        assert checkpoint.specs["o", f"state/w/{path}"].shape == (ROWS, 3)
    model, _ = build(kind, 0, 4)
    true = dict(model.named_parameters())["w"].detach()
    expected = {"nested": {DTensor, torch.Tensor}, "local": {torch.Tensor}}[kind]
    # Fresh on more ranks, and with states on as many.
    for size, steps in ((3, 0), (2, 1)):
        for whole, number, kinds in run(size, resumed, kind, checkpoint, steps):
            assert torch.allclose(whole, true)
            assert number == 4
            assert kinds == expected
    whole, number, _ = resumed(kind, checkpoint, 0)
    assert torch.allclose(whole, true)
    assert number == 4
