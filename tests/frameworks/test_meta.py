"""Models on the meta device: they get memory with the values in it, or stay as they are."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import reknit
from tests.devices import every_device, on_cuda, run_simulated
from tests.ranks import run
from tests.torchrun import pieces

if TYPE_CHECKING:
    from pathlib import Path


class Tied(nn.Module):
    """A model with a tie, a frozen parameter, a buffer, and a buffer that is not persistent."""

    def __init__(self, num_words: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_words, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.head = nn.Linear(4, num_words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("angles", torch.rand(2), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.embed(words)))
        return found


def on_meta(num_words: int = 6) -> Tied:
    with torch.device("meta"):
        return Tied(num_words)


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def path(tmp_path: Path, model: Tied) -> Path:
    reknit.save(tmp_path / "x", {"model": model})
    return tmp_path / "x"


def test_a_model_without_memory_gets_it_with_the_values_in_it(path: Path, model: Tied) -> None:
    target = on_meta()
    target.frozen.tag = "kept"  # type: ignore[attr-defined]
    before = dict(target.named_parameters())
    report = reknit.load(path, {"model": target})
    for name, tensor in model.state_dict().items():
        found = target.state_dict()[name]
        assert found.device.type == "cpu"
        assert torch.equal(found, tensor), name
    assert target.embed.weight is target.head.weight, "tied"
    assert {name: p for name, p in target.named_parameters()} == before, "the same objects"
    assert isinstance(target.embed.weight, nn.Parameter)
    assert target.embed.weight.requires_grad
    assert not target.frozen.requires_grad
    assert target.frozen.tag == "kept"  # type: ignore[attr-defined]
    assert list(report.notes) == ["model/angles"]
    assert "not persistent" in report.notes["model/angles"]
    assert target.angles.is_meta
    words = torch.arange(6)
    assert torch.equal(target.eval()(words), model.eval()(words))
    target(words).sum().backward()
    assert target.embed.weight.grad is not None


def test_an_optimizer_made_before_goes_on_with_the_model(tmp_path: Path, model: Tied) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.arange(6)).square().sum().backward()
    optimizer.step()
    reknit.save(tmp_path / "x", {"model": model, "optimizer": optimizer})
    target = on_meta()
    other = torch.optim.AdamW(target.parameters())
    reknit.load(tmp_path / "x", {"model": target, "optimizer": other})
    state = other.state[target.embed.weight]
    assert torch.equal(state["exp_avg"], optimizer.state[model.embed.weight]["exp_avg"])
    assert state["exp_avg"].device.type == "cpu"
    for each, by in ((model, optimizer), (target, other)):
        each.zero_grad()
        each(torch.arange(6)).square().sum().backward()
        by.step()
    assert torch.equal(model.embed.weight, target.embed.weight)


def test_nothing_gets_memory_when_a_load_is_refused(path: Path) -> None:
    target = on_meta(7)
    with pytest.raises(reknit.MismatchError, match=r"\[6, 4\] in the checkpoint and \[7, 4\] here"):
        reknit.load(path, {"model": target})
    assert all(tensor.is_meta for tensor in target.state_dict().values())
    (file,) = path.glob("model/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    target = on_meta()
    with pytest.raises(reknit.CorruptError):
        reknit.load(path, {"model": target})
    assert all(tensor.is_meta for tensor in target.state_dict().values())


def test_what_a_load_does_not_fill_stays_without_memory(path: Path) -> None:
    target = on_meta(7)
    with torch.device("meta"):
        target.extra = nn.Linear(2, 2)
        target.frozen = nn.Parameter(torch.empty(3, dtype=torch.float16), requires_grad=False)
    report = reknit.load(path, {"model": target}, strict=False)
    assert set(report.missing) == {"model/extra.weight", "model/extra.bias"}
    assert set(report.mismatched) == {"model/embed.weight", "model/frozen"}
    assert all(one.is_meta for one in (target.extra.weight, target.embed.weight, target.frozen))
    assert not target.norm.weight.is_meta
    target = on_meta()
    reknit.load(path, {"model": target}, options=reknit.LoadOptions(only=("model/norm.*",)))
    assert not target.norm.running_mean.is_meta  # type: ignore[union-attr]
    assert target.embed.weight.is_meta


def test_the_rest_of_a_larger_model_is_zero_and_noted(path: Path, model: Tied) -> None:
    target = on_meta(8)
    report = reknit.load(
        path, {"model": target}, options=reknit.LoadOptions(allow_shape_mismatch=("model/embed.*",))
    )
    assert torch.equal(target.embed.weight[:6], model.embed.weight)
    assert not target.head.weight[6:].any()
    assert "not in the checkpoint are zero" in report.notes["model/embed.weight"]


def test_tensors_by_themselves_get_memory_on_the_default_device(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", {"t": torch.arange(6.0).reshape(2, 3), "empty": torch.ones(0, 2)})
    state = {
        "t": torch.empty(3, 2, device="meta").T,
        "empty": torch.empty(0, 2, device="meta", requires_grad=True),
    }
    with torch.device("meta"):
        reknit.load(tmp_path / "x", state)
    assert state["t"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["t"].stride() == (1, 2), "laid out as it was"
    assert state["empty"].requires_grad
    assert not state["empty"].is_meta


@on_cuda
def test_a_model_gets_memory_on_the_gpu_where_that_is_the_default_device(path: Path, model: Tied) -> None:
    target = on_meta()
    torch.set_default_device("cuda")
    try:
        reknit.load(path, {"model": target})
    finally:
        torch.set_default_device(None)
    assert target.embed.weight.is_cuda
    assert torch.equal(target.embed.weight.cpu(), model.embed.weight)


def test_a_tensor_that_cannot_change_is_refused_before_anything_changes(path: Path) -> None:
    target = on_meta()
    held = weakref.ref(target.frozen)
    with pytest.raises(reknit.errors.StateError, match=r"model/frozen is on the meta device.*weak reference"):
        reknit.load(path, {"model": target})
    assert held() is target.frozen
    assert target.embed.weight.is_meta


@every_device
def test_the_remedy_names_the_accelerator_that_is_there(path: Path, device_type: str) -> None:
    target = on_meta()
    held = weakref.ref(target.frozen)
    with pytest.raises(reknit.errors.StateError, match=rf'to_empty\(device="{device_type}"\)'):
        reknit.load(path, {"model": target})
    assert held() is target.frozen


class Copying(nn.Linear):
    """A module whose state dict shows copies."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: tensor.clone() for name, tensor in super().state_dict(*args, **kwargs).items()}


