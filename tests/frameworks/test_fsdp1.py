"""FSDP1 modules and their optimizers: read and filled shard by shard, in every phase of FSDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from reknit.errors import StateError
from reknit.frameworks.registry import collect, wanted
from tests.frameworks.checkpoint import Checkpoint, fill, gathered, portable
from tests.frameworks.silence import Silence
from tests.rank_cases import Cases
from tests.ranks import run
from tests.torchrun import flat_truth

WORLD = 2
CASES = Cases()
case = CASES.add
CPU = torch.device("cpu")


def run_cases(part: int) -> dict[str, str]:
    """Call every second case."""
    some = Cases()
    some.update(list(CASES.items())[part::2])
    return some.tracebacks()


class Net(nn.Module):
    """Odd sizes, a transposed weight, a parameter that only one of two ranks has, and a buffer."""

    seen: torch.Tensor

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 9)
        self.down = nn.Linear(9, 5)
        self.down.weight = nn.Parameter(torch.randn(9, 5).t())
        self.head = nn.Linear(5, 7, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.emb(ids)
        hidden = self.down(self.up(x).relu())
        out: torch.Tensor = self.head(x + hidden)
        return out


IDS = torch.tensor([[0, 1, 2, 3, 4, 5, 6]])


def wrap(net: Any, strategy: str = "FULL_SHARD", *, flat: bool = False, **more: Any) -> Any:
    if isinstance(net, Net):
        inner = {"use_orig_params": not flat, "sharding_strategy": ShardingStrategy[strategy], **more}
        net.up = FSDP(net.up, device_id=CPU, **inner)  # type: ignore[assignment]
    return FSDP(
        net, device_id=CPU, use_orig_params=not flat, sharding_strategy=ShardingStrategy[strategy], **more
    )


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.1, amsgrad=True, foreach=False)


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    output = module(IDS)
    nn.functional.cross_entropy(output.reshape(-1, 7), IDS.reshape(-1)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def holdings(state: dict[str, Any]) -> Any:
    with Silence():
        return portable(collect(state, dist.get_rank(), WORLD))


def gather(state: dict[str, Any]) -> Checkpoint:
    """Put the holdings of both ranks together."""
    return gathered(holdings(state))


def load(state: dict[str, Any], checkpoint: Checkpoint) -> Any:
    with Silence():
        want = wanted(state, checkpoint.catalog(), dist.get_rank(), WORLD)
    assert want.missing == want.mismatched == (), (want.missing, want.mismatched)
    fill(want, checkpoint)
    return want


def tensors(checkpoint: Checkpoint, item: str = "m") -> dict[str, torch.Tensor]:
    return {fqn: tensor for (of, fqn), tensor in checkpoint.tensors.items() if of == item}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


VARIANTS = [
    (strategy, flat) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD") for flat in (False, True)
]


@case
def shards_are_views_of_the_live_memory_and_collecting_changes_nothing() -> None:
    module = wrap(Net(), "SHARD_GRAD_OP")
    optimizer = adamw(module)
    step(module, optimizer)
    parameters = list(module.parameters())
    module(IDS)
    before = [(id(p), p.data_ptr(), p._version) for p in parameters]
    storages = {p.untyped_storage().data_ptr() for p in parameters}
    with Silence():
        held = collect({"m": module, "o": optimizer}, dist.get_rank(), WORLD)
    assert {
        s.data.untyped_storage().data_ptr() for s in held.shards if s.item == "m" and s.fqn != "seen"
    } <= storages
    assert [(id(p), p.data_ptr(), p._version) for p in parameters] == before


@case
def a_forward_after_loading_sees_what_was_loaded() -> None:
    torch.manual_seed(5)
    source = Net()
    checkpoint = gather({"m": source})
    expected = source(IDS)
    for strategy, flat in VARIANTS:
        half = MixedPrecision(param_dtype=torch.bfloat16)
        for precision in (None, half) if strategy == "FULL_SHARD" else (None,):
            for grad in (False, True):
                module = wrap(Net(), strategy, flat=flat, mixed_precision=precision)
                with torch.set_grad_enabled(grad):
                    stale = module(IDS)
                load({"m": module}, checkpoint)
                for training in (True, False):
                    module.train(training)
                    found = module(IDS)
                    error = (found - expected).abs().max().item()
                    assert error < (1e-6 if precision is None else 0.2), (strategy, flat, precision, grad)
                assert (stale - expected).abs().max().item() > 0.3
                assert_equal(flat_truth.gathered(module), dict(source.named_parameters()))
                assert_equal(tensors(gather({"m": module})), source.state_dict())


def with_lists(*, flat: bool, scale: float) -> dict[str, Any]:
    """Return a module, and an optimizer whose states are tensors in a list and in a dict in it."""
    module = wrap(Net(), flat=flat)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        if parameter.numel():
            mean, old = parameter.detach() * scale, parameter.detach() + scale
            count = torch.tensor(scale)
            optimizer.state[parameter] = {"history": [old, {"mean": mean, "count": count, "name": "x"}]}
    return {"m": module, "o": optimizer}


@case
def a_list_of_tensors_comes_back_in_each_layout_also_of_a_flat_parameter() -> None:
    for flat in (False, True):
        source = gather(with_lists(flat=flat, scale=2.0))
        names = {name for name in tensors(source, "o") if name.endswith("history/1/mean")}
        assert names == {f"state/{name}/history/1/mean" for name, _ in Net().named_parameters()}
        for other in (False, True):
            target = with_lists(flat=other, scale=3.0)
            load(target, source)
            assert_equal(tensors(gather(target), "o"), tensors(source, "o"))


@case
def a_list_of_tensors_with_another_count_is_refused_in_a_flat_parameter() -> None:
    state = with_lists(flat=False, scale=2.0)
    source = gather(state)
    for (_, fqn), tensor in source.tensors.items():
        if fqn == "state/up.bias/history/1/count":
            tensor += 1
    with pytest.raises(StateError, match=r"up\.(bias|weight)/history/1/count is .* one counter together"):
        load(with_lists(flat=True, scale=3.0), source)


@case
def training_goes_on_from_a_loaded_state_as_if_it_had_never_stopped() -> None:
    for strategy, flat in VARIANTS:
        one = wrap(Net(), strategy, flat=flat)
        optimizer = adamw(one)
        step(one, optimizer)
        checkpoint = gather({"m": one, "o": optimizer})
        for trained in (False, True):
            other = wrap(Net(), strategy, flat=flat)
            fresh = adamw(other)
            if trained:
                step(other, fresh)
            load({"m": other, "o": fresh}, checkpoint)
            twin = gather({"m": other, "o": fresh})
            assert_equal(tensors(twin, "m"), tensors(checkpoint, "m"))
            assert_equal(tensors(twin, "o"), tensors(checkpoint, "o"))
            if not trained:
                step(one, optimizer)
                after = gather({"m": one, "o": optimizer})
            step(other, fresh)
            found = gather({"m": other, "o": fresh})
            assert_equal(tensors(found, "m"), tensors(after, "m"))
            assert_equal(tensors(found, "o"), tensors(after, "o"))


@case
def parameters_that_are_offloaded_to_the_cpu_are_saved_and_loaded_as_others() -> None:
    """Without an accelerator nothing is pinned or waited for; FSDP gets other memory all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
        patch.setattr(torch.cpu.Stream, "synchronize", lambda _: None, raising=False)
        check_offloaded()


