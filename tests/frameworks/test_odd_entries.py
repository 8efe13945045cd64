"""Entries of modules that change their shape in a load, or that no `load_state_dict` takes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import reknit
from reknit.errors import MismatchError, StateError
from reknit.frameworks.registry import collect, wanted
from tests.frameworks.checkpoint import gathered, load, save
from tests.ranks import run
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


class Growing(nn.Module):
    """A module with a buffer that its own method resizes, as observers of quantisation do."""

    seen: torch.Tensor
    count: torch.Tensor

    def __init__(self, inside: int = 3, outside: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(inside, outside)
        self.register_buffer("seen", torch.empty(0))
        self.register_buffer("count", torch.tensor(0))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.detach().flatten()])
        self.count += 1
        found: torch.Tensor = self.linear(x)
        return found

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.calls += 1
        self.seen.resize_(state_dict[f"{prefix}seen"].shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def same(one: nn.Module, other: nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def observed(kind: str) -> Any:
    from torch.ao import quantization

    if kind == "fake":
        fake: Any = quantization.FakeQuantize
        qconfig = fake.with_args(
            observer=quantization.MovingAveragePerChannelMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_channel_affine,
        )
        return qconfig()
    return getattr(quantization, kind)()


@table(
    "kind", ["PerChannelMinMaxObserver", "MovingAveragePerChannelMinMaxObserver", "HistogramObserver", "fake"]
)
@table("before", [0, 5])
@table("strict", [True, False])
def test_observers_load_as_load_state_dict_does(
    kind: str, before: int, *, strict: bool, tmp_path: Path
) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.ModuleDict({"inner": observed(kind)}))
    target = copy.deepcopy(module)
    module[1]["inner"](torch.randn(4, 6))  # type: ignore[index]
    if before:
        target[1]["inner"](torch.randn(before, 6))  # type: ignore[index]
    reknit.save(tmp_path / "c", {"m": module})
    reknit.load(tmp_path / "c", {"m": target}, strict=strict)
    assert same(module, target)
    batch = torch.randn(4, 6)
    for one in (module, target):
        one[1]["inner"](batch)  # type: ignore[index]
    assert same(module, target)


def test_buffers_of_any_own_module_grow_and_shrink_with_the_load() -> None:
    for steps, before in ((2, 0), (2, 1), (0, 2), (1, 1)):
        pair: list[Any] = [nn.Sequential(Growing(), Growing()) for _ in range(2)]
        module, target = pair
        for one, times in ((module, steps), (target, before)):
            for _ in range(times):
                one[0](torch.randn(2, 3))
        load({"m": target}, save({"m": module}))
        assert same(module, target)


class Heavy(nn.Parameter):
    """A parameter that cannot be copied, as one for which no memory is left."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Heavy:
        raise MemoryError


def test_a_buffer_grows_at_the_root_of_a_model_without_a_copy_of_the_layers_inside() -> None:
    module, target = Growing(), Growing()
    module(torch.randn(2, 3))
    target.linear.weight = Heavy(torch.zeros(2, 3))
    load({"m": target}, save({"m": module}))
    assert same(module, target)


def test_a_buffer_that_no_own_method_resizes_is_refused_with_advice_that_keeps_its_values(
    tmp_path: Path,
) -> None:
    class Plain(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(size))

    reknit.save(tmp_path / "c", {"m": Plain(3)})
    for size, advice in ((0, "give it the saved shape first"), (2, "allow_shape_mismatch")):
        with pytest.raises(MismatchError, match=advice) as error:
            reknit.load(tmp_path / "c", {"m": Plain(size)})
        assert size or "allow_shape_mismatch" not in str(error.value)
    target = Plain(0)
    target.seen = torch.empty(3)
    reknit.load(tmp_path / "c", {"m": target})
    assert target.seen.tolist() == [1.0] * 3


