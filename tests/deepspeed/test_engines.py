"""DeepSpeed engines and optimizers are read and filled in place, with all copies that DeepSpeed keeps."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from reknit.errors import StateError
from reknit.frameworks.registry import collect, wanted
from reknit.integrations.deepspeed import private
from reknit.types.wanted import Terms
from tests.deepspeed import engines
from tests.frameworks.checkpoint import Checkpoint, assemble, fill, portable
from tests.frameworks.silence import Silence
from tests.optional import needs
from tests.rank_cases import Cases
from tests.torchrun import models

pytestmark = needs("deepspeed", "DeepSpeed")

WORLD = 2
CASES = Cases()
case = CASES.add
IDS = torch.tensor([[0, 1, 2, 3, 4, 5, 6]])


def run_cases() -> dict[str, str]:
    return CASES.tracebacks()


class Net(nn.Module):
    """A model with odd sizes, tied weights, a frozen parameter, a parameter of one element, and a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 9)
        self.down = nn.Linear(9, 5)
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.emb.weight
        self.up.bias.requires_grad_(False)
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.emb(ids)
        hidden = self.down(self.up(x).relu())
        out: torch.Tensor = self.head(x + self.scale * hidden)
        return out


def engine(stage: int, precision: str = "fp32", *, steps: int = 1, **more: Any) -> Any:
    """Make an engine of a net with AdamW over all its parameters."""
    zero, net = more.pop("zero", {}), more.pop("net", None) or Net()
    optimizer = more.pop("optimizer", torch.optim.AdamW)(net.parameters(), lr=0.1)
    how = {**engines.config(stage, precision, **zero), **more}
    made, *_ = engines.deepspeed().initialize(model=net, optimizer=optimizer, config=how)
    for _ in range(steps):
        step(made)
    return made


def mixed() -> Net:
    """Return a net whose parameters have two dtypes, with neighbours of equal shape."""
    net = Net()
    for parameter in (net.up.weight, net.down.bias):
        parameter.data = parameter.data.bfloat16()
    return net


def step(made: Any) -> None:
    made.backward(nn.functional.cross_entropy(made(IDS).float().reshape(-1, 7), IDS.reshape(-1)))
    made.step()


def both(made: Any) -> dict[str, Any]:
    return {"m": made, "o": made.optimizer}


def gather(state: dict[str, Any]) -> Checkpoint:
    """Return the checkpoint of the holdings of both ranks."""
    everyone: list[Any] = [None] * WORLD
    with Silence():
        mine = portable(collect(state, dist.get_rank(), WORLD))
    dist.all_gather_object(everyone, mine)
    return assemble(everyone)


def load(state: dict[str, Any], checkpoint: Checkpoint, only: tuple[str, ...] = ()) -> None:
    catalog = checkpoint.catalog()
    if only:
        catalog = replace(catalog, terms=Terms(only=only))
    with Silence():
        want = wanted(state, catalog, dist.get_rank(), WORLD)
        fill(want, checkpoint)
    assert want.missing == want.mismatched == ()


def same(one: Checkpoint, other: Checkpoint, *items: str) -> bool:
    chosen = [
        {name: tensor for name, tensor in some.tensors.items() if name[0] in (items or ("m", "o"))}
        for some in (one, other)
    ]
    return chosen[0].keys() == chosen[1].keys() and all(
        torch.equal(tensor, chosen[1][name]) for name, tensor in chosen[0].items()
    )


def refuses(state: dict[str, Any], match: str) -> None:
    with pytest.raises(StateError, match=match) as caught:
        collect(state, dist.get_rank(), WORLD)
    assert caught.value.remedy


