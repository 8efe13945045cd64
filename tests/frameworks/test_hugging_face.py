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
from reknit.frameworks.registry import collect, wanted
from reknit.types.shard import Alias
from tests import ranks
from tests.frameworks.checkpoint import fill, gathered, portable
from tests.optional import needs
from tests.torchrun import pieces

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [needs("transformers", "transformers"), needs("peft", "PEFT")]

run = partial(ranks.run, warm="transformers")


def llama(seed: int, lora: bool, *, shard: bool = True) -> Any:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    layers = model.model.layers
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
    if not shard:
        return model
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def save_and_load(lora: bool) -> Any:
    rank = dist.get_rank()
    model = llama(0, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.arange(12).reshape(2, 6) + rank
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    holdings = portable(collect({"model": model, "optimizer": optimizer}, rank, 2))
    checkpoint = gathered(holdings)
    target = llama(1, lora)
    fresh = torch.optim.AdamW([p for p in target.parameters() if p.requires_grad], lr=1.0)
    want = wanted({"model": target, "optimizer": fresh}, checkpoint.catalog(), rank, 2)
    assert want.missing == want.mismatched == ()
    fill(want, checkpoint)
    whole, loaded = pieces.wholes(model.state_dict()), pieces.wholes(target.state_dict())
    same = whole.keys() == loaded.keys() and all(torch.equal(whole[name], loaded[name]) for name in whole)
    return holdings, checkpoint, same, whole, fresh.param_groups[0]["lr"]


def test_a_tied_llama_stores_its_head_once() -> None:
    for holdings, checkpoint, same, whole, lr in run(2, save_and_load, False):
        assert holdings.aliases == (Alias("model", "lm_head.weight", "model.embed_tokens.weight"),)
        assert not [s for s in holdings.shards if s.fqn == "lm_head.weight"]
        assert {fqn for item, fqn in checkpoint.tensors if item == "model"} == whole.keys()
        assert all(torch.equal(checkpoint.tensors["model", name], tensor) for name, tensor in whole.items())
        assert ("optimizer", "state/model.embed_tokens.weight/exp_avg") in checkpoint.tensors
        assert (same, lr) == (True, 1e-2)


def test_frozen_parameters_under_lora_are_saved_without_optimizer_state() -> None:
    for holdings, checkpoint, same, whole, _ in run(2, save_and_load, True):
        states = {s.fqn.split("/")[1] for s in holdings.shards if s.item == "optimizer"}
        assert states
        assert all("lora_" in name for name in states)
        assert states < whole.keys()
        assert {fqn for item, fqn in checkpoint.tensors if item == "model"} == whole.keys()
        assert same


def save_adapters(folder: str) -> None:
    model = llama(0, lora=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.arange(12).reshape(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    reknit.save(folder, {"model": model, "optimizer": optimizer}).result()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_alone_load_onto_another_base_model(tmp_path: Path) -> None:
    folder = str(tmp_path / "lora")
    run(2, save_adapters, folder)
    model = llama(1, lora=True, shard=False)
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    options = reknit.LoadOptions(only=("model/*lora_*",))
    report = reknit.load(folder, {"model": model}, options=options)
    adapters = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(report.restored) == {f"model/{name}" for name in adapters}
    saved = reknit.open(folder)
    for name, parameter in model.named_parameters():
        if name in adapters:
            assert torch.equal(parameter, torch.from_numpy(saved.read("model", name)))
        else:
            assert torch.equal(parameter, base[name])
