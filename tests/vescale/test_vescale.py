"""Tensor-parallel models and DistributedOptimizers of real veScale 0.0.1 are saved and resharded."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import reknit
from reknit.errors import StateError
from reknit.frameworks.registry import collect
from tests import ranks
from tests.frameworks.checkpoint import assemble, portable
from tests.frameworks.silence import Silence
from tests.tables import table
from tests.vescale import jobs

if TYPE_CHECKING:
    from pathlib import Path

run = partial(ranks.run, warm="vescale")

if not all(map(find_spec, ("vescale", "mmh3"))):
    pytest.skip("veScale 0.0.1, or mmh3 that it needs, is not installed", allow_module_level=True)

BF16 = torch.bfloat16
SAVED: dict[str, dict[str, Any]] = {
    "fp32": {},
    "one group": {"two_groups": False},
    "buckets": {"ddp": {"overlap_grad_reduce": True, "bucket_size": 40}},
    "bf16 with masters": {"dtype": BF16},
    "bf16 alone": {"dtype": BF16, "fp32_grads": False, "grad_to_fp32": False},
}
"""Jobs of TP 2 x DP 2 that save, with their options."""


def save_all(root: str) -> dict[str, Any]:
    """Train and save every job, and return the holdings, the whole state, and the losses of two steps."""
    answers = {}
    for name, options in SAVED.items():
        job = jobs.build(2, 2, 0, **dict(options))
        before = jobs.train(job)
        with Silence():
            holdings = portable(collect(job.state(), dist.get_rank(), 4))
        reknit.save(f"{root}/{name}", job.state(), step=2).result()
        whole = jobs.truth(job)
        answers[name] = (holdings, whole, before, jobs.train(job, first=2))
    return answers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    root = str(tmp_path_factory.mktemp("vescale"))
    return root, run(4, save_all, root)


def differing(found: dict[str, Any], true: dict[str, Any]) -> list[str]:
    """Return the names under which two states are not bit for bit equal."""
    both = found.keys() & true.keys()
    wrong = [n for n in both if found[n].dtype != true[n].dtype or not torch.equal(found[n], true[n])]
    return sorted({*wrong, *(found.keys() ^ true.keys())})


def load_vescale(root: str, layouts: list[tuple[int, int]]) -> list[tuple[str, Any, Any, list[float]]]:
    """Load every checkpoint into fresh jobs of each layout, and return the differences and two losses."""
    answers = []
    for dp, tp in layouts:
        for name, options in SAVED.items():
            job = jobs.build(dp, tp, 1, **dict(options))
            report = reknit.load(f"{root}/{name}", job.state())
            assert not report.missing
            assert not report.unexpected
            answers.append((name, (dp, tp), jobs.truth(job), jobs.train(job, first=2)))
    return answers


@table(("size", "layouts"), [(2, [(2, 1), (1, 2)]), (4, [(2, 2)])])
def test_a_checkpoint_loads_into_another_layout_bit_for_bit_and_training_goes_on(
    size: int, layouts: list[tuple[int, int]], saved: tuple[str, list[dict[str, Any]]]
) -> None:
    root, saving = saved
    for answers, rank in zip(run(size, load_vescale, root, layouts), range(size), strict=True):
        for name, layout, found, losses in answers:
            assert differing(found, saving[0][name][1]) == [], (name, layout)
            if layout == (2, 2):
                assert losses == saving[rank][name][3], name


@table("name", ["fp32", "buckets", "bf16 with masters"])
def test_a_checkpoint_loads_into_one_plain_process(
    name: str, saved: tuple[str, list[dict[str, Any]]]
) -> None:
    root, answers = saved
    model = jobs.Net(1)
    optimizer = torch.optim.AdamW(jobs.groups(model), lr=1.0)
    report = reknit.load(f"{root}/{name}", {"model": model, "optimizer": optimizer})
    assert not report.missing
    assert differing(plain(model, optimizer), in_fp32(answers[0][name][1])) == []
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 3e-3]


def plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all tensors of a plain job as jobs.truth does."""
    found = {f"model/{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, state in optimizer.state[parameter].items():
            found[f"optimizer/state/{name}/{key}"] = state
    return {key: t.full_tensor() if hasattr(t, "full_tensor") else t for key, t in found.items()}


def in_fp32(true: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a checkpoint's state for a job without masters, whose parameters are the masters."""
    found = {key: value for key, value in true.items() if not key.endswith("/master")}
    for key, value in found.items():
        master = true.get(f"optimizer/state/{key.removeprefix('model/')}/master")
        found[key] = value if master is None else master
    return found


def load_plain_into_vescale(root: str) -> dict[str, dict[str, torch.Tensor]]:
    answers = {}
    for name in ("one group", "bf16 with masters", "bf16 alone"):
        job = jobs.build(2, 1, 1, **{**SAVED[name], "two_groups": True})
        assert not reknit.load(f"{root}/plain", job.state(), options=reknit.LoadOptions(cast=True)).missing
        answers[name] = jobs.truth(job)
    job = jobs.build(2, 1, 1, two_groups=True)
    reknit.load(f"{root}/bf16 with masters", job.state())
    answers["fp32 from masters"] = jobs.truth(job)
    return answers


def test_a_plain_checkpoint_loads_into_vescale_also_into_masters(
    saved: tuple[str, list[dict[str, Any]]],
) -> None:
    root, saving = saved
    model = jobs.Net(3)
    optimizer = torch.optim.AdamW(jobs.groups(model), lr=1e-2)
    for _ in range(2):
        model(torch.rand(4, jobs.WIDTH)).square().mean().backward()
        optimizer.step()
    reknit.save(f"{root}/plain", {"model": model, "optimizer": optimizer}, overwrite=True).result()
    true = plain(model, optimizer)
    for answers in run(2, load_plain_into_vescale, root):
        assert differing(answers["one group"], true) == []
        assert differing(answers["fp32 from masters"], in_fp32(saving[0]["bf16 with masters"][1])) == []
        for name in ("bf16 with masters", "bf16 alone"):
            for key, parameter in model.named_parameters():
                whole = parameter.detach()
                master = answers[name][f"optimizer/state/{key}/master"]
                assert torch.equal(answers[name][f"model/{key}"], whole.to(BF16))
                assert torch.equal(master, whole if name == "bf16 with masters" else whole.to(BF16))


def corners() -> dict[str, str]:
    """Check unusual objects, and return the messages of refusals."""
    found = {}
    rank = dist.get_rank()
    job = jobs.build(2, 1, 0, overlap_param_gather=True)
    collect(job.state(), rank, 2)
    jobs.train(job, 1)
    with pytest.raises(StateError) as caught:
        collect(job.state(), rank, 2)
    found["stepped"] = str(caught.value)
    job.optimizer.zero_grad()
    with pytest.raises(StateError):
        collect(job.state(), rank, 2)
    job.model(torch.rand(2, jobs.WIDTH))
    truth = jobs.build(2, 1, 0)
    jobs.train(truth, 1)
    fetched = collect({"model": job.model}, rank, 2).shards
    for mine, true in zip(fetched, collect({"model": truth.model}, rank, 2).shards, strict=True):
        assert torch.equal(mine.data, true.data)
    collect(job.state(), rank, 2)
    hook = truth.optimizer.optimizer.register_state_dict_post_hook(lambda *args: None)
    with pytest.raises(StateError) as caught:
        collect(truth.state(), rank, 2)
    found["hooked"] = str(caught.value)
    hook.remove()
    truth.optimizer.param_groups[1]["params"].append(torch.zeros(1))
    with pytest.raises(StateError) as caught:
        collect(truth.state(), rank, 2)
    found["groups"] = str(caught.value)
    return found


def test_parameters_that_are_still_to_be_fetched_are_refused_until_the_next_forward() -> None:
    for found in run(2, corners):
        assert "are outdated" in found["stepped"]
        assert "other parameters than veScale put into it" in found["groups"]
        assert "which cannot be run where each rank has a part of the states" in found["hooked"]


def tensor_parallel_alone(root: str) -> tuple[Any, dict[str, list[str]]]:
    """Train with a plain optimizer in veScale's wrapper, and check an interleaved tensor."""
    jobs.shim()
    from vescale import distribute_tensor
    from vescale.dtensor.placement_types import InterleavedShard
    from vescale.optim.base_optimizer import BasicOptimizer

    job = jobs.build(1, 2, 0)
    net = job.model.module
    optimizer = BasicOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), net, grad_hook=None)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter.data)
    optimizer.step()
    qkv = distribute_tensor(torch.arange(24.0).reshape(12, 2), job.mesh["TP"], [InterleavedShard(0, 3)])
    state = {"model": net, "optimizer": optimizer, "qkv": qkv}
    with Silence():
        holdings = portable(collect(state, dist.get_rank(), 2))
    boxes = [str(s.box) for s in holdings.shards if s.item == "qkv"]
    reknit.save(f"{root}/alone", state).result()
    other = jobs.build(2, 1, 1).model.module
    fresh = BasicOptimizer(torch.optim.AdamW(other.parameters(), lr=1.0), other, grad_hook=None)
    target = {"model": other, "optimizer": fresh, "qkv": torch.zeros(12, 2)}
    assert not reknit.load(f"{root}/alone", target).missing
    assert torch.equal(target["qkv"], torch.arange(24.0).reshape(12, 2))
    return holdings, {
        "boxes": boxes,
        "states": [type(s["exp_avg"]).__name__ for s in fresh.optimizer.state.values()],
    }


