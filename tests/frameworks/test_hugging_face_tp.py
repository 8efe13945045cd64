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
from tests.optional import needs
from tests.running.examples import is_night

if TYPE_CHECKING:
    from pathlib import Path

run = partial(ranks.run, warm="trainers")

pytestmark = needs("transformers", "transformers")

KINDS = ["qwen3", "qwen3_moe"] if is_night() else ["qwen3_moe"]
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


def trained_alone(kind: str, root: Path) -> tuple[Any, Any]:
    """Train a model in one process, save it, and put the weights there from which two ranks begin."""
    for seed in (0, 1):
        one(kind, seed).save_pretrained(root / kind / f"pretrained-{seed}")
    model = one(kind, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        step(model, optimizer)
    reknit.save(root / kind / "from-one", {"model": model, "optimizer": optimizer}).result()
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_hold_a_whole_model_and_logits_are_the_same_in_one_process_and_back(
    kind: str, tmp_path: Path
) -> None:
    model, optimizer = trained_alone(kind, tmp_path)
    answers = run(2, train_and_save, kind, str(tmp_path))
    assert answers[0]["placements"]
    if kind == "qwen3_moe":
        packed = next(n for n, placement in answers[0]["placements"].items() if "_StridedShard" in placement)
        for answer in answers:
            boxes = [s.box for s in answer["holdings"].shards if s.fqn == packed and s.item == "model"]
            assert len(boxes) == 2, boxes
    alone = one(kind, 3)
    fresh = torch.optim.AdamW(alone.parameters(), lr=1.0)
    assert not reknit.load(tmp_path / kind / "from-two", {"model": alone, "optimizer": fresh}).missing
    for whole, by, held, seen in ((alone, fresh, "holdings", "two"), (model, optimizer, "loaded", "one")):
        checkpoint = assemble([answer[held] for answer in answers])
        for name, parameter in whole.named_parameters():
            assert torch.equal(parameter, checkpoint.tensors["model", name])
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(
                    by.state[parameter][key], checkpoint.tensors["optimizer", f"state/{name}/{key}"]
                )
        for answer in answers:
            torch.testing.assert_close(logits(whole), answer[seen], rtol=1e-5, atol=1e-6)
