"""Changes of a training state between two saves, of all kinds that decide the stored data and its places."""

from __future__ import annotations

import gc
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from reknit import RngState

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

State = dict[str, Any]


class ExtraState(nn.Linear):
    """A module whose state dict has more than its tensors."""

    def get_extra_state(self) -> Any:
        return {"calls": self.in_features}

    def set_extra_state(self, state: Any) -> None: ...


class Renamed(nn.Linear):
    """A module with a state dict of its own."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "kernel"] = self.weight if keep_vars else self.weight.detach()


class Adapted(nn.Module):
    """A frozen layer with low-rank weights beside it, as LoRA has them."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.down = nn.Parameter(torch.rand(2, 4))
        self.up = nn.Parameter(torch.zeros(4, 2))
        self.register_buffer("scale", torch.tensor(0.5))


def make(mesh: Any) -> State:
    """Return a state of which nothing has been saved yet; on a mesh, with DTensors."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), Adapted(nn.Linear(4, 4, bias=False)), nn.ModuleDict()
    )
    model.register_buffer("hidden", torch.zeros(3), persistent=False)
    if mesh is not None:
        _distribute(model[0], mesh, [Shard(0)])
        _distribute(model[2], mesh, [Shard(1)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    step(optimizer)
    return {
        "model": model,
        "optimizer": optimizer,
        "ema": {"shadow": torch.rand(4), "more": OrderedDict(a=torch.rand(2), b=1.5), "num": 1},
        "rng": RngState(),
        "step": 1,
        "history": [1, 2.5, "x"],
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }


def step(optimizer: Any) -> None:
    """Step an optimizer, which makes its states."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _distribute(module: nn.Module, mesh: Any, placements: list[Any]) -> None:
    for inner in module.modules():
        for name, parameter in list(inner.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter.detach(), mesh, placements)
            setattr(inner, name, nn.Parameter(placed, parameter.requires_grad))


def _parameter(state: State, random: random.Random) -> tuple[nn.Module, str, Any]:
    found = [
        (module, name, parameter)
        for module in state["model"].modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    return random.choice(found)


def _owned(state: State, random: random.Random) -> tuple[Any, dict[str, Any]]:
    found: list[tuple[Any, dict[str, Any]]] = list(state["optimizer"].state.items())
    return random.choice(found)


def _plain(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def replace_parameter(state: State, random: random.Random) -> None:
    """Replace a parameter by another, perhaps at the same place in memory."""
    module, name, parameter = _parameter(state, random)
    new = torch.rand(random.choice([(4,), (4, 4), (2, 4), ()]))
    del parameter
    setattr(module, name, None)
    gc.collect()
    setattr(module, name, nn.Parameter(new))


def same_again(state: State, random: random.Random) -> None:
    """Replace a parameter by an equal one."""
    module, name, parameter = _parameter(state, random)
    setattr(module, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))


def set_data(state: State, random: random.Random) -> None:
    """Give a parameter other memory, perhaps of another form."""
    _, _, parameter = _parameter(state, random)
    if not isinstance(parameter, DTensor):
        forms = [parameter.data.clone(), parameter.data.double(), parameter.data.t().contiguous().t()]
        forms += [torch.rand(3), parameter.data[:0], parameter.data.half()]
        parameter.data = random.choice(forms)


def set_local(state: State, random: random.Random) -> None:
    """Give a DTensor another local tensor."""
    _, _, parameter = _parameter(state, random)
    if isinstance(parameter, DTensor):
        local = parameter._local_tensor
        parameter._local_tensor = random.choice([local.clone(), local.double(), local[:0], torch.rand(7)])


def claim_chunks(state: State, random: random.Random) -> None:
    """Give a local tensor a method that returns its own place."""
    _, _, parameter = _parameter(state, random)
    if isinstance(parameter, DTensor):
        chunks: list[Any] = []
        local = parameter._local_tensor
        setattr(local, "__create_chunk_list__", lambda: chunks)  # noqa: B010 - a name that Python would mangle


def place_anew(state: State, random: random.Random) -> None:
    """Give a DTensor other placements."""
    module, name, parameter = _parameter(state, random)
    if isinstance(parameter, DTensor):
        placements: list[Any] = [random.choice([Replicate(), Shard(0)])]
        with torch.no_grad():
            whole = parameter.full_tensor()
        setattr(module, name, nn.Parameter(distribute_tensor(whole, parameter.device_mesh, placements)))


def train_or_freeze(state: State, random: random.Random) -> None:
    """Switch the training of a parameter on or off."""
    _, _, parameter = _parameter(state, random)
    parameter.requires_grad_(not parameter.requires_grad)


def tie(state: State, random: random.Random) -> None:
    """Tie two parameters: one object, or two of the same memory."""
    module, name, one = _parameter(state, random)
    like = [p for p in state["model"].parameters() if p.shape == one.shape and type(p) is type(one)]
    other = random.choice(like)
    shared = random.random() < 0.5 or isinstance(other, DTensor)
    setattr(module, name, other if shared else nn.Parameter(other.detach()))


def swap(state: State, random: random.Random) -> None:
    """Swap the tensors of two parameters."""
    _, _, one = _parameter(state, random)
    _, _, other = _parameter(state, random)
    if one is not other and type(one) is type(other):
        one.grad = other.grad = None
        torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]


