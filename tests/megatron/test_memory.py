"""Unusual memory of Megatron: transposed, cut to a range, or still to be gathered."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import reknit
from reknit.errors import StateError
from reknit.frameworks.registry import collect
from reknit.frameworks.walk.walk import Place
from reknit.integrations.megatron import flat_states, private
from tests import ranks
from tests.megatron.layouts import Layout
from tests.optional import needs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs("megatron", "Megatron-Core")

run = partial(ranks.run, warm="megatron")

STATES = ("exp_avg", "exp_avg_sq")
NAME = "decoder.layers.0.mlp.linear_fc2.weight"


def transposed(layout: Layout, root: str) -> list[tuple[str, bool]]:
    """Return, for each state of a transposed parameter, whether saves and loads keep its values."""
    from tests.megatron import gpt

    trained = gpt.build(layout)
    parameter = dict(trained.chunks[0].module.named_parameters())[NAME]
    (inner,) = [
        one.optimizer for one in trained.optimizer.chained_optimizers if parameter in one.optimizer.state
    ]
    states = inner.state[parameter]
    with torch.no_grad():
        parameter.data = parameter.data.t().contiguous().t()
        for name in STATES:
            states[name] = states[name].t().contiguous().t()
    true: dict[str, Any] = {f"state/{NAME}/{name}": states[name] for name in STATES}
    true[NAME] = parameter.detach()
    shards = [shard for shard in collect(trained.state(), 0, 1).shards if shard.fqn in true]
    found = [(shard.fqn, torch.equal(shard.data, true[shard.fqn])) for shard in shards]
    path = f"{root}/transposed"
    reknit.save(path, trained.state())
    kept = {name: value.clone() for name, value in true.items()}
    for value in true.values():
        value.fill_(7)
    reknit.load(path, trained.state())
    states = inner.state[parameter]
    found += [(name, torch.equal(states[name], kept[f"state/{NAME}/{name}"])) for name in STATES]
    inner.state[parameter].clear()  # then also with the states that the load makes itself
    reknit.load(path, trained.state())
    states = inner.state[parameter]
    return found + [(name, torch.equal(states[name], kept[f"state/{NAME}/{name}"])) for name in STATES]


def test_states_of_a_transposed_parameter_are_saved_and_loaded_as_they_are(tmp_path: Path) -> None:
    layout = Layout(1, distributed=False, layers=1, swiglu=False)
    (found,) = run(1, transposed, layout, str(tmp_path))
    assert len(found) == 7
    assert all(same for _, same in found), found


def counted(layout: Layout, folder: str) -> list[Any]:
    """Return the groups' steps after a load, from a number and from a tensor, and the refusals."""
    from tests.megatron import gpt

    def groups(trained: Any) -> list[Any]:
        works = [
            work
            for optimizer in private.chained(trained.optimizer, Place("o"))
            for work in flat_states.working(optimizer, Place("o"))
        ]
        return [work.group for work in works]

    source, target = gpt.build(layout), gpt.build(layout)
    for group in groups(source):
        group["step"] = 2**24 + 1
    reknit.save(folder, source.state())
    reknit.load(folder, target.state())
    found = [group["step"] for group in groups(target)]
    tensors = [torch.zeros(1, dtype=dtype) for dtype in (torch.int32, torch.float64)]
    for tensor in tensors:
        for group in groups(target):
            group["step"] = tensor
        reknit.load(folder, target.state())
        assert all(group["step"] is tensor for group in groups(target))
    for group in groups(target):
        group["step"] = torch.zeros(1)
    with pytest.raises(StateError, match="would round it"):
        reknit.load(folder, target.state())
    return [set(found), [tensor.item() for tensor in tensors]]


def test_a_group_counts_its_steps_exactly_in_a_number_or_a_tensor(tmp_path: Path) -> None:
    layout = Layout(1, distributed=False, layers=1)
    assert run(1, counted, layout, str(tmp_path / "x")) == [[{2**24 + 1}, [2**24 + 1] * 2]]


def gathered_late(layout: Layout) -> tuple[bool, str | None, int]:
    """Return whether parameters are old after a step, the error of a save, and the number of shards then."""
    from tests.megatron import gpt

    trained = gpt.build(layout)
    for chunk in trained.chunks:
        chunk.ddp_config.overlap_param_gather = True
        chunk.use_forward_hook = True
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            assert group.ddp_config is chunk.ddp_config
        chunk.enable_forward_pre_hook()
    gpt.train(trained, 1, first=2)
    parameter = torch.cat([p.detach().reshape(-1) for p in trained.chunks[0].parameters()])
    both = [torch.empty_like(parameter) for _ in range(2)]
    dist.all_gather(both, parameter)
    stale = not torch.equal(*both)
    said = None
    try:
        collect(trained.state(), dist.get_rank(), 2)
    except StateError as error:
        said = str(error)
    for chunk in trained.chunks:
        chunk.disable_forward_pre_hook()
    return stale, said, len(collect(trained.state(), dist.get_rank(), 2).shards)


def test_parameters_that_are_still_to_be_gathered_are_refused() -> None:
    for stale, refused, held in run(2, gathered_late, Layout(2, layers=1)):
        assert stale
        assert refused is not None
        assert "overlap_param_gather" in refused
        assert held


def flat_range() -> str:
    """Return the refusal of a leaf that is a flat range of its tensor."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    memory = torch.arange(8.0)
    leaf = ShardedTensor(
        "optimizer.state.exp_avg.norm.weight", memory[:4], memory.dtype, (4,), (4,), (0,), (1,)
    )
    leaf.data, leaf.flattened_range = memory[2:4], slice(2, 4)  # as Megatron before 0.16 makes them
    with pytest.raises(StateError, match="flat range") as caught:
        collect({"optimizer": leaf}, 0, 1)
    return str(caught.value)


def test_a_leaf_that_is_a_flat_range_is_refused() -> None:
    assert "norm.weight" in run(1, flat_range)[0]


def test_optimizers_of_torch_count_their_steps_in_the_states() -> None:
    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop):
        made: Any = kind([torch.zeros(1)], lr=0.1)
        assert not private.counts_in_group(made)
