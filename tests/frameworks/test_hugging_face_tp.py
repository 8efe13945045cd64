"""Tensor parallelism as transformers does it: packed weights are several boxes, and fit one process again."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import reknit
from reknit.frameworks.registry import collect
from tests import ranks
from tests.frameworks.checkpoint import assemble, portable
from tests.frameworks.silence import Silence

if TYPE_CHECKING:
    from pathlib import Path

run = partial(ranks.run, warm="transformers")

pytest.importorskip("transformers", reason="these are its models")

KINDS = ["qwen3", "qwen3_moe"]
IDS = torch.arange(14).reshape(2, 7) * 5 % 37


def one(kind: str, seed: int) -> Any:
    """Build a tiny model with random weights in one process."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 37, "hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 4,
    }  # fmt: skip
    torch.manual_seed(seed)
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    experts: dict[str, Any] = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1,
        "experts_implementation": "eager",
    }  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **experts))


def parallel(folder: str) -> Any:
    """Load a model from a folder over all ranks."""
    import transformers

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, tp_plan="auto", device_mesh=mesh, dtype=torch.float32
    )


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found.full_tensor() if isinstance(found, DTensor) else found.clone()


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train_and_save(kind: str, root: str) -> dict[str, Any]:
    """Train on two ranks and save; load the checkpoint of one process; return the observations."""
    rank = dist.get_rank()
    model = parallel(f"{root}/{kind}/pretrained-0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for _ in range(2):
        step(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    with Silence():
        holdings = portable(collect(state, rank, 2))
    reknit.save(f"{root}/{kind}/from-two", state).result()
    answer = {"holdings": holdings, "two": logits(model), "placements": placements(model)}
    target = parallel(f"{root}/{kind}/pretrained-1")
    fresh = torch.optim.AdamW(target.parameters(), lr=1.0, foreach=False)
    assert not reknit.load(f"{root}/{kind}/from-one", {"model": target, "optimizer": fresh}).missing
    answer["one"] = logits(target)
    answer["loaded"] = portable(collect({"model": target, "optimizer": fresh}, rank, 2))
    return answer


def placements(model: Any) -> dict[str, str]:
    return {n: str(p.placements) for n, p in model.named_parameters() if isinstance(p, DTensor)}


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A checkpoint of one process, one of two ranks, and the values of both models."""
    kind, root = request.param, tmp_path_factory.mktemp("hugging-face")
    for seed in (0, 1):
        one(kind, seed).save_pretrained(root / kind / f"pretrained-{seed}")
    model = one(kind, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        step(model, optimizer)
    folder: Path = root / kind
    reknit.save(folder / "from-one", {"model": model, "optimizer": optimizer}).result()
    answers = run(2, train_and_save, kind, str(root))
    return {"kind": kind, "folder": folder, "model": model, "optimizer": optimizer, "answers": answers}


def test_what_two_ranks_hold_is_a_whole_model(trained: dict[str, Any]) -> None:
    checkpoint = assemble([answer["holdings"] for answer in trained["answers"]])
    shapes = {name: tuple(p.shape) for name, p in trained["model"].named_parameters()}
    for name, shape in shapes.items():
        assert checkpoint.specs["model", name].shape == shape
        assert checkpoint.specs["optimizer", f"state/{name}/exp_avg"].shape == shape
    cut = trained["answers"][0]["placements"]
    assert cut
    if trained["kind"] == "qwen3_moe":
        packed = [name for name, placement in cut.items() if "_StridedShard" in placement]
        assert packed
        for answer in trained["answers"]:
            boxes = [s.box for s in answer["holdings"].shards if s.fqn == packed[0] and s.item == "model"]
            assert len(boxes) == 2, boxes


def test_a_checkpoint_of_two_ranks_gives_the_same_logits_in_one_process(trained: dict[str, Any]) -> None:
    model = one(trained["kind"], 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    folder = trained["folder"] / "from-two"
    assert not reknit.load(folder, {"model": model, "optimizer": optimizer}).missing
    checkpoint = assemble([answer["holdings"] for answer in trained["answers"]])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, checkpoint.tensors["model", name])
        true = checkpoint.tensors["optimizer", f"state/{name}/exp_avg"]
        assert torch.equal(optimizer.state[parameter]["exp_avg"], true)
    for answer in trained["answers"]:
        torch.testing.assert_close(logits(model), answer["two"], rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_one_process_gives_the_same_logits_on_two_ranks(trained: dict[str, Any]) -> None:
    answers = trained["answers"]
    checkpoint = assemble([answer["loaded"] for answer in answers])
    for name, parameter in trained["model"].named_parameters():
        assert torch.equal(parameter, checkpoint.tensors["model", name])
        state = trained["optimizer"].state[parameter]
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(state[key], checkpoint.tensors["optimizer", f"state/{name}/{key}"])
    for answer in answers:
        torch.testing.assert_close(logits(trained["model"]), answer["one"], rtol=1e-5, atol=1e-6)
