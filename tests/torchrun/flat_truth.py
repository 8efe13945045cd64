"""The true whole state of an FSDP1 job, as FSDP itself gathers it.

Optimizer states are put where the parameters are for a moment, and gathered as if they were parameters:
torch's own functions for optimizer states give two states of a parameter one memory on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.torchrun import pieces

WRAPPED = "_fsdp_wrapped_module."
FLAT = "_flat_param"


def add(module: nn.Module, optimizer: torch.optim.Optimizer, mine: dict[str, dict[str, Any]]) -> None:
    """Add the whole tensors of model and optimizer by item and fqn.  Every rank has to call it."""
    transient = {name for name, _ in module.named_buffers() if name.endswith("scratch")}
    buffers = {k: v for k, v in module.named_buffers() if k not in transient}
    mine["model"] |= {name.replace(WRAPPED, ""): buffer.clone() for name, buffer in buffers.items()}
    mine["model"] |= gathered(module)
    names = names_of(module)
    for key in ("exp_avg", "exp_avg_sq"):
        if any(key in states for states in optimizer.state.values()):
            with Instead(module, optimizer, key):
                whole = gathered(module)
            mine["optimizer"] |= {f"state/{name}/{key}": tensor for name, tensor in whole.items()}
    for parameter, states in optimizer.state.items():
        for name in names[id(parameter)]:
            mine["optimizer"][f"state/{name}/step"] = states["step"].clone()
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k not in ("params", "foreach", "fused")}
        for parameter in group["params"]:
            for name in names[id(parameter)]:
                mine["optimizer"][f"param_groups/{name}"] = options


def gathered(module: nn.Module) -> dict[str, Any]:
    """Return the parameters as FSDP gathers them: whole, or pieces where they are DTensors."""
    found = {}
    with FullyShardedDataParallel.summon_full_params(module, writeback=False):
        for name, parameter in module.named_parameters():
            found[name.replace(WRAPPED, "")] = pieces.of(parameter)
    return found


def names_of(module: nn.Module) -> dict[int, list[str]]:
    """Return the names that each parameter stands for: several for a flat one."""
    units: dict[str, Any] = {p: inner for p, inner in module.named_modules() if hasattr(inner, "_handle")}
    names: dict[int, list[str]] = {}
    for path, parameter in module.named_parameters():
        if not path.endswith(FLAT):
            names[id(parameter)] = [path.replace(WRAPPED, "")]
            continue
        unit = path.removesuffix(FLAT).removesuffix(WRAPPED).removesuffix(".")
        prefix = f"{unit}.".replace(WRAPPED, "") if unit else ""
        fqns = units[unit]._handle.flat_param._fqns
        names[id(parameter)] = [prefix + fqn for fqn in fqns]
    return names


def names_held(module: nn.Module) -> list[str]:
    """Return the names of the parameters of which this rank has elements of its own."""
    names = names_of(module)
    return [n for p in module.parameters() if p.numel() for n in names[id(p)] if len(names[id(p)]) == 1]


class Instead:
    """A block in which each parameter has the values of one of its optimizer states."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> None:
        self._pairs = [(p, optimizer.state[p][key]) for p in module.parameters() if key in optimizer.state[p]]
        # A look-up of a missing state has made an empty one.
        for parameter in [p for p, states in optimizer.state.items() if not states]:
            del optimizer.state[parameter]

    def __enter__(self) -> None:
        self._kept = [parameter.detach().clone() for parameter, _ in self._pairs]
        self._put([state for _, state in self._pairs])

    def __exit__(self, *error: object) -> None:
        self._put(self._kept)

    def _put(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for (parameter, _), value in zip(self._pairs, values, strict=True):
                parameter.copy_(value)
