"""Megatron's objects have the meaning that reknit assumes: checked on real ones, trained for two steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import reknit
from reknit.errors import CommitError, StateError
from reknit.frameworks.registry import collect
from reknit.frameworks.walk.walk import Place
from reknit.integrations.megatron import flat_states, model, private
from reknit.integrations.megatron import sharded as dist_checkpointing
from tests import ranks
from tests.devices import run_simulated
from tests.frameworks.checkpoint import Checkpoint, assemble, load, portable
from tests.frameworks.silence import Silence
from tests.megatron.layouts import Layout
from tests.optional import needs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.frameworks.torch.flat_part import FlatPart

pytestmark = needs("megatron", "Megatron-Core")

run = partial(ranks.run, warm="megatron")

HERE = Place("model")


def each(check: Callable[[Layout], None], layouts: list[Layout]) -> None:
    for layout in layouts:
        check(layout)


def transposing_factory() -> list[tuple[str, FlatPart]]:
    """A factory such as that of grouped experts, whose weights lie transposed, all in one parameter."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    experts, hidden, ffn, first, total = 2, 3, 2, 2, 4
    key = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"
    weight = torch.nn.Parameter(torch.arange(experts * hidden * 2 * ffn).float().view(hidden, -1))

    def build(key: str, t: torch.Tensor, replica: Any, _: Any) -> list[Any]:
        whole = t.view(experts, hidden, 2 * ffn).transpose(-1, -2)
        parts = [part.contiguous() for part in torch.chunk(whole, 2, -2)]
        return [
            ShardedTensor.from_rank_offsets(
                key, part, (0, first // experts, total // experts), (1, n, 2), replica_id=replica
            )
            for n, part in enumerate(parts)
        ]

    def merge(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts, -2).transpose(-1, -2).reshape(hidden, -1)

    factory = ShardedTensorFactory(key, weight, build, merge, (0, 0, 0))
    found = model.held(factory, HERE)
    memory = weight.detach().reshape(-1)
    for number, one in enumerate(found):
        assert one.name == f"decoder.layers.0.mlp.experts.local_experts.{first + number}.linear_fc1.weight"
        whole = torch.zeros(one.part.shape)
        for box, data in one.part.parts(memory):
            whole[box.slices()] = data
        expected = memory.view(experts, hidden, 2 * ffn)[number].t()
        assert torch.equal(whole, expected)
    return [(one.name, one.part) for one in found]


def test_grouped_experts_that_lie_transposed_have_a_tensor_each() -> None:
    (found,) = run(1, transposing_factory)
    assert len(found) == 2
    assert all(part.shape == (4, 3) and part.order == (1, 0) and part.total == 24 for _, part in found)
    assert [part.offset for _, part in found] == [0, 12]


def leaf(key: str, data: torch.Tensor, replica: Any = 0) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return ShardedTensor.from_rank_offsets(key, data, replica_id=replica)


def computing_factories() -> None:
    """Check that a factory is refused by its key if it computes values, or does not join the parts."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    def halves(key: str, t: torch.Tensor, replica: Any, _: Any) -> Any:
        return {"parts": [leaf(f"{key}.{n}", part, replica) for n, part in enumerate(t.chunk(2))]}

    def copies(key: str, t: torch.Tensor, replica: Any, _: Any) -> Any:
        return [leaf(key, t.flip(0).clone(), replica)]

    def joined(made: Any) -> Any:
        return torch.cat(made["parts"])

    data = torch.arange(6.0)
    factory = ShardedTensorFactory("k", data.clone(), halves, joined)
    saved = assemble([portable(collect({"i": {"f": factory}}, 0, 1))])
    other = ShardedTensorFactory("k", torch.zeros(6), halves, joined)
    load({"i": {"f": other}}, saved)
    assert torch.equal(other.data, data)
    bad = [
        (halves, lambda made: joined(made) * 3),
        (halves, lambda made: made["parts"]),
        (halves, lambda made: torch.cat(made["parts"][::-1])),
        (halves, lambda made: joined(made).sqrt_()),
        (copies, lambda made: made[0]),
        (lambda *a: leaf(a[0], a[1] + 1, a[2]), lambda made: made - 1),
        (lambda *a: leaf(a[0], a[1] * 2, a[2]), lambda made: made // 2),
        (lambda *a: [leaf(a[0], a[1].bfloat16(), a[2])], lambda made: made[0].long()),
    ]
    for build, merge in bad:
        factory = ShardedTensorFactory("k", data.clone(), build, merge)
        wrong = merge if build is halves or build is copies else build
        name = f"{wrong.__module__}.{wrong.__qualname__}"
        why = "does not put the parts together" if wrong is merge else "computes the saved values"
        state = {"i": {"f": factory}}
        for act in (partial(collect, state, 0, 1), partial(load, state, saved)):
            with pytest.raises(StateError) as caught:
                act()
            assert str(caught.value).startswith(f"i/f: {name} (")
            assert why in str(caught.value)
            assert "in the factory of k" in str(caught.value)
        assert torch.equal(factory.data, data)


def test_a_factory_that_does_more_than_to_part_a_tensor_is_refused() -> None:
    run(1, computing_factories)


def lack_main_copies(root: str) -> None:
    """Check that a save fails, with the name, if no rank has the main copy of a tensor."""
    rank = dist.get_rank()
    for name, replica in [("plain", rank + 1), ("late", (1, 0, rank))]:
        state = {"i": {"a": leaf("kept", torch.ones(2), rank), "b": leaf(name, torch.ones(2, 3), replica)}}
        with pytest.raises(CommitError, match=f"i/{name}"):
            reknit.save(f"{root}/{name}", state)
    weight = torch.nn.Parameter(torch.ones(2, 3))
    with pytest.raises(CommitError, match="i/weight"):
        reknit.save(f"{root}/weight", {"i": {"w": leaf("weight", weight, (1, 0, rank))}})
    assert reknit.latest(root) is None
    # The contents of the other ranks' copies do not matter.
    reknit.save(f"{root}/good", {"i": {"a": leaf("kept", torch.full((2,), float(rank)), rank)}})
    target = leaf("kept", torch.full((2,), 5.0), rank)
    reknit.load(f"{root}/good", {"i": {"a": target}})
    assert target.data.tolist() == [0, 0]


def test_a_tensor_without_a_main_copy_fails_the_save(tmp_path: Path) -> None:
    run(2, lack_main_copies, str(tmp_path))


def objects_that_lack_main_copies(root: str) -> None:
    """Check that a ShardedObject without a main copy fails the save on all ranks, in all places of a grid."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    rank = dist.get_rank()
    full = "s 0-1"
    lacking = {
        "plain": (
            ShardedObject("o", rank, (1,), (0,), replica_id=rank + 1),
            f"i/o; copies are on rank{full}",
        ),
        "late": (
            ShardedObject("o", rank, (1,), (0,), replica_id=(1, 0, rank)),
            f"i/o; copies are on rank{full}",
        ),
        "extra": (
            ShardedObject("m._extra_state", torch.ones(2), (1,), (0,), replica_id=(0, 1, rank)),
            rf"i/m\._extra_state; copies are on rank{full}",
        ),
        "one": (
            ShardedObject("r", rank, (2, 1), (rank, 0), replica_id=rank),
            r"i/r \(pp 1, tp 0\); copies are on rank 1",
        ),
    }
    for name, (value, reported) in lacking.items():
        for wait in (True, False):
            state = {"i": {"t": leaf("kept", torch.ones(2), rank), "o": value}}
            with pytest.raises(StateError, match=f"no rank has the main copy of {reported}"):
                reknit.save(f"{root}/{name}", state, wait=wait).result()
    assert reknit.latest(root) is None
    for wait in (True, False):
        path = f"{root}/good{wait}"
        pairs = [
            (ShardedObject("o", rank + 1, (1,), (0,), replica_id=rank), 1),
            (ShardedObject("r", rank + 5, (2, 1), (rank, 0), replica_id=0), rank + 5),
            (ShardedObject("s", rank + 7, (2, 1), (0, 0), replica_id=(0, 0, rank)), 7),
        ]
        reknit.save(path, {"i": {str(n): value for n, (value, _) in enumerate(pairs)}}, wait=wait).result()
        if wait:
            target = ShardedObject("o", None, (1,), (0,), replica_id=rank)
            reknit.load(path, {"i": {"0": target}}, strict=["!i/*"])
            assert target.data == pairs[0][1]


def test_an_object_without_a_main_copy_fails_the_save(tmp_path: Path) -> None:
    run(2, objects_that_lack_main_copies, str(tmp_path))


def hold(layout: Layout, steps: int) -> Any:
    from tests.megatron import gpt

    trained = gpt.build(layout, steps=steps)
    with Silence():
        return portable(collect(trained.state(), dist.get_rank(), dist.get_world_size()))


def take(layout: Layout, checkpoint: Checkpoint) -> tuple[Any, list[Any]]:
    """Load without a message, and return the holdings afterwards, and parameters with their masters."""
    from tests.megatron import gpt

    trained = gpt.build(layout, steps=0, seed=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    with Silence():
        load(trained.state(), checkpoint, rank, world)
        held = portable(collect(trained.state(), rank, world))
    pairs = []
    for optimizer in trained.optimizer.chained_optimizers:
        for work in flat_states.working(optimizer, HERE):
            part = work.parameter.detach().reshape(-1)[work.start : work.start + work.numel]
            pairs.append((part.clone(), work.main.detach().reshape(-1).clone()))
    return held, pairs


def test_what_a_rank_says_of_the_others_is_true_and_loads_without_a_message() -> None:
    source, target = Layout(4, pp=2, bf16=True, layers=2), Layout(2, bf16=True, layers=2)
    everyone = run(4, hold, source, 2)
    for last_stage in everyone[2:]:
        tied = [shard for shard in last_stage.shards if "embedding.word_embeddings" in shard.fqn]
        assert {shard.item for shard in tied} == {"model"}
        assert [shard.replicas for shard in tied] == [()]
    saved = assemble(everyone)
    answers = run(2, take, target, saved)
    again = assemble([held for held, _ in answers])
    assert again.tensors.keys() == saved.tensors.keys()
    for name, tensor in saved.tensors.items():
        assert torch.equal(again.tensors[name], tensor), name
    for _, pairs in answers:
        assert all(torch.equal(part, main.to(part.dtype)) for part, main in pairs)


def change_precision(root: str) -> None:
    """Save with masters and load without, and the other way round."""
    from tests.megatron import gpt

    full, low = Layout(1, layers=2), Layout(1, bf16=True, layers=2)
    cast = reknit.LoadOptions(cast=True)
    for source, target in ((full, low), (low, full)):
        trained = gpt.build(source)
        path = f"{root}/{source.bf16}"
        reknit.save(path, trained.state()).result()
        exact = [work.main.detach().clone() for work in works(trained)]
        trained = gpt.build(target, steps=0, seed=1)
        reknit.load(path, trained.state(), options=cast)
        assert len(exact) == len(works(trained))
        for work, truth in zip(works(trained), exact, strict=True):
            part = work.parameter.detach().reshape(-1)[work.start : work.start + work.numel]
            assert torch.equal(work.main.detach().reshape(-1), truth.reshape(-1))
            assert torch.equal(part, truth.reshape(-1).to(part.dtype))


def works(trained: Any) -> list[Any]:
    chain = private.chained(trained.optimizer, HERE)
    return [work for optimizer in chain for work in flat_states.working(optimizer, HERE)]


def test_a_training_in_full_precision_and_one_with_masters_take_each_others_checkpoints(
    tmp_path: Path,
) -> None:
    run(1, change_precision, str(tmp_path))


def random_states(layout: Layout, other: Layout) -> None:
    """Check that random states are restored if the number of places is equal, and else unchanged."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from reknit.frameworks.registry import wanted
    from tests.megatron import gpt

    gpt.build(layout, steps=0)
    rank, world = dist.get_rank(), dist.get_world_size()
    tracker = get_cuda_rng_tracker()
    before = {name: state.clone() for name, state in tracker.get_states().items()}
    held = portable(collect({"rng": tracker}, rank, world))
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, held)
    checkpoint = assemble(everyone)
    gpt.build(layout, steps=0, seed=5)
    tracker = get_cuda_rng_tracker()
    assert any(not torch.equal(state, before[name]) for name, state in tracker.get_states().items())
    load({"rng": tracker}, checkpoint, rank, world)
    assert all(torch.equal(state, before[name]) for name, state in tracker.get_states().items())
    gpt.build(other, steps=0, seed=5)
    want = wanted({"rng": get_cuda_rng_tracker()}, checkpoint.catalog(), rank, world)
    assert want.missing == ()
    assert "cannot be restored" in want.notes[0][2]


def test_random_states_belong_to_places_in_pipeline_and_tensor_groups() -> None:
    run(2, random_states, Layout(2, tp=2, layers=2), Layout(2, pp=2, layers=2))


def scales(root: str, layout: Layout) -> None:
    """Check that the loss scaler of a training in half precision is restored with its optimizer."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    from tests.megatron import gpt

    def scaled(seed: int) -> Any:
        trained = gpt.build(layout, steps=0, seed=seed)
        for optimizer in trained.optimizer.chained_optimizers:
            optimizer.grad_scaler = DynamicGradScaler(2.0**16, 1.0, 2.0, 0.5, 100, 1)
        return trained

    before = scaled(0)
    for optimizer in before.optimizer.chained_optimizers:
        for overflow in (True, False, False):
            optimizer.grad_scaler.update(overflow)
    expected = before.optimizer.chained_optimizers[0].grad_scaler.state_dict()
    reknit.save(root, before.state()).result()
    after = scaled(1)
    reknit.load(root, after.state())
    for optimizer in after.optimizer.chained_optimizers:
        assert optimizer.grad_scaler.state_dict() == expected
    assert expected["scale"].item() == 2.0**15


def test_the_loss_scaler_comes_back_with_every_optimizer_of_a_chain(tmp_path: Path) -> None:
    run(2, scales, str(tmp_path), Layout(2, experts=4, ep=2, bf16=True, layers=2))


def refusals(root: str) -> None:
    """Check that unsupported optimizers are refused, with a remedy."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.transformer.module import MegatronModule

    from tests.megatron import gpt

    trained = gpt.build(Layout(1, layers=2), steps=0)
    chain = LayerWiseDistributedOptimizer.__new__(LayerWiseDistributedOptimizer)
    with pytest.raises(StateError, match="LayerWiseDistributedOptimizer"):
        collect({"model": trained.chunks, "optimizer": chain}, 0, 1)
    (inner,) = trained.optimizer.chained_optimizers
    inner.config.use_precision_aware_optimizer = True
    with pytest.raises(StateError, match="does not support"):
        collect(trained.state(), 0, 1)
    inner.config.use_precision_aware_optimizer = False
    plain = torch.optim.SGD(trained.chunks[0].parameters())
    blobs = collect({"model": trained.chunks, "optimizer": plain}, 0, 1).blobs
    assert {blob.fqn.split(".")[0] for blob in blobs if blob.item == "optimizer"} == {"param_groups/module"}
    hook = inner.optimizer.register_state_dict_post_hook(lambda *args: None)
    with pytest.raises(StateError, match=r"with the hook .*, which cannot be run"):
        collect(trained.state(), 0, 1)
    hook.remove()
    offloaded, inner.optimizer = inner.optimizer, type("HybridDeviceOptimizer", (), {})()
    with pytest.raises(StateError, match="HybridDeviceOptimizer, which reknit does not support"):
        collect(trained.state(), 0, 1)
    inner.optimizer = offloaded
    for wrapper in ("FullyShardedDataParallel", "TorchFullyShardedDataParallel"):
        wrapped = type(wrapper, (MegatronModule,), {})(trained.chunks[0].config)
        wrapped.module = trained.chunks[0]
        with pytest.raises(StateError, match=f"is wrapped in Megatron's {wrapper}"):
            collect({"model": wrapped}, 0, 1)
    groups = inner.optimizer.param_groups
    assert len(groups) == 2
    (held,) = [portable(collect(trained.state(), 0, 1))]
    saved = assemble([held])
    assert not any(at[1].endswith("/step") for at in saved.specs)
    gpt.train(trained, 1)
    saved = assemble([portable(collect(trained.state(), 0, 1))])
    steps = [at for at in saved.specs if at[1].endswith("/step")]
    saved.tensors[steps[0]].fill_(9)
    with pytest.raises(StateError, match="which counts them"):
        load(trained.state(), saved)
    thing = ShardedObject("o", 5, (1,), (0,), replica_id=1)
    with pytest.raises(StateError, match=r"no rank has the main copy of i/o; copies are on rank 0"):
        reknit.save(root, {"i": {"o": thing}})
    parallel_state.destroy_model_parallel()
    with pytest.raises(StateError, match="initialize_model_parallel"):
        collect({"model": trained.chunks}, 0, 1)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    run(1, refusals, str(tmp_path / "lone"))


def hooks(layout: Layout, folder: str) -> None:
    """Check that a hook that derives values from a weight gets the saved one, and Megatron's do nothing."""
    from tests.megatron import gpt

    saved = gpt.build(layout)
    reknit.save(folder, saved.state())
    target = gpt.build(layout, steps=0)
    layer = target.chunks[0].module.module.decoder.layers[0].mlp.linear_fc1

    def derive(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.total = state[f"{prefix}weight"].sum()

    layer.register_load_state_dict_pre_hook(derive)
    reknit.load(folder, target.state())
    true = saved.chunks[0].module.module.decoder.layers[0].mlp.linear_fc1.weight
    assert torch.equal(layer.total, true.detach().sum())
    assert torch.equal(layer.weight, true)
    for one, other in zip(saved.chunks[0].parameters(), target.chunks[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_load_hook_in_a_megatron_model_runs(tmp_path: Path) -> None:
    run(2, hooks, Layout(2, tp=2, bf16=True, distributed=True, layers=2), str(tmp_path / "x"))


def factories_on_a_device() -> list[float]:
    """Read a tensor on a device that a factory copies, and return the peaks of memory in tensor sizes."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    from tests.accelerator import installed

    device = installed()
    assert device is not None
    weight = torch.arange(1 << 21, dtype=torch.float32).reshape(1024, -1).to("cuda")

    def turned(key: str, t: torch.Tensor, replica: Any, _: Any) -> Any:
        return [leaf(f"{key}.{n}", part.contiguous(), replica) for n, part in enumerate(t.t().chunk(2))]

    def joined(made: Any) -> Any:
        return torch.cat(made).t()

    peaks = []
    for own in (True, False):
        factory = ShardedTensorFactory("k", weight, turned, joined)
        with pytest.MonkeyPatch.context() as patch:
            if not own:
                patch.setattr(dist_checkpointing, "_is_megatrons", lambda _: True)
            device.reset_peak()
            found = dist_checkpointing.entries(factory, HERE)
        assert [(one.start, one.strides) for one in found] == [(0, (1, 2048)), (1024, (1, 2048))]
        peaks.append(device.peak() / weight.nbytes)
    return peaks


def test_a_factory_on_a_device_is_read_without_numbers_there() -> None:
    (peaks,) = run_simulated(1, factories_on_a_device)
    assert max(peaks) < 3