def change_buffers(state: State, random: random.Random) -> None:
    """Add, drop or hide a buffer, or show a hidden one."""
    model = state["model"]
    name = random.choice(["hidden", "shown"])
    if name in model._buffers and random.random() < 0.5:
        delattr(model, name)
    else:
        model.register_buffer(name, torch.rand(2), persistent=random.random() < 0.5)


def change_tree(state: State, random: random.Random) -> None:
    """Add, replace, move or drop a module."""
    below = state["model"][3]
    name = random.choice(["head", "tail"])
    kind = random.choice([nn.Linear, ExtraState, Renamed, nn.Identity])
    if name in below and random.random() < 0.3:
        del below[name]
    elif name in below and random.random() < 0.3:
        below[name] = below.pop(name)
    else:
        below[name] = kind(4, 4)


def hook(state: State, random: random.Random) -> None:
    """Let something change the state dict of a module."""
    module = random.choice([state["model"], state["model"][1]])
    kind = random.randrange(4)
    if kind == 0:
        module.register_state_dict_post_hook(
            lambda module, entries, prefix, metadata: entries.update({prefix + "hooked": torch.ones(2)})
        )
    elif kind == 1:
        module.register_state_dict_pre_hook(
            lambda module, prefix, keep_vars: module.register_buffer("late", torch.zeros(1))
        )
    elif kind == 2:
        own = module.state_dict
        module.state_dict = lambda *args, **kwargs: dict(own(*args, **kwargs)) | {"own": torch.zeros(1)}
    else:
        module._state_dict_hooks.clear()
        module._state_dict_pre_hooks.clear()
        vars(module).pop("state_dict", None)


def train(state: State, random: random.Random) -> None:
    """Take a step, or a part of it if a state or a form no longer fits."""
    with suppress(KeyError, RuntimeError, IndexError):
        step(state["optimizer"])
    state["schedule"].step()
    state["step"] += 1
    torch.rand(1)


def change_options(state: State, random: random.Random) -> None:
    """Change the options of a group."""
    group = random.choice(state["optimizer"].param_groups)
    group[random.choice(["lr", "own", "weight_decay"])] = random.choice([0.5, 0.25, torch.tensor(0.125), "x"])


def change_groups(state: State, random: random.Random) -> None:
    """Add a group or drop one, or put parameters in another order, or name them."""
    optimizer = state["optimizer"]
    kind = random.randrange(4)
    if kind == 0:
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        new = [p for p in state["model"].parameters() if id(p) not in known]
        if new:
            optimizer.add_param_group({"params": new})
    elif kind == 1:
        optimizer.param_groups[-1]["params"].reverse()
    elif kind == 2:
        optimizer.param_groups[:] = optimizer.param_groups[-1:]
    else:
        for group in optimizer.param_groups:
            group["param_names"] = [f"p{random.randrange(9)}.{n}" for n, _ in enumerate(group["params"])]


