"""Tensors that are made of others: low-bit optimizer states, quantized weights, classes of users."""

from __future__ import annotations

import warnings
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import reknit
from reknit.errors import CommitError, ReknitError, StateError
from reknit.frameworks.registry import collect, wanted
from tests.frameworks.checkpoint import save
from tests.optional import needs
from tests.ranks import run
from tests.running.examples import is_night
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs("torchao", "torchao")

OPTIMIZERS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


class Pair(torch.Tensor):
    """A tensor that is the sum of two; `rate` is in the context."""

    high: torch.Tensor
    low: torch.Tensor
    rate: float
    fails = False

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor, rate: float = 0.5) -> Any:
        """Make a wrapper of the shape of both."""
        return torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=torch.float32)

    def __init__(self, high: torch.Tensor, low: torch.Tensor, rate: float = 0.5) -> None:
        self.high, self.low, self.rate = high, low, rate

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if Pair.fails:
            raise ValueError("out of order")
        return ["high", "low"], {"rate": self.rate, "dtype": torch.float32, "device": self.high.device}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Pair:
        made: Pair = cls(inner["high"], inner["low"], context["rate"])
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            high = func(first.high) if isinstance(first.high, Pair) else first.high.clone()
            low = first.low.clone()
            if func is torch.ops.aten.detach.default:
                high, low = first.high, first.low
            return cls(high, low, first.rate)
        if func in (torch.ops.aten.view.default, torch.ops.aten.slice.Tensor):
            return cls(func(first.high, *args[1:]), func(first.low, *args[1:]), first.rate)
        raise NotImplementedError(func)


def pair(start: float, *, rate: float = 0.5, nested: bool = False) -> Pair:
    """Return a pair of small numbers, the first of which may be a pair itself."""
    high: Any = torch.arange(6.0).reshape(2, 3) + start
    made: Pair = Pair(pair(start + 100) if nested else high, high.to(torch.int8), rate)
    return made


@pytest.fixture
def eager() -> Iterator[None]:
    """Let torchao's optimizers, which compile their step, compute without a compiler."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def torchao(name: str) -> Any:
    """Import a module of torchao, which takes a second."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(f"torchao.{name}")


