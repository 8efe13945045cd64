"""Checks of JAX beside torch in one process with four devices, in one state and after each other."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import reknit
from reknit.errors import MismatchError
from tests.jax.trees import raises


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 2).to(torch.bfloat16))


def sharded(shape: tuple[int, ...], dtype: Any) -> Any:
    on = Mesh(np.array(jax.devices()), ("x",))
    spec = P("x") if shape and shape[0] % 4 == 0 else P()
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on, spec))


def as_numpy(tensor: Any) -> Any:
    return tensor.detach().float().numpy()


def check_a_torch_module_loads_into_arrays_of_its_names_and_back(folder: str) -> None:
    saved = model(0)
    reknit.save(f"{folder}/torch", {"model": saved})
    kinds = {name: jnp.dtype(str(t.dtype).removeprefix("torch.")) for name, t in saved.state_dict().items()}
    arrays = {"model": {name: sharded(tuple(t.shape), kinds[name]) for name, t in saved.state_dict().items()}}
    reknit.load(f"{folder}/torch", arrays)
    for name, tensor in saved.state_dict().items():
        assert arrays["model"][name].dtype == kinds[name]
        assert np.array_equal(arrays["model"][name].astype(np.float32), as_numpy(tensor)), name
    reknit.save(f"{folder}/jax", arrays)
    back = model(1)
    reknit.load(f"{folder}/jax", {"model": back})
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[name])


def check_a_torch_optimizer_loads_into_arrays_of_its_names_and_back(folder: str) -> None:
    def trained(seed: int) -> tuple[Any, Any]:
        net = nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for step in range(2):
            net(torch.full((1, 8), float(seed + step))).sum().backward()
            optimizer.step()
        return net, optimizer

    net, optimizer = trained(1)
    reknit.save(f"{folder}/torch", {"model": net, "optimizer": optimizer})
    shapes = {"weight": (4, 8), "bias": (4,)}
    moments: dict[str, Any] = {
        name: {
            "exp_avg": sharded(shape, jnp.float32),
            "exp_avg_sq": sharded(shape, jnp.float32),
            "step": sharded((), jnp.float32),
        }
        for name, shape in shapes.items()
    }
    target = {
        "model": {name: sharded(shape, jnp.float32) for name, shape in shapes.items()},
        "optimizer": {"state": moments},
    }
    reknit.load(f"{folder}/torch", target)
    for name, parameter in net.named_parameters():
        for key, tensor in optimizer.state[parameter].items():
            assert np.array_equal(target["optimizer"]["state"][name][key], as_numpy(tensor)), (name, key)
    reknit.save(f"{folder}/jax", target)
    other, fresh = trained(5)
    reknit.load(f"{folder}/jax", {"model": other, "optimizer": fresh}, strict=["!optimizer/param_groups*"])
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for key, tensor in optimizer.state[ours].items():
            assert torch.equal(fresh.state[theirs][key], tensor)


def check_options_of_a_torch_optimizer_are_left_out_and_reported_unless_asked_for(folder: str) -> None:
    net = nn.Linear(8, 4)
    net.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=0.25)
    net(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    reknit.save(folder, {"in": {"optimizer": optimizer}})

    def target(kinds: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "step"), **more: Any) -> dict[str, Any]:
        states = {kind: sharded(() if kind == "step" else (4, 8), jnp.float32) for kind in kinds}
        return {"in": {"optimizer": {"state": {"weight": states}, **more}}}

    report = reknit.load(folder, target())
    names = {"in/optimizer/param_groups/weight", "in/optimizer/param_groups/bias"}
    assert names == set(report.notes)
    assert not names & {*report.unexpected, *report.restored}
    asked = target(param_groups={"weight": None, "bias": None})
    report = reknit.load(folder, asked)
    assert asked["in"]["optimizer"]["param_groups"]["bias"]["lr"] == 0.25
    assert not report.notes
    assert names <= set(report.restored)
    raises(MismatchError, "exp_avg_sq", lambda: reknit.load(folder, target(("exp_avg", "step"))))


def check_what_torch_has_in_64_bits_is_filled_on_the_host(folder: str) -> None:
    net = nn.BatchNorm1d(4)
    net(torch.ones(2, 4))
    reknit.save(folder, {"model": net})
    target: dict[str, Any] = {n: sharded(tuple(t.shape), jnp.float32) for n, t in net.state_dict().items()}
    counted = "num_batches_tracked"
    raises(MismatchError, counted, lambda: reknit.load(folder, {"model": dict(target)}))
    target[counted] = np.zeros((), np.int64)
    reknit.load(folder, {"model": target})
    assert target[counted] == 1
    assert np.array_equal(target["running_mean"], as_numpy(net.running_mean))


def check_torch_and_jax_share_one_state(folder: str) -> None:
    def state(seed: int) -> dict[str, Any]:
        net = model(seed)
        ema = {name: jnp.asarray(as_numpy(tensor)) for name, tensor in net.state_dict().items()}
        return {"model": net, "ema": ema, "both": [torch.full((2,), float(seed)), jnp.full(2, seed), seed]}

    saved, target = state(0), state(1)
    reknit.save(folder, saved)
    reknit.load(folder, target)
    for name, tensor in target["model"].state_dict().items():
        assert torch.equal(tensor, saved["model"].state_dict()[name])
        assert np.array_equal(target["ema"][name], saved["ema"][name])
    assert target["both"][0].tolist() == target["both"][1].tolist() == [0, 0]
    assert target["both"][2] == 0


def check_numpy_loads_into_arrays_and_back(folder: str) -> None:
    values = np.arange(8, dtype=np.float32)
    reknit.save(f"{folder}/numpy", {"a": {"w": values}})
    target: dict[str, Any] = {"a": {"w": jnp.zeros(8)}}
    reknit.load(f"{folder}/numpy", target)
    assert np.array_equal(target["a"]["w"], values)
    reknit.save(f"{folder}/jax", target)
    host = {"a": {"w": np.zeros(8, np.float32)}}
    reknit.load(f"{folder}/jax", host)
    assert np.array_equal(host["a"]["w"], values)
