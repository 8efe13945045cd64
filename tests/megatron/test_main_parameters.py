"""An optimizer whose states cannot be assigned to parameters with certainty is refused, and says where."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from reknit.errors import StateError
from tests import ranks
from tests.megatron.jobs import compare
from tests.megatron.layouts import Layout
from tests.optional import needs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = needs("megatron", "Megatron-Core")

run = partial(ranks.run, warm="megatron")


def _group(optimizer: Any) -> Any:
    """Return the group of several dtypes."""
    return optimizer.optimizer.param_groups[_number(optimizer)]


def _number(optimizer: Any) -> int:
    columns = [optimizer.model_fp32_groups, optimizer.model_float16_groups]
    (number,) = [n for n, groups in enumerate(zip(*columns, strict=True)) if all(groups)]
    return number


def _replace_a_tensor(optimizer: Any) -> None:
    params = _group(optimizer)["params"]
    params[0] = params[0].clone()


def _leave_one_out(optimizer: Any) -> None:
    _group(optimizer)["params"].pop()


def _have_one_twice(optimizer: Any) -> None:
    params = _group(optimizer)["params"]
    params.append(params[0])


def _have_a_pair_twice(optimizer: Any) -> None:
    number = _number(optimizer)
    for groups in (optimizer.model_fp32_groups, optimizer.shard_fp32_groups):
        groups[number].append(groups[number][0])
    _have_one_twice(optimizer)


def _lack_a_pair(optimizer: Any) -> None:
    optimizer.shard_fp32_groups[_number(optimizer)].pop()


def _lack_a_parameter(optimizer: Any) -> None:
    number = _number(optimizer)
    optimizer.model_fp32_groups[number].pop()
    main = optimizer.shard_fp32_groups[number].pop()
    params = _group(optimizer)["params"]
    params[:] = [one for one in params if one is not main]


def _have_one_more_group(optimizer: Any) -> None:
    optimizer.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "wd_mult": 1.0})


def _have_another_range(optimizer: Any) -> None:
    parameter = optimizer.model_fp32_groups[_number(optimizer)][0]
    optimizer._get_model_param_range_map(parameter)["param"].end -= 1


def _swap_two_copies(optimizer: Any) -> None:
    mains = optimizer.shard_fp32_from_float16_groups[_number(optimizer)]
    one, other = [n for n, main in enumerate(mains) if main.numel() == 24][:2]
    mains[one], mains[other] = mains[other], mains[one]


def _swap_two_views(optimizer: Any) -> None:
    mains = optimizer.shard_fp32_groups[_number(optimizer)]
    mains[0], mains[1] = mains[1], mains[0]


def _move_a_parameter(optimizer: Any) -> None:
    parameter = optimizer.model_fp32_groups[_number(optimizer)][0]
    parameter.data = parameter.data.clone()


def _convert_to_full_precision(optimizer: Any) -> None:
    parameter = optimizer.model_float16_groups[_number(optimizer)][0]
    parameter.data = parameter.data.float()


def _convert_to_low_precision(optimizer: Any) -> None:
    parameter = optimizer.model_fp32_groups[_number(optimizer)][0]
    parameter.data = parameter.data.bfloat16()


def _convert_a_copy(optimizer: Any) -> None:
    main = optimizer.shard_fp32_from_float16_groups[_number(optimizer)][0]
    main.data = main.data.double()


def _have_a_strange_state(optimizer: Any) -> None:
    optimizer.optimizer.state[torch.ones(24)] = {"exp_avg": torch.ones(24)}


CHANGES: dict[Callable[[Any], None], str] = {
    _replace_a_tensor: "group 1 of the DistributedOptimizer has other tensors than Megatron",
    _leave_one_out: "group 1 of the DistributedOptimizer has other tensors than Megatron",
    _have_one_twice: "group 1 of the DistributedOptimizer has other tensors than Megatron",
    _have_a_pair_twice: "has one parameter twice in its groups",
    _lack_a_pair: "group 1 of the DistributedOptimizer has 5 tensors for 6 parameters",
    _lack_a_parameter: r"has parts of parameters here that are in none of its groups \(1\)",
    _have_one_more_group: "group 2 of the DistributedOptimizer was added after Megatron made the optimizer",
    _have_another_range: "group 1 of the DistributedOptimizer has 24 elements in place of those from 0 to 23",
    _swap_two_copies: "has two copies of a parameter",
    _swap_two_views: "group 1 of the DistributedOptimizer has other memory",
    _move_a_parameter: "group 1 of the DistributedOptimizer has other memory",
    _convert_to_full_precision: r"group 1 .* has a copy in torch.float32, of torch.float32,",
    _convert_to_low_precision: r"group 1 .* has torch.float32 in place of torch.bfloat16",
    _convert_a_copy: r"group 1 .* has a copy in torch.float64, of torch.bfloat16,",
    _have_a_strange_state: r"has states under keys that are in none of its groups \(1\)",
}


def refuse_each(root: str, names: list[str]) -> None:
    """Check that each change is refused by a save and by a load, which changes nothing; then rebuild."""
    from megatron.core.optimizer import get_megatron_optimizer

    from tests.megatron import gpt

    layout = Layout(1, bf16=True, mixed=True, layers=2)
    before = gpt.build(layout)
    reknit.save(f"{root}/good", before.state())
    by_name = {change.__name__: (change, why) for change, why in CHANGES.items()}
    for change, why in map(by_name.__getitem__, names):
        trained = gpt.build(layout, steps=1, seed=1)
        (inner,) = trained.optimizer.chained_optimizers
        change(inner)
        with pytest.raises(StateError, match=why) as raised:
            reknit.save(f"{root}/{change.__name__}", trained.state())
        assert "make the optimizer from the wrapped model" in str(raised.value)
        values = [p.detach().clone() for p in trained.chunks[0].parameters()]
        with pytest.raises(StateError, match=why):
            reknit.load(f"{root}/good", trained.state())
        for value, parameter in zip(values, trained.chunks[0].parameters(), strict=True):
            assert torch.equal(value, parameter)
        # The remedy: an optimizer that is made afterwards.
        again = get_megatron_optimizer(inner.config, trained.chunks)
        reknit.save(f"{root}/{change.__name__}", {"model": trained.chunks, "optimizer": again})


def test_an_optimizer_whose_pairs_are_not_proved_is_refused_until_it_is_made_anew(tmp_path: Path) -> None:
    run(1, refuse_each, str(tmp_path), [change.__name__ for change in CHANGES])


def save_again(root: str, layouts: list[Layout]) -> list[str]:
    """Save twice by one plan, with a step between, and return the differences after a load of the second."""
    from tests.megatron import gpt, truth

    wrong = []
    for number, layout in enumerate(layouts):
        trained = gpt.build(layout)
        for step in (2, 3):
            reknit.save(f"{root}/{number}-{step}", trained.state(), step=step)
            expected = truth.truth(trained)
            gpt.train(trained, 1, first=step)
        target = gpt.build(layout, steps=1, seed=1)
        reknit.load(f"{root}/{number}-3", target.state())
        wrong += compare(expected, truth.truth(target))
    return wrong


def test_a_second_save_by_the_same_plan_pairs_states_as_the_first(tmp_path: Path) -> None:
    layouts = [Layout(2, bf16=True, mixed=True, distributed=each, layers=2) for each in (False, True)]
    assert run(2, save_again, str(tmp_path), layouts) == [[], []]