def test_a_module_that_does_not_show_its_tensors_is_refused_with_the_remedy(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", {"m": Copying(2, 2)})
    with torch.device("meta"):
        target = Copying(2, 2)
    with pytest.raises(reknit.errors.StateError, match=r'to_empty\(device="(cpu|cuda)"\)'):
        reknit.load(tmp_path / "x", {"m": target})


def sharded(path: str) -> tuple[list[str], bool, bool]:
    """Save a sharded model, and load it into one that was sharded without memory."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(1)

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))

    model = build()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    reknit.save(path, {"model": model, "optimizer": optimizer})
    with torch.device("meta"):
        target = build()
    fully_shard(target, mesh=mesh)
    other = torch.optim.AdamW(target.parameters())
    reknit.load(path, {"model": target, "optimizer": other})
    kinds = [type(p).__name__ for p in target.parameters() if isinstance(p, DTensor)]
    for each, by in ((model, optimizer), (target, other)):
        by.zero_grad()
        each(torch.ones(2, 5)).sum().backward()
        by.step()
    known, loaded = pieces.wholes(model.state_dict()), pieces.wholes(target.state_dict())
    equal = known.keys() == loaded.keys() and all(torch.equal(known[name], loaded[name]) for name in known)
    return kinds, equal, all(p.requires_grad for p in target.parameters())


def test_a_model_sharded_without_memory_gets_its_shards(tmp_path: Path) -> None:
    for kinds, equal, trains in run(2, sharded, str(tmp_path / "x")):
        assert kinds == ["DTensor"] * 4
        assert equal
        assert trains


def offloaded(path: str, device_type: str) -> list[str]:
    """Load into a model on the meta device whose shards FSDP2 keeps in host memory, and train it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    torch.distributed.init_process_group(f"cpu:gloo,{device_type}:simccl")
    mesh = init_device_mesh(device_type, (torch.distributed.get_world_size(),))

    def build(device: str) -> nn.Linear:
        model = nn.Linear(5, 7, device=device)
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
        return model

    model = build(device_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=False)
    ones = torch.ones(2, 5, device=device_type)
    model(ones).sum().backward()
    optimizer.step()
    reknit.save(path, {"model": model, "optimizer": optimizer})
    target = build("meta")
    other = torch.optim.AdamW(target.parameters(), foreach=False)
    reknit.load(path, {"optimizer": other, "model": target})
    states = [state for each in other.state.values() for state in each.values()]
    places = [tensor.device.type for tensor in (*target.parameters(), *states)]
    for each, by in ((model, optimizer), (target, other)):
        by.zero_grad()
        each(ones).sum().backward()
        by.step()
    for one, two in zip(model.parameters(), target.parameters(), strict=True):
        assert torch.equal(one.to_local(), two.to_local())  # type: ignore[attr-defined]
    torch.distributed.destroy_process_group()
    return places


def test_a_model_that_is_offloaded_gets_memory_of_the_host(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    for places in run_simulated(2, offloaded, path, "cuda", joined=False):
        assert places == ["cpu"] * 8