def model() -> nn.Sequential:
    """Return a model with weights that torchao quantizes, and some that are too small."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def train(net: nn.Module, optimizer: Any, first: int, steps: int) -> None:
    """Take some steps, each on data of its own."""
    for number in range(first, first + steps):
        torch.manual_seed(number)
        optimizer.zero_grad()
        net(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()


def bits(state: Any) -> list[bytes]:
    """Return the bytes of all tensors in nested dicts, those inside other tensors too."""
    if isinstance(state, dict):
        return [one for _, value in sorted(state.items()) for one in bits(value)]
    if hasattr(state, "__tensor_flatten__"):
        return bits({name: getattr(state, name) for name in state.__tensor_flatten__()[0]})
    if isinstance(state, torch.Tensor):
        return [state.detach().reshape(-1).view(torch.uint8).numpy().tobytes()]
    return []


@table(
    ("name", "fresh"),
    list(product(OPTIMIZERS, (True, False)))
    if is_night()
    else [*zip(OPTIMIZERS, (True, True, False), strict=True)],
)
def test_training_resumed_with_low_bit_states_is_that_which_was_never_interrupted(
    name: str, fresh: bool, eager: None, tmp_path: Path
) -> None:
    optim, net = torchao("optim"), model()
    optimizer = getattr(optim, name)(net.parameters(), lr=0.01)
    train(net, optimizer, 0, 2)
    reknit.save(tmp_path / "c", {"model": net, "optimizer": optimizer})
    train(net, optimizer, 2, 3)

    other = model()
    again = getattr(optim, name)(other.parameters(), lr=0.5)
    if not fresh:
        train(other, again, 9, 1)
    reknit.load(tmp_path / "c", {"model": other, "optimizer": again})
    train(other, again, 2, 3)

    assert bits(dict(other.state_dict())) == bits(dict(net.state_dict()))
    states = [dict(enumerate(one.state.values())) for one in (again, optimizer)]
    assert bits(states[0]) == bits(states[1])
    kinds = [[type(one) for each in s.values() for _, one in sorted(each.items())] for s in states]
    assert kinds[0] == kinds[1]
    assert any(kind.__name__.startswith("OptimState") for kind in kinds[0])


@table("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"])
def test_a_quantized_model_comes_back_bit_for_bit(config: str, tmp_path: Path) -> None:
    nets = [model().bfloat16() for _ in range(2)]
    with torch.no_grad():
        next(nets[1].parameters()).mul_(3)
    quantization = torchao("quantization")
    for net in nets:
        quantization.quantize_(net, getattr(quantization, config)())
    inside = nets[1][0].weight
    reknit.save(tmp_path / "c", {"model": nets[0]})
    reknit.load(tmp_path / "c", {"model": nets[1]})
    assert bits(dict(nets[1].state_dict())) == bits(dict(nets[0].state_dict()))
    assert nets[1][0].weight is inside


@table("nested", [False, True])
def test_a_subclass_of_a_user_is_filled_in_place_wherever_it_stands(nested: bool, tmp_path: Path) -> None:
    def state(start: float) -> dict[str, Any]:
        module = nn.Module()
        module.weight = nn.Parameter(pair(start, nested=nested), requires_grad=False)
        module.tied = module.weight
        module.register_buffer("table", pair(start + 10, nested=nested))
        return {"model": module, "ema": {"a/b": pair(start + 20, nested=nested)}}

    saved, target = state(1), state(50)
    high = target["model"].table.low
    reknit.save(tmp_path / "c", saved)
    reknit.load(tmp_path / "c", target)
    assert target["model"].table.low is high
    for one in (saved, target):
        one["model"] = dict(one["model"].state_dict())
    assert bits(target) == bits(saved)


def test_a_subclass_in_an_object_with_a_state_dict_comes_back(tmp_path: Path) -> None:
    class Holder:
        def __init__(self, start: float) -> None:
            self.held = {"pair": pair(start), "n": start}

        def state_dict(self) -> Any:
            return self.held

        def load_state_dict(self, state: Any) -> None:
            self.held = state

    saved, target = Holder(1), Holder(7)
    reknit.save(tmp_path / "c", {"held": saved})
    reknit.load(tmp_path / "c", {"held": target})
    assert bits(target.held) == bits(saved.held)
    assert type(target.held["pair"]) is Pair


@table(
    ("saved", "target", "says"),
    [
        (pair(1), pair(2, rate=0.25), "was made with"),
        (pair(1), torch.ones(2, 3), "it is a tests.frameworks.test_subclasses.Pair in the checkpoint"),
        (torch.zeros(2, 3), pair(1), "it is a plain tensor"),
        (pair(1), pair(1, nested=True), "is made of other tensors in one"),
        (pair(1), Pair(torch.ones(3, 3), torch.ones(3, 3)), "its shape is"),
        (pair(1), Pair(torch.ones(2, 3), torch.ones(2, 3)), "the low of this"),
    ],
)
def test_what_does_not_fit_is_refused_once_before_anything_changes(
    saved: Any, target: Any, says: str, tmp_path: Path
) -> None:
    reknit.save(tmp_path / "c", {"a": torch.ones(2), "w": saved})
    state = {"a": torch.zeros(2), "w": target}
    before = bits(state)
    with pytest.raises(ReknitError, match=says) as raised:
        reknit.load(tmp_path / "c", state)
    assert bits(state) == before
    assert "unexpected" not in str(raised.value)


def test_an_exception_of_tensor_flatten_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"a": torch.ones(2), "w": pair(1)})
    state = {"a": torch.zeros(2), "w": pair(2)}
    before = bits(state)
    Pair.fails = True
    try:
        for call in (reknit.save, reknit.load):
            with pytest.raises(
                StateError, match=r"w: Pair.__tensor_flatten__ raised ValueError: out of order"
            ):
                call(tmp_path / ("new" if call is reknit.save else "c"), state)
    finally:
        Pair.fails = False
    assert bits(state) == before


def test_no_code_and_no_class_is_in_the_checkpoint(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"w": pair(1)})
    for file in filter(Path.is_file, (tmp_path / "c").rglob("*")):
        data = file.read_bytes()
        assert b"pickle" not in data or file.name == "manifest.json"  # the manifest names the absence of it
        assert b"torch._utils" not in data
    with reknit.open(tmp_path / "c") as opened:
        assert np.array_equal(opened.read("w", "high"), pair(1).high.numpy())


def _sharded(rows: int, columns: int) -> tuple[nn.Sequential, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.compiler.set_stance("force_eager")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(columns, rows))
    fully_shard(net, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return net, torchao("optim").AdamW8bit(net.parameters(), lr=0.01)


def _cut_pair(net: nn.Sequential, start: float) -> Any:
    """Return a DTensor of pairs, cut as a model is."""
    from torch.distributed.tensor import DTensor, Shard

    weight: Any = net[0].weight
    mesh, rows = weight.device_mesh, torch.arange(8.0).reshape(8, 1) + start
    low, size = rows * 2, 8 // mesh.size()
    part = slice(mesh.get_local_rank() * size, (mesh.get_local_rank() + 1) * size)
    return DTensor.from_local(Pair(rows[part], low[part]), mesh, [Shard(0)], run_check=False)


def _save_sharded(path: str, rows: int, columns: int) -> Any:
    net, optimizer = _sharded(rows, columns)
    net(torch.ones(2, columns)).square().mean().backward()
    optimizer.step()
    reknit.save(path, {"model": net, "optimizer": optimizer, "pair": _cut_pair(net, 1)})
    return _parts(net, optimizer)


def _load_sharded(path: str, rows: int, columns: int) -> Any:
    net, optimizer = _sharded(rows, columns)
    cut = _cut_pair(net, 50)
    try:
        reknit.load(path, {"model": net, "optimizer": optimizer, "pair": cut})
    except ReknitError as error:
        return str(error), len(optimizer.state)
    assert bits(cut._local_tensor) == bits(_cut_pair(net, 1)._local_tensor)
    return _parts(net, optimizer)


def _parts(net: nn.Sequential, optimizer: Any) -> dict[str, list[bytes]]:
    state = optimizer.state[net[0].weight]
    return {name: bits(getattr(state[name], "_local_tensor", state[name])) for name in sorted(state)}


def _joined(parts: list[dict[str, list[bytes]]], name: str) -> tuple[bytes, bytes, bytes]:
    return (
        b"".join(part[name][0] for part in parts),
        b"".join(part[name][2] for part in parts),
        parts[0][name][1],
    )


def test_low_bit_states_of_fsdp2_come_back_on_another_number_of_ranks(tmp_path: Path) -> None:
    saved = run(2, _save_sharded, str(tmp_path / "c"), 256, 64, warm="torchao")
    for after in (4, 1) if is_night() else (1,):
        loaded = run(after, _load_sharded, str(tmp_path / "c"), 256, 64, warm="torchao")
        for name in ("exp_avg", "exp_avg_sq"):
            assert _joined(loaded, name) == _joined(saved, name)


def test_rows_that_are_no_whole_blocks_are_refused_with_rank_and_block(tmp_path: Path) -> None:
    run(1, _save_sharded, str(tmp_path / "c"), 128, 66, warm="torchao")
    for said, num_states in run(2, _load_sharded, str(tmp_path / "c"), 128, 66, warm="torchao"):
        assert "0.weight/exp_avg" in said
        assert "has the rows" in said
        assert "a block of 256 elements" in said
        assert num_states == 0


def _one_row(path: str) -> Any:
    saved = _save_sharded(path, 1, 8192)
    return _load_sharded(path, 1, 8192) == saved


def test_a_rank_without_rows_leaves_low_bit_states_to_the_others(tmp_path: Path) -> None:
    assert run(2, _one_row, str(tmp_path / "c"), warm="torchao") == [True, True]


def _three_rows(path: str) -> str:
    try:
        _save_sharded(path, 3, 2048)
    except CommitError as error:
        return str(error)
    return ""


def test_a_state_that_is_low_bit_on_one_rank_and_plain_on_another_is_refused_with_the_ranks(
    tmp_path: Path,
) -> None:
    for said in run(2, _three_rows, str(tmp_path / "c"), warm="torchao"):
        assert "0.weight/exp_avg float32[3, 2048]: a hole, 2048 of 6144 elements written" in said
        assert "(by rank 1), and it is made of other tensors on rank 0" in said
        assert "shard it over fewer ranks" in said
    assert reknit.latest(tmp_path) is None


def test_an_nf4_weight_comes_back_bit_for_bit(tmp_path: Path) -> None:
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    saved, target = (nf4.to_nf4(torch.randn(256, 256)) for _ in range(2))
    reknit.save(tmp_path / "c", {"w": saved})
    reknit.load(tmp_path / "c", {"w": target})
    assert bits(target) == bits(saved)


def test_a_fake_tensor_is_refused_by_name(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(StateError, match="the/name is a"):
        reknit.save(tmp_path / "c", {"the": {"name": fake}})


def _part_of_four_rows(tensor: Any) -> Any:
    """Declare a tensor of two rows and three columns the first half of a larger one."""
    tensor.global_shape, tensor.global_offsets = (4, 3), ((0, 0),)
    tensor.local_offsets, tensor.local_sizes = ((0, 0),), ((2, 3),)
    return tensor


def test_a_tensor_made_of_others_is_neither_a_declared_part_nor_the_state_of_one() -> None:
    value, catalog = _part_of_four_rows(pair(0)), save({"state": {"w": torch.zeros(4, 3)}}).catalog()
    for walk in (
        lambda: collect({"state": {"w": value}}, 0, 1),
        lambda: wanted({"state": {"w": value}}, catalog, 0, 1),
    ):
        with pytest.raises(StateError, match="state/w is a Pair with the attributes global_shape"):
            walk()
    parameter = _part_of_four_rows(nn.Parameter(torch.zeros(2, 3)))
    optimizer = torch.optim.SGD([("w", parameter)])
    optimizer.state[parameter] = {"m": pair(0)}
    with pytest.raises(StateError, match=r"o/state/w/m is a .*its parameter is cut between ranks"):
        collect({"o": optimizer}, 0, 1)
