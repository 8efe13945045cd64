"""Models of other people: a tied Llama, and LoRA adapters on it, sharded and trained."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reknit
from reknit.frameworks.registry import collect
from tests import ranks
from tests.frameworks.checkpoint import gathered, load, portable
from tests.optional import needs
from tests.torchrun import pieces

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [needs("transformers", "transformers"), needs("peft", "PEFT")]

run = partial(ranks.run, warm="transformers")


def llama(seed: int, *, shard: bool = True) -> Any:
    """Return a Llama with a tied head and LoRA adapters."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    inside: Any = LlamaForCausalLM(config)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = get_peft_model(inside, lora)
    if shard:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for layer in inside.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def save_and_load(folder: str) -> Any:
    rank = dist.get_rank()
    model = llama(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.arange(12).reshape(2, 6) + rank
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer}
    holdings = portable(collect(state, rank, 2))
    checkpoint = gathered(holdings)
    target = llama(1)
    fresh = torch.optim.AdamW([p for p in target.parameters() if p.requires_grad], lr=1.0)
    load({"model": target, "optimizer": fresh}, checkpoint, rank, 2)
    reknit.save(folder, state).result()
    whole, loaded = pieces.wholes(model.state_dict()), pieces.wholes(target.state_dict())
    same = whole.keys() == loaded.keys() and all(torch.equal(whole[name], loaded[name]) for name in whole)
    return holdings, checkpoint, same, whole, fresh.param_groups[0]["lr"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_tied_head_is_stored_once_frozen_parameters_have_no_states_and_adapters_load_alone(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "lora")
    for holdings, checkpoint, same, whole, lr in run(2, save_and_load, folder):
        ((item, head, embedding),) = [(alias.item, alias.fqn, alias.of) for alias in holdings.aliases]
        assert (item, head[-14:], embedding[-19:]) == ("model", "lm_head.weight", "embed_tokens.weight")
        assert not [s for s in holdings.shards if s.fqn == head]
        states = {s.fqn.split("/")[1] for s in holdings.shards if s.item == "optimizer"}
        assert states
        assert all("lora_" in name for name in states)
        assert states < whole.keys() == {fqn for of, fqn in checkpoint.tensors if of == "model"}
        assert all(torch.equal(checkpoint.tensors["model", name], tensor) for name, tensor in whole.items())
        assert (same, lr) == (True, 1e-2)
    model = llama(1, shard=False)
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    report = reknit.load(folder, {"model": model}, options=reknit.LoadOptions(only=("model/*lora_*",)))
    adapters = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(report.restored) == {f"model/{name}" for name in adapters}
    with reknit.open(folder) as saved:
        for name, parameter in model.named_parameters():
            kept = base[name] if name in base else torch.from_numpy(saved.read("model", name))
            assert torch.equal(parameter, kept)
