"""The parts of torch that reknit uses without a promise still behave as it assumes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import reknit
from reknit.frameworks.torch import torch_private
from tests.devices import every_simulated_device
from tests.ranks import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.accelerator import Accelerator


def look() -> Any:
    rank = dist.get_rank()
    store = torch_private.default_store()
    store.set(f"k{rank}", "v")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(4, 6)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.data, mesh["tp"], [Shard(0)]))
    linear.bias = nn.Parameter(distribute_tensor(linear.bias.data, mesh["tp"], [Replicate()]))
    fully_shard(linear, mesh=mesh["dp"])
    weight: Any = linear.weight
    with torch.no_grad():
        local = weight.to_local()
    return (
        store.get(f"k{1 - rank}"),
        [torch_private.split_factor(p) for p in (_StridedShard(0, split_factor=3), *weight.placements)],
        torch_private.chunk_list(weight),
        local.data_ptr() == weight._local_tensor.data_ptr(),
        torch_private.group_name(dist.group.WORLD),
    )


def test_private_parts_of_torch_are_as_expected() -> None:
    first, second = run(2, look)
    assert first[:4] == second[:4] == (b"v", [3, None, None], None, True)
    assert first[4] == second[4] != ""


def test_an_order_that_torch_derives_from_strided_placements_is_not_another_one() -> None:
    """As torch 2.10 has it for `fully_shard` after tensor parallelism."""

    def is_reordered(*placements: Any) -> bool:
        order = (SimpleNamespace(mesh_dims=(1, 0)),)
        spec = SimpleNamespace(shard_order=order, placements=placements)
        return torch_private.is_reordered(SimpleNamespace(_spec=spec))

    assert is_reordered(Shard(0), Shard(0))
    assert not is_reordered(_StridedShard(0, split_factor=2), Shard(0))


def of_libraries() -> dict[str, Any]:
    """Return the functions, classes and methods of torch and NumPy by name; their counters are their own."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "numpy"):
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                if issubclass(type(value), type) and value.__module__ == name:
                    found.update({f"{name}.{key}.{inner}": one for inner, one in vars(value).items()})
    kinds = {kind: {"__call__", "__get__"} & set(dir(kind)) for kind in {*map(type, found.values())}}
    return {name: one for name, one in found.items() if kinds[type(one)]}


def test_saves_and_loads_patch_nothing_of_torch_and_numpy(tmp_path: Path) -> None:
    model = nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "rng": reknit.RngState()}
    before = of_libraries()
    assert {"torch.optim.adamw.AdamW.__init__", "torch.serialization.save"} <= before.keys()
    lazy = reknit.SaveOptions(stage="lazy")
    for step in range(3):
        pending = reknit.save(tmp_path / f"{step}", state, wait=False, options=lazy)
        model(torch.ones(1, 200)).sum().backward()
        optimizer.step()
        pending.result(60)
    reknit.load(tmp_path / "2", state)
    after = of_libraries()
    other = [name for name, value in before.items() if after.get(name) is not value]
    assert other == []
    assert reknit.close(60)


def test_only_types_that_handle_operations_themselves_hide_data() -> None:
    class Named(nn.Parameter):
        pass

    class Counting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__torch_function__(*args, **kwargs)  # type: ignore[no-untyped-call]

    assert not any(map(torch_private.hides_data, (torch.Tensor, nn.Parameter, Named, Counting)))
    assert torch_private.hides_data(DTensor)


@every_simulated_device
def test_memory_of_a_gathered_copy_is_not_used_again_before_the_stream_has_read_it(
    accelerator: Accelerator, device_type: str
) -> None:
    gathered, out = torch.full((1000,), 7.0, device=device_type), torch.zeros(1000, pin_memory=True)
    handle = SimpleNamespace(reshard=lambda _: None, post_reshard=lambda: None)
    flat = SimpleNamespace(_full_param_padded=gathered)
    unit: Any = SimpleNamespace(handle=handle, flat=flat, sharded=True)
    stream = torch.Stream(torch.device(device_type))
    stream.wait_stream(torch.accelerator.current_stream())
    with accelerator.held(stream):
        with stream:
            out.copy_(gathered, non_blocking=True)
            torch_private.drop_gathered_copy(unit)
        other = torch.full((1000,), 9.0, device=device_type)
        torch.accelerator.current_stream().synchronize()
    stream.synchronize()
    assert not gathered.untyped_storage().nbytes()
    assert other.eq(9).all()
    assert out.eq(7).all()