STAGES = [(1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")]
"""The stages 1 and 2 have one optimizer; `test_matrix.py` has both in both precisions."""


@case
def training_goes_on_from_a_loaded_state_as_if_it_had_never_stopped() -> None:
    for stage, precision in STAGES:
        other_groups: dict[str, Any] = {"sub_group_size": 20, "stage3_param_persistence_threshold": 0}
        if stage < 3:  # of a group of several dtypes, DeepSpeed makes one of full precision
            other_groups = {"parameter_alignment": True} if precision == "bf16" else {}
        for zero, net, steps in (({}, Net, 2), (other_groups, Net if other_groups else mixed, 0)):
            made = engine(stage, precision, zero=zero, net=net())
            saved = gather(both(made))
            step(made)
            after = gather(both(made))
            assert not same(saved, after)
            other = engine(stage, precision, zero=zero, net=net(), steps=steps)
            load(both(other), saved)
            assert same(gather(both(other)), saved)
            step(other)
            assert same(gather(both(other)), after), (stage, precision, zero)


@case
def a_model_that_is_loaded_alone_is_what_the_next_step_begins_with() -> None:
    for stage, precision in STAGES:
        made = engine(stage, precision)
        saved = gather(both(made))
        for state in ({"m": made}, {"m": made.module, "o": made.optimizer}):
            other = engine(stage, precision, steps=1)
            target = {"m": other} if len(state) == 1 else {"m": other.module, "o": other.optimizer}
            load(target, saved, only=("m/*",))
            for group in private.flat_groups(other.optimizer):
                assert group.is_master == (precision == "bf16")
                for member in group.members:
                    inside = slice(member.offset, member.offset + member.numel)
                    assert torch.equal(group.flat[inside], group.live[inside].to(group.flat.dtype))
            assert same(gather({"m": other}), saved, "m")


@case
def a_bare_module_whose_optimizer_is_not_in_the_state_is_not_loaded_into() -> None:
    for stage in (1, 2):
        made = engine(stage, steps=0)
        saved = gather({"m": made.module})
        with pytest.raises(StateError, match="has a copy in the optimizer") as caught:
            load({"m": made.module}, saved)
        assert "engine.optimizer" in str(caught.value.remedy)
        beside = {"m": made.module, "all": {"the": [made.optimizer]}}
        load(beside, gather(beside))
    made = engine(3, steps=0)
    other = engine(3, steps=0)
    load({"m": other.module}, gather({"m": made.module}))
    assert same(gather({"m": other}), gather({"m": made}))
    assert same(gather(both(other)), gather(both(made)))


@case
def master_weights_are_not_loaded_without_their_parameters() -> None:
    for stage in (1, 2, 3):
        saved = gather(both(engine(stage, "bf16")))
        with pytest.raises(StateError, match="would differ"):
            load(both(engine(stage, "bf16")), saved, only=("o/*",))
        other = engine(stage, "bf16")
        load(both(other), saved, only=("o/state/*/exp_avg", "o/param_groups/*"))


@case
def a_forward_after_loading_sees_what_was_loaded() -> None:
    for zero in ({}, {"stage3_param_persistence_threshold": 0}):
        for training in (True, False):
            made, other = engine(3, zero=zero), engine(3, zero=zero)
            expected = made(IDS).detach()
            other.train(training)
            with torch.set_grad_enabled(training):
                assert not torch.equal(other(IDS), expected)
            load({"m": other}, gather({"m": made}))
            other.eval()
            with torch.no_grad():
                assert torch.equal(other(IDS), expected)


@case
def a_gathered_parameter_that_was_changed_is_refused_until_its_partitions_are_too() -> None:
    zero = engines.deepspeed().zero
    made = engine(3, zero={"stage3_param_persistence_threshold": 0})
    before = gather({"m": made})
    parameter = made.module.up.weight
    with zero.GatheredParameters(parameter, modifier_rank=0):
        assert same(gather({"m": made}), before)
        with torch.no_grad():
            parameter += 1
        refuses({"m": made}, "gathered parameter up.weight of m was changed")
    assert torch.equal(gather({"m": made}).tensors["m", "up.weight"], before.tensors["m", "up.weight"] + 1)


@case
def weights_that_only_the_model_or_only_the_optimizer_was_given_are_refused() -> None:
    for stage in (1, 2, 3):
        made = engine(stage)
        with torch.no_grad():
            for parameter in made.module.parameters():
                (parameter.ds_tensor if stage == 3 else parameter).add_(1)
        if stage == 3:
            private.release(list(made.module.parameters()))
        refuses(both(made), "has other weights than the model")
        made.optimizer.refresh_fp32_params()
        gather(both(made))


@case
def parameters_that_were_given_other_memory_are_refused() -> None:
    for stage in (1, 2):
        made = engine(stage)
        made.module.up.weight.data = made.module.up.weight.data.clone()
        refuses(both(made), "does not lie in the flat memory")
    made = engine(3)
    made.module.up.weight.ds_tensor.data = made.module.up.weight.ds_tensor.data.clone()
    refuses(both(made), "does not lie in the flat memory")


@case
def gradients_in_round_robin_are_read_right_where_deepspeed_has_another_mapping() -> None:
    get = import_module("deepspeed.utils")
    for stage in (1, 2):
        for precision in ("fp32", "bf16"):
            how = {"round_robin_gradients": True}
            made, other = engine(stage, precision, zero=how), engine(stage, precision)
            saved = gather(both(made))
            plain = {name: p.detach() for name, p in made.module.named_parameters()}
            theirs = {n: get.safe_get_full_fp32_param(p) for n, p in plain_trained(made)}
            assert not all(torch.equal(theirs[n].to(plain[n].dtype), plain[n]) for n in theirs)
            masters = {n: saved.tensors.get(("o", f"state/{n}/master"), plain[n]) for n in theirs}
            assert all(torch.equal(masters[n].to(plain[n].dtype), plain[n]) for n in theirs)
            load(both(other), saved)
            again = engine(stage, precision, zero=how, steps=0)
            load(both(again), saved)
            assert same(gather(both(other)), saved)
            assert same(gather(both(again)), saved)
            for one in (made, other, again):
                step(one)
            assert same(gather(both(again)), gather(both(made)))
            assert same(gather(both(other)), gather(both(made)))


def plain_trained(made: Any) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in made.module.named_parameters() if p.requires_grad]


@case
def offload_to_the_cpu_makes_no_difference() -> None:
    cpu = {"device": "cpu"}
    for stage in (1, 2, 3):
        for more in ({}, {"offload_param": cpu} if stage == 3 else {"round_robin_gradients": True}):
            zero = {"offload_optimizer": cpu, **more}
            made, plain = engine(stage, "bf16", zero=zero), engine(stage, "bf16")
            again = engine(stage, "bf16", zero=zero, steps=0)
            saved = gather(both(made))
            for other in (plain, again):
                load(both(other), saved)
                assert same(gather(both(other)), saved)
            for one in (made, again):
                step(one)
            assert same(gather(both(again)), gather(both(made)))


@case
def the_bf16_optimizer_is_read_as_zero_1_is() -> None:
    how: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
    made, other = engine(1, "bf16", **how), engine(1, "bf16", **how, steps=0)
    assert type(made.optimizer).__name__ == "BF16_Optimizer"
    saved = gather(both(made))
    load(both(other), saved)
    assert same(gather(both(other)), saved)
    plain = engine(1, "bf16")
    load(both(plain), saved)
    assert same(gather(both(plain)), saved)
    step(made)
    step(other)
    assert same(gather(both(other)), gather(both(made)))


@case
def an_engine_without_zero_is_as_data_parallel_as_any() -> None:
    made, other = engine(0), engine(1, steps=0)
    saved = gather(both(made))
    load(both(other), gather(both(engine(0))))
    assert {name for _, name in saved.tensors} > set(Net().state_dict())
    assert all(
        shard.replicas == (0, 1)
        for shard in collect({"m": made}, dist.get_rank(), WORLD).shards
        if shard.fqn != "seen"
    )


@case
def steps_that_are_plain_numbers_are_counted_as_torch_counts() -> None:
    made = engine(2, optimizer=Counting)
    saved, plain = gather(both(made)), gather(both(engine(2)))
    assert {n: (t.shape, t.dtype) for n, t in saved.tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in plain.tensors.items()
    }
    other = engine(2, optimizer=Counting, steps=0)
    load(both(other), plain)
    assert [s["step"] for s in private.inner(other.optimizer).state.values()] == [1]
    assert all(type(s["step"]) is int for s in private.inner(other.optimizer).state.values())
    step(other)


class Counting(torch.optim.AdamW):
    """Stands for DeepSpeed's compiled optimizers, which count in plain numbers."""

    __module__ = "deepspeed.ops.adam.for_tests"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for states in self.state.values():
            assert type(states["step"]) is int
            states["step"] = torch.tensor(float(states["step"]))
        super().step()
        for states in self.state.values():
            states["step"] = int(states["step"])


@case
def counters_that_differ_do_not_fit_one_group() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    torch.autograd.backward(nn.functional.cross_entropy(net(IDS).reshape(-1, 7), IDS.reshape(-1)))
    optimizer.step()
    for number, parameter in enumerate(p for p in net.parameters() if p.requires_grad):
        optimizer.state[parameter]["step"] += number
    checkpoint = gather({"m": net, "o": optimizer})
    for stage in (1, 2, 3):
        made = engine(stage, steps=0)
        with Silence():
            want = wanted(both(made), checkpoint.catalog(), dist.get_rank(), WORLD)
            with pytest.raises(StateError, match=r"/step is \d.0 in the checkpoint and .*/step is \d.0"):
                fill(want, checkpoint)


@case
def the_optimizer_that_was_given_to_deepspeed_is_refused() -> None:
    for stage in (1, 3):
        for named in (False, True):
            net = Net()
            own = torch.optim.AdamW(list(net.named_parameters()) if named else net.parameters())
            made, *_ = engines.deepspeed().initialize(
                model=net, optimizer=own, config=engines.config(stage, "fp32")
            )
            step(made)
            refuses({"m": made, "o": own}, "optimizer o")


@case
def what_is_not_supported_is_refused_by_name() -> None:
    made = engine(0, "bf16")
    refuses(both(made), "FP16_UnfusedOptimizer")
    made = engine(1)
    made.optimizer.offloaded_states = {"hp_params"}
    refuses(both(made), "offload_states")
    made = engine(1)
    made.has_moe_layers = True
    refuses({"m": made}, "mixture-of-experts")
    made = engine(3)
    made.optimizer.swap_optimizer = True
    refuses(both(made), "NVMe")
    parameter = made.module.up.weight
    parameter.ds_tensor.final_location = "nvme"
    refuses({"m": made.module}, "up.weight of m is offloaded to NVMe")
    parameter.ds_tensor.final_location = None
    parameter.ds_zero_param_process_group = dist.group.WORLD
    refuses({"m": made}, "zero_hpz_partition_size")
    made = engine(2)
    made.module.up.weight.ds_is_replaced_module = True
    refuses({"m": made}, "automatic tensor parallelism")


@case
def a_state_dict_that_makes_something_of_partitions_is_refused() -> None:
    class Doubled(Net):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            found = super().state_dict(*args, **kwargs)
            return {key: value.detach() * 2 if "up.weight" in key else value for key, value in found.items()}

    made = engine(3, net=Doubled())
    refuses({"m": made.module}, "up.weight was made by a state-dict hook")


@case
def a_load_hook_over_partitions_is_a_mismatch() -> None:
    class Loads(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            super()._load_from_state_dict(*args)

    checkpoint = gather({"m": engine(3)})
    hooked: Any = Net()
    own = Net()
    hooked.up.register_load_state_dict_post_hook(lambda *args: None)
    own.up = Loads(5, 9)
    own.up.bias.requires_grad_(False)
    for net in (hooked, own):
        want = wanted({"m": engine(3, net=net)}, checkpoint.catalog(), dist.get_rank(), WORLD)
        ((item, fqn, why),) = want.mismatched
        assert (item, fqn) == ("m", "up")
        assert "would run at a load, and up.weight is not whole" in why


@case
def hooks_of_the_optimizer_inside_are_refused() -> None:
    for stage in (1, 3):
        made = engine(stage)
        made.optimizer.optimizer.register_state_dict_post_hook(lambda *args: None)
        refuses(both(made), "with the hook .*, which cannot be run where each rank has a part")


@case
def buffers_of_the_first_rank_are_saved() -> None:
    made = engine(1)
    made.module.seen += dist.get_rank()
    assert int(gather({"m": made}).tensors["m", "seen"]) == 3


@pytest.mark.parametrize("name", CASES)
def test_deepspeed(name: str) -> None:
    failure = CASES.failure(name, run_cases, WORLD, warm="deepspeed")
    assert failure is None, failure


def test_without_deepspeed_nothing_is_one_of_its_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deepspeed", "deepspeed.runtime.engine", "deepspeed.runtime.base_optimizer"):
        monkeypatch.setitem(sys.modules, name, None)
    assert not private.is_engine(models.Tiny())
    assert not private.is_optimizer(torch.optim.SGD(models.Tiny().parameters()))
    assert world_of_one().only_here((0,)) == (0,)


def world_of_one() -> Any:
    from reknit.frameworks.walk.walk import World

    return World(0, 1, (0,))