def test_a_plain_optimizer_in_veScales_wrapper_and_interleaved_shards_are_saved_as_boxes(
    tmp_path: Path,
) -> None:
    answers = run(2, tensor_parallel_alone, str(tmp_path))
    checkpoint = assemble([holdings for holdings, _ in answers])
    assert torch.equal(checkpoint.tensors["qkv", ""], torch.arange(24.0).reshape(12, 2))
    assert answers[1][1]["boxes"] == ["[2:4,0:2]", "[6:8,0:2]", "[10:12,0:2]"]
    assert checkpoint.specs["optimizer", "state/down.weight/exp_avg"].shape == (jobs.OUT, jobs.HIDDEN)
    assert set(answers[0][1]["states"]) == {"DTensor"}


class Stage(torch.nn.Module):
    """A stage of a pipeline, whose layer has a number in the whole model."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.name = f"layer{number}"
        self.add_module(self.name, torch.nn.Linear(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = getattr(self, self.name)(x)
        return y


def two_stages(root: str, numbers: tuple[int, int]) -> str:
    """Train two stages with one optimizer, and save them as parts of one model."""
    jobs.shim()
    from vescale.ddp.distributed_data_parallel import DistributedDataParallel
    from vescale.dmodule.api import parallelize_module
    from vescale.dtensor.device_mesh import DeviceMesh
    from vescale.dtensor.placement_types import Replicate
    from vescale.optim.distributed_optimizer import DistributedOptimizer

    mesh = DeviceMesh("cpu", torch.arange(2).reshape(2, 1), mesh_dim_names=("DP", "TP"))
    models = []
    for number in numbers:
        plan = {"parameter": {}, "forward": {"input": [[Replicate()]]}}
        stage = parallelize_module(Stage(number), mesh["TP"], plan)
        models.append(DistributedDataParallel(stage, mesh["DP"], use_distributed_optimizer=True))
    inner = torch.optim.AdamW([p for model in models for p in model.module.parameters()])
    optimizer = DistributedOptimizer(inner, models=models)
    models[1](models[0](torch.ones(2, 5))).to_local().sum().backward()
    for model in models:
        model.finish_grad_sync()
    optimizer.step()
    try:
        reknit.save(f"{root}/{numbers}", {"model": models, "optimizer": optimizer}).result()
    except StateError as error:
        return str(error)
    return ""


def test_the_stages_of_a_pipeline_are_one_model_if_their_names_go_on(tmp_path: Path) -> None:
    assert run(2, two_stages, str(tmp_path), (0, 1)) == ["", ""]
    found = reknit.open(tmp_path / "(0, 1)").tensors
    assert set(found["model"]) == {f"layer{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")}
    assert found["optimizer"]["state/layer1.weight/exp_avg"].shape == (5, 5)
    for refusal in run(2, two_stages, str(tmp_path), (0, 0)):
        assert "model/layer0.weight is the name of two different things" in refusal