def check_offloaded() -> None:
    torch.manual_seed(5)
    source = Net()
    plain = gather({"m": source})
    for flat in (False, True):
        one = wrap(Net(), flat=flat, cpu_offload=CPUOffload(offload_params=True))
        optimizer = adamw(one)
        step(one, optimizer)
        checkpoint = gather({"m": one, "o": optimizer})
        other = wrap(Net(), flat=flat, cpu_offload=CPUOffload(offload_params=True))
        fresh = adamw(other)
        load({"m": other, "o": fresh}, checkpoint)
        unlike = wrap(Net(), flat=flat)
        third = adamw(unlike)
        load({"m": unlike, "o": third}, checkpoint)
        twins = [gather({"m": module, "o": of}) for module, of in ((other, fresh), (unlike, third))]
        for twin in twins:
            assert_equal(tensors(twin), tensors(checkpoint))
            assert_equal(tensors(twin, "o"), tensors(checkpoint, "o"))
        # With the original parameters, the gradients of all steps add up where nothing is pinned.
        for module, of in ((one, optimizer), (other, fresh), (unlike, third)) if flat else ():
            step(module, of)
            found = gather({"m": module, "o": of})
            assert_equal(tensors(found), tensors(gather({"m": one, "o": optimizer})))
            assert_equal(tensors(found, "o"), tensors(gather({"m": one, "o": optimizer}), "o"))
        load({"m": other}, plain)
        assert_equal(flat_truth.gathered(other), dict(source.named_parameters()))
        assert (other(IDS) - source(IDS)).abs().max().item() < 1e-6