def change_states(state: State, random: random.Random) -> None:
    """Change the states of a parameter in an optimizer."""
    optimizer = state["optimizer"]
    if not optimizer.state:
        step(optimizer)
        return
    parameter, each = _owned(state, random)
    name = random.choice(list(each) or ["none"])
    kind = random.randrange(7)
    if kind == 0:
        del optimizer.state[parameter]
    elif kind == 1:
        each.pop(name, None)
    elif kind == 2:
        each[name] = random.choice([torch.rand(3), torch.rand(()), torch.zeros_like(parameter), 3, [1]])
    elif kind == 3:
        each["master"] = _plain(parameter).clone()
    elif kind == 4:
        optimizer.state["shared"] = {"count": 3}
    elif kind == 5:
        optimizer.state.clear()
    else:
        each.update({5: torch.rand(2)})  # type: ignore[dict-item]


def hook_optimizer(state: State, random: random.Random) -> None:
    """Give an optimizer a protocol of its own, or wrap it in another."""
    optimizer = state["optimizer"]
    kind = random.randrange(3)
    if kind == 0:
        optimizer.register_state_dict_post_hook(lambda optimizer, given: given | {"more": 5})
    elif kind == 1:
        optimizer._optimizer_state_dict_post_hooks.clear()
    else:
        state["optimizer"] = torch.optim.SGD(state["model"].parameters(), 0.5, momentum=0.5)


def change_dict(state: State, random: random.Random) -> None:
    """Change the contents of a dict of tensors and values."""
    inside = random.choice([state["ema"], state["ema"]["more"]])
    key = random.choice(["a", "b", "c", "shadow", 3])
    kind = random.randrange(4)
    if kind == 0:
        inside.pop(key, None)
    elif kind == 1 and "shadow" in inside:
        inside[key] = inside["shadow"]
    elif kind == 2 and "a" in inside:
        inside[key] = inside["a"][:1]
    elif not isinstance(inside.get(key), dict):
        new = [
            torch.rand(2),
            7,
            "y",
            np.arange(3),
            nn.Parameter(torch.rand(2)),
            torch.rand(2, dtype=torch.cfloat),
        ]
        new += [torch.rand(2).to_sparse(), {"deep": torch.rand(1)}, [torch.rand(1), 2], torch.rand(0)]
        inside[key] = random.choice(new)


def change_values(state: State, random: random.Random) -> None:
    """Change plain values."""
    state["step"] = random.choice([state["step"] + 1 if isinstance(state["step"], int) else 0, 2.5, None])
    state["history"].append(random.random())
    torch.manual_seed(random.randrange(9))


def change_items(state: State, random: random.Random) -> None:
    """Add, drop or move an item."""
    kind = random.randrange(5)
    if kind == 0:
        state["second"] = nn.Linear(2, 2)
    elif kind == 1:
        state.pop("second", None)
    elif kind == 2:
        state["ema"] = state.pop("ema")
    elif kind == 3:
        state["weights"] = state["model"].state_dict()
    else:
        state["second"] = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]


def change_form(state: State, random: random.Random) -> None:
    """Change the form of a tensor in its place."""
    tensor = state["ema"].get("shadow")
    if type(tensor) is torch.Tensor and tensor.ndim:
        kind = random.randrange(3)
        tensor.unsqueeze_(0) if kind == 0 else tensor.resize_(kind * 2 - 2)
    elif type(tensor) is torch.Tensor:
        state["ema"]["shadow"] = torch.rand(4)


REFUSED = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""Errors of torch for a change that cannot follow others; the part before the error counts."""

ALL: list[Callable[[State, random.Random], object]] = [
    replace_parameter,
    same_again,
    set_data,
    set_local,
    claim_chunks,
    place_anew,
    train_or_freeze,
    tie,
    swap,
    change_buffers,
    change_tree,
    hook,
    train,
    change_options,
    change_groups,
    change_states,
    hook_optimizer,
    change_dict,
    change_values,
    change_items,
    change_form,
]