class Picky(Growing):
    """A module whose method raises an error for another shape, after it has changed something."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.count.fill_(9)
        if state_dict[f"{prefix}seen"].shape != self.seen.shape:
            raise RuntimeError("another shape")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_method_that_refuses_the_shape_is_tried_on_a_copy_alone() -> None:
    module, target = Picky(), Picky()
    module(torch.randn(2, 3))
    want = wanted({"m": target}, save({"m": module}).catalog(), 0, 1)
    assert [fqn for _, fqn, _ in want.mismatched] == ["seen"]
    assert (int(target.count), target.calls) == (0, 0)


def wrapped(kind: str) -> Any:
    torch.manual_seed(dist.get_rank())
    results = []
    for module in (nn.Sequential(Growing()), nn.Sequential(Growing())):
        found: Any = module
        if kind == "ddp":
            found = DistributedDataParallel(module)
        else:
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        results.append(found)
    one, other = results
    one(torch.ones(2, 3))
    rank, size = dist.get_rank(), dist.get_world_size()
    load({"m": other}, gathered(collect({"m": one}, rank, size)), rank, size)
    inner = [one.module[0] if kind == "ddp" else one[0] for one in results]
    return torch.equal(inner[0].seen, inner[1].seen), int(inner[1].count)


@table("kind", ["ddp", "fsdp2"])
def test_buffers_grow_in_wrapped_models(kind: str) -> None:
    assert run(2, wrapped, kind) == [(True, 1)] * 2


def test_lazy_modules_load_without_a_forward_pass() -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())

    pair: list[Any] = [make(), make()]
    module, target = pair
    module(torch.randn(5, 3))
    load({"m": target}, save({"m": module}))
    assert same(module, target)
    batch = torch.randn(5, 3)
    assert torch.equal(module(batch), target(batch))


class Packed(nn.Module):
    """A module that adds a live table, a computed entry and a text to its state dict, which no load takes."""

    def __init__(self, seed: float = 0.0, unit: str = "a") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), seed))
        self.table, self.unit = torch.full((3,), seed), unit

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.table"] = self.table
        destination[f"{prefix}weight.unit"] = torch.tensor(list(self.unit.encode()), dtype=torch.uint8)
        destination[f"{prefix}unit"] = self.unit


def test_entries_that_no_load_takes_are_filled_in_place_or_must_be_equal() -> None:
    for beside in (nn.Linear, Growing):  # the second has the entries given back to the whole model
        module, target = (nn.Sequential(Packed(value), beside(3, 2)) for value in (3.0, 0.0))
        load({"m": target}, save({"m": module}))
        packed: Any = target[0]
        assert packed.table.tolist() == [3.0] * 3
        assert packed.weight.tolist() == [3.0] * 4


def four_bits(seed: int, *, twice: bool = True) -> Any:
    """Return a layer of 4-bit weights, whose scales are quantized `twice`."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(seed)
    kinds = {"compute_dtype": torch.float32, "quant_type": "nf4", "compress_statistics": twice}
    return nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64, **kinds)).to("cpu")


@pytest.mark.filterwarnings("ignore")
@table("twice", [True, False])
def test_four_bit_weights_load_into_a_layer_with_others(tmp_path: Path, *, twice: bool) -> None:
    saved, live = four_bits(0, twice=twice), four_bits(1, twice=twice)
    offset = live[0].weight.quant_state.offset
    reknit.save(tmp_path / "c", {"m": saved})
    reknit.load(tmp_path / "c", {"m": live})
    rows = torch.randn(3, 64)
    assert torch.equal(live(rows), saved(rows))
    assert live[0].weight.quant_state.offset is offset
    reknit.save(tmp_path / "again", {"m": live})
    for path in ("c", "again"):
        with reknit.open(tmp_path / path) as checkpoint:
            found = checkpoint.read_all(["m"])["m"]
        assert all(torch.equal(found[name], entry) for name, entry in saved.state_dict().items())


@pytest.mark.filterwarnings("ignore")
def test_four_bit_weights_of_another_kind_are_refused_before_anything_changes(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"m": four_bits(0)})
    live = four_bits(1)
    live[0].weight.quant_state.dtype = torch.float16
    before = {name: entry.clone() for name, entry in live.state_dict().items()}
    with pytest.raises(StateError, match="another value"):
        reknit.load(tmp_path / "c", {"m": live})
    assert all(torch.equal(entry, before[name]) for name, entry in live.state_dict().items())


@pytest.mark.filterwarnings("ignore")
def test_eight_bit_weights_that_have_run_are_refused_before_anything_changes(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def eight_bits() -> Any:
        layer = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
        return nn.Sequential(layer, nn.Linear(64, 8)).to("cpu")

    saved, live, fresh, rows = eight_bits(), eight_bits(), eight_bits(), torch.randn(3, 64)
    reknit.save(tmp_path / "c", {"m": saved})
    before = live(rows)
    for strict in (True, False):
        with pytest.raises(MismatchError, match=r"m/0: .* after a forward pass"):
            reknit.load(tmp_path / "c", {"m": live}, strict=strict)
    assert torch.equal(live(rows), before)
    reknit.load(tmp_path / "c", {"m": fresh})
    assert torch.equal(fresh(rows), saved(rows))


@table("texts", [True, False])
def test_a_computed_entry_of_another_value_is_refused_before_anything_changes(
    tmp_path: Path, *, texts: bool
) -> None:
    reknit.save(tmp_path / "c", {"m": Packed(3.0)})
    target = Packed(unit="b")
    strict: Any = True if texts else ["!m/unit"]
    with pytest.raises((StateError, MismatchError), match="another value"):
        reknit.load(tmp_path / "c", {"m": target}, strict=strict)
    assert target.table.tolist() == [0.0] * 3
    assert target.weight.tolist() == [0.0] * 4