@case
def states_that_are_made_are_as_the_optimizer_would_make_them() -> None:
    for strategy, flat in VARIANTS:
        one = wrap(Net(), strategy, flat=flat)
        optimizer = adamw(one)
        step(one, optimizer)
        other = wrap(Net(), strategy, flat=flat)
        fresh = adamw(other)
        load({"m": other, "o": fresh}, gather({"m": one, "o": optimizer}))
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            made, expected = fresh.state.get(q, {}), optimizer.state.get(p, {})
            assert set(made) == set(expected)
            for name, state in expected.items():
                assert made[name].shape == state.shape
                assert made[name].stride() == state.stride()
                assert made[name].dtype == state.dtype


@case
def an_optimizer_without_states_yet_is_saved_and_loaded_as_such() -> None:
    for flat in (False, True):
        one = wrap(Net(), flat=flat)
        checkpoint = gather({"m": one, "o": adamw(one)})
        assert not tensors(checkpoint, "o")
        other = wrap(Net(), flat=flat)
        trained = adamw(other)
        step(other, trained)
        load({"m": other, "o": trained}, checkpoint)
        assert not any(trained.state.values())


@case
def a_parameter_of_which_a_rank_has_nothing_has_no_states_there() -> None:
    module = wrap(Net())
    optimizer = adamw(module)
    step(module, optimizer)
    held = holdings({"m": module, "o": optimizer})
    with_elements = {s.fqn for s in held.shards if s.item == "m" and s.fqn != "seen"}
    assert len(with_elements) < 6
    assert {s.fqn.split("/")[1] for s in held.shards if s.item == "o"} == with_elements
    assert {b.fqn.split("/")[1] for b in held.blobs} >= {"emb.weight", "head.weight", "down.bias"}


def states_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the states of this rank's optimizer, by their saved names."""
    names: dict[torch.Tensor, str] = {
        p: name.replace("_fsdp_wrapped_module.", "") for name, p in module.named_parameters()
    }
    return {
        f"state/{names[p]}/{key}": state.reshape(-1).clone()
        for p, states in optimizer.state.items()
        for key, state in states.items()
        if p.numel()
    }


def assert_saved_as_is(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that a save now has the values of module and optimizer, in their own memory."""
    held = collect({"m": module, "o": optimizer}, dist.get_rank(), WORLD)
    found: dict[str, list[torch.Tensor]] = {}
    places = {state.untyped_storage().data_ptr() for s in optimizer.state.values() for state in s.values()}
    for shard in held.shards:
        if shard.item == "o":
            found.setdefault(shard.fqn, []).append(shard.data.reshape(-1))
            assert shard.data.untyped_storage().data_ptr() in places, shard.fqn
    expected = states_of(module, optimizer)
    assert_equal({name: torch.cat(parts) for name, parts in found.items()}, expected)
    assert all(found[name][0].dtype == state.dtype for name, state in expected.items())
    checkpoint = gather({"m": module, "o": optimizer})
    assert_equal(tensors(checkpoint), flat_truth.gathered(module))


@case
def a_later_save_sees_whatever_was_changed_since_an_earlier_one() -> None:
    net = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 7, bias=False))
    module: Any = FSDP(net, device_id=CPU, use_orig_params=True)
    first, *rest = module.parameters()
    optimizer = torch.optim.AdamW([first], lr=0.1, amsgrad=True, foreach=False)

    def train() -> None:
        module(torch.ones(1, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_saved_as_is(module, optimizer)

    train()
    optimizer.add_param_group({"params": rest, "lr": 0.5})
    assert_saved_as_is(module, optimizer)
    train()
    saved = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    saved["state"] = {
        n: {key: state * 2 for key, state in states.items()}
        for n, states in optimizer.state_dict()["state"].items()
    }
    optimizer.load_state_dict(saved)
    assert_saved_as_is(module, optimizer)
    for states in list(optimizer.state.values()):
        states["exp_avg"] = states["exp_avg"].to(torch.bfloat16)
        states["more"] = states.pop("exp_avg_sq")
        states["max_exp_avg_sq"].data = torch.full_like(states["max_exp_avg_sq"], 7)
        states["step"] = states["step"] + 1
    assert_saved_as_is(module, optimizer)
    here = next((states for p, states in optimizer.state.items() if p.numel() > 1), None)
    if here is not None:
        here["more"].resize_(here["more"].numel() - 1)
        apart = collect({"m": module, "o": optimizer}, dist.get_rank(), WORLD)
        assert any(blob.coordinate and blob.fqn.endswith("/more") for blob in apart.blobs)
    # Other names for equal shapes, another cut of the same names, and other parameters under the same names.
    around: Any = nn.ModuleDict({"inner": FSDP(nn.Linear(7, 9), device_id=CPU, use_orig_params=True)})
    whole = wrap(nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 7, bias=False)), "NO_SHARD")
    for wrapped in (around, whole):
        other = torch.optim.AdamW(wrapped.parameters(), lr=0.1, foreach=False)
        inner = wrapped["inner"] if wrapped is around else wrapped
        inner(torch.ones(1, 7)).sum().backward()
        other.step()
        assert_saved_as_is(wrapped, other)
    around["inner"] = wrap(nn.Linear(7, 9))
    with pytest.raises(StateError, match="belongs to no module"):
        holdings({"m": around, "o": torch.optim.AdamW(net.parameters(), lr=0.1)})
    assert_equal(tensors(gather({"m": around})), flat_truth.gathered(around))


@case
def tied_weights_are_one_tensor_with_two_names() -> None:
    for flat in (False, True):
        net = Net(tied=True)
        module = wrap(net, flat=flat)
        optimizer = adamw(module)
        step(module, optimizer)
        held = holdings({"m": module, "o": optimizer})
        assert ("m", "head.weight", "emb.weight") in {(a.item, a.fqn, a.of) for a in held.aliases}
        checkpoint = gather({"m": module, "o": optimizer})
        plain = Net(tied=True)
        load({"m": plain}, checkpoint)
        assert_equal(dict(plain.state_dict()), tensors(checkpoint))
        other = wrap(Net(tied=True), flat=flat)
        load({"m": other, "o": adamw(other)}, checkpoint)
        assert_equal(tensors(gather({"m": other})), tensors(checkpoint))


@case
def frozen_and_ignored_parameters_and_activation_checkpointing() -> None:
    torch.manual_seed(2)
    net: Any = Net()
    net.emb.requires_grad_(requires_grad=False)
    expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net.up = checkpoint_wrapper(net.up)
    module = FSDP(net, device_id=CPU, use_orig_params=True, ignored_states=list(net.head.parameters()))
    optimizer = adamw(module)
    checkpoint = gather({"m": module, "o": optimizer})
    assert_equal(tensors(checkpoint), expected)
    step(module, optimizer)
    assert not any("emb.weight" in fqn for fqn in tensors(gather({"m": module, "o": optimizer}), "o"))
    load({"m": module}, checkpoint)
    assert_equal(tensors(gather({"m": module})), expected)


@case
def in_the_middle_of_a_forward_the_shards_are_held_and_none_are_filled() -> None:
    for strategy, flat in VARIANTS:
        module = wrap(Net(), strategy, flat=flat)
        checkpoint = gather({"m": module})
        seen: list[Any] = []

        def look(*_: Any, module: Any = module, checkpoint: Any = checkpoint, seen: Any = seen) -> None:
            seen.append(holdings({"m": module}))
            with pytest.raises(StateError, match="in the middle of a forward"):
                wanted({"m": module}, checkpoint.catalog(), dist.get_rank(), WORLD)

        module.module.down.register_forward_hook(look)
        module(IDS)
        assert_equal(tensors(gathered(seen[0])), tensors(checkpoint))


@case
def summoned_parameters_are_refused() -> None:
    module = wrap(Net())
    checkpoint = gather({"m": module})
    with FSDP.summon_full_params(module):
        with pytest.raises(StateError, match="summon"):
            holdings({"m": module})
        with pytest.raises(StateError, match="summon"):
            load({"m": module}, checkpoint)
    assert_equal(tensors(gather({"m": module})), tensors(checkpoint))


@case
def memory_that_is_not_of_fsdp_is_refused() -> None:
    module = wrap(Net())
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    with pytest.raises(StateError, match="other memory"):
        holdings({"m": module})
    module(IDS)  # FSDP takes it over
    holdings({"m": module})
    module.module.down.bias = nn.Parameter(torch.zeros_like(module.module.down.bias))
    if module.module.down.bias.numel():
        with pytest.raises(StateError, match="other memory"):
            holdings({"m": module})
    module = wrap(Net())
    module(IDS)
    module.double()
    with pytest.raises(StateError, match="moved or converted"):
        holdings({"m": module})


class Renamed(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"other_{key}": value for key, value in super().state_dict(*args, **kwargs).items()}


class Doubled(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}double"] = self.weight.detach() * 2


@case
def modules_that_change_what_fsdp_took_are_refused() -> None:
    hooked: Any = nn.Linear(3, 3)
    hooked.register_state_dict_post_hook(lambda *args: None)
    for inner in (hooked, Renamed(3, 3), Doubled(3, 3)):
        module = wrap(nn.Sequential(inner, nn.Linear(3, 3)))
        with pytest.raises(StateError, match="changes its state dict"):
            holdings({"m": module})


@case
def what_fsdp_left_alone_goes_through_its_own_hooks() -> None:
    hooked: Any = nn.Linear(3, 3, bias=False)
    before = hooked.weight.detach().clone()
    hooked.register_state_dict_post_hook(
        lambda _, state, prefix, __: state.update({f"{prefix}weight": state[f"{prefix}weight"] * 2})
    )
    hooked.register_load_state_dict_pre_hook(
        lambda _, state, prefix, *__: state.update({f"{prefix}weight": state[f"{prefix}weight"] / 2})
    )
    module = nn.ModuleDict({"a": hooked, "b": wrap(nn.Linear(3, 3))})
    checkpoint = gather({"m": module})
    assert torch.equal(tensors(checkpoint)["a.weight"], before * 2)
    with torch.no_grad():
        hooked.weight.zero_()
    load({"m": module}, checkpoint)
    assert torch.equal(hooked.weight, before)


@case
def a_parameter_tied_across_units_is_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    module = nn.Sequential(FSDP(net[0], device_id=CPU, use_orig_params=True), net[1])
    with pytest.raises(StateError, match="tied to a parameter in another FSDP unit"):
        holdings({"m": module})


@case
def the_optimizer_alone_is_refused() -> None:
    for flat in (False, True):
        module = wrap(Net(), flat=flat)
        named = torch.optim.AdamW(list(module.named_parameters()), lr=0.1)
        with pytest.raises(StateError, match="belongs to no module in the state"):
            holdings({"o": named})


@case
def counters_that_differ_do_not_fit_one_flat_parameter() -> None:
    net = Net()
    optimizer = adamw(net)
    step(net, optimizer)
    optimizer.state[net.up.bias]["step"] += 1
    module = wrap(Net(), flat=True)
    fresh = adamw(module)
    checkpoint = gather({"m": net, "o": optimizer})
    with Silence():
        want = wanted({"m": module, "o": fresh}, checkpoint.catalog(), dist.get_rank(), WORLD)
    with pytest.raises(StateError, match=r"up.bias/step is 2.0 in the checkpoint and .* is 1.0"):
        fill(want, checkpoint)
    assert not fresh.state.get(module.module.up._handle.flat_param)
    module = wrap(Net())
    fresh = adamw(module)
    load({"m": module, "o": fresh}, checkpoint)
    assert float(tensors(gather({"m": module, "o": fresh}), "o")["state/up.bias/step"]) == 2


@case
def states_of_some_parameters_do_not_make_those_of_a_flat_one() -> None:
    net = Net()
    optimizer = adamw(net)
    step(net, optimizer)
    del optimizer.state[net.up.bias]
    module = wrap(Net(), flat=True)
    checkpoint = gather({"m": net, "o": optimizer})
    want = wanted({"m": module, "o": adamw(module)}, checkpoint.catalog(), dist.get_rank(), WORLD)
    assert {fqn for _, fqn, _ in want.missing} == {
        f"state/up.bias/{name}" for name in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    }


@case
def states_that_are_not_as_long_as_the_shard_load_where_each_rank_has_the_part_that_it_saved() -> None:
    def scaled(value: float, **more: Any) -> dict[str, Any]:
        module = wrap(Net(), **more)
        optimizer = adamw(module)
        step(module, optimizer)
        for parameter, states in optimizer.state.items():
            states["scales"] = torch.full((parameter.numel() + 1,), value)
            states["inside"] = {"table": torch.full((3, 2), value), "scale": torch.full((), 5.0)}
        return {"m": module, "o": optimizer}

    for flat in (False, True):
        checkpoint = gather(scaled(1.0 + dist.get_rank(), flat=flat))
        module = wrap(Net(), flat=flat)
        for target in (scaled(9.0, flat=flat), {"m": module, "o": adamw(module)}):
            load(target, checkpoint)
            for states in target["o"].state.values():
                assert {*states["scales"].tolist()} == {1.0 + dist.get_rank()}
                assert {*states["inside"]["table"].flatten().tolist()} == {1.0 + dist.get_rank()}
        for others in (scaled(9.0, flat=not flat), {"m": (net := Net()), "o": adamw(net)}):
            want = wanted(others, checkpoint.catalog(), dist.get_rank(), WORLD)
            assert any("scales" in fqn for _, fqn, _ in want.mismatched), "it is refused, and nothing changes"


@case
def states_that_a_flattened_parameter_has_no_place_for_do_not_match() -> None:
    net = Net()
    optimizer = adamw(net)
    optimizer.state[net.up.weight]["rows"] = torch.zeros(9, 1)
    checkpoint = gather({"m": net, "o": optimizer})
    for flat in (False, True):
        module = wrap(Net(), flat=flat)
        want = wanted({"m": module, "o": adamw(module)}, checkpoint.catalog(), dist.get_rank(), WORLD)
        mismatched = {fqn for _, fqn, _ in want.mismatched}
        everyone: list[Any] = [None] * WORLD
        dist.all_gather_object(everyone, mismatched)
        assert set().union(*everyone) == {"state/up.weight/rows"}


@case
def states_of_a_flat_parameter_stay_where_none_that_was_saved_fits() -> None:
    trained: list[dict[str, Any]] = []
    modules: list[Any] = [nn.Linear(3, 4), wrap(nn.Linear(3, 5), flat=True)]
    for module in modules:
        optimizer = adamw(module)
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        trained.append({"m": module, "o": optimizer})
    saved, target = trained
    (states,) = target["o"].state.values()
    before = {name: state.clone() for name, state in states.items()}
    checkpoint = gather(saved)
    with Silence():
        want = wanted(target, checkpoint.catalog(), dist.get_rank(), WORLD)
    assert {"state/weight/exp_avg", "state/bias/exp_avg"} < {fqn for _, fqn, _ in want.mismatched}
    fill(want, checkpoint)
    (states,) = target["o"].state.values()
    assert_equal(states, before)


@case
def modules_beside_and_around_fsdp() -> None:
    net = nn.ModuleDict({"a": wrap(nn.Linear(3, 5)), "b": nn.Linear(2, 2), "c": nn.BatchNorm1d(3)})
    expected = {"b.weight", "b.bias", "c.weight", "c.running_mean"}
    checkpoint = gather({"m": net})
    assert expected | {"a.weight", "a.bias", "c.num_batches_tracked"} <= tensors(checkpoint).keys()
    plain = nn.ModuleDict({"a": nn.Linear(3, 5), "b": nn.Linear(2, 2), "c": nn.BatchNorm1d(3)})
    load({"m": plain}, checkpoint)
    assert_equal(dict(plain.state_dict()), tensors(checkpoint))


@case
def fsdp_with_one_rank_beside_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(4, 6))
    reference = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    module = FSDP(net, device_id=CPU, use_orig_params=True, device_mesh=mesh["dp"])
    checkpoint = gather({"m": module})
    assert_equal(tensors(checkpoint), reference)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    load({"m": module}, checkpoint)
    assert_equal(tensors(gather({"m": module})), reference)


@pytest.mark.parametrize("part", [0, 1])
def test_fsdp1_in_every_phase(part: int) -> None:
    failed = [text for found in run(WORLD, run_cases, part, timeout=200) for text in found.values()]
    assert not failed, "\n".join(failed)
