"""A small GPT of real Megatron-Core in any layout, which is built and trained for two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.megatron.layouts import WORDS, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH = 8


@dataclass
class Trained:
    """A model and its optimizer."""

    layout: Layout
    config: Any
    chunks: list[Any]
    optimizer: Any

    def state(self) -> dict[str, Any]:
        """Return the state that is saved and loaded."""
        return {"model": self.chunks, "optimizer": self.optimizer}


def _end_groups() -> None:
    """End all groups but that of all ranks, whose threads would spin once another rank drops its groups."""
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    dist.barrier()


def start(layout: Layout) -> None:
    """Replace the groups of the process by those of a layout."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        _end_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        num_distributed_optimizer_instances=layout.instances,
        create_gloo_process_groups=True,
    )


def build(layout: Layout, *, steps: int = 2, seed: int = 0) -> Trained:
    """Build and train a model of a layout."""
    start(layout)
    torch.manual_seed(seed + 10)
    model_parallel_cuda_manual_seed(123 + seed)
    config = _config(layout)
    spec = get_gpt_layer_local_spec(num_experts=layout.experts)
    bare = [_chunk(layout, config, spec, number) for number in range(layout.vp or 1)]
    inner = [Float16Module(config, chunk) if layout.bf16 else chunk for chunk in bare]
    for chunk in inner if layout.mixed else ():
        for name, parameter in chunk.named_parameters():
            if "input_layernorm" in name or "final_layernorm" in name:
                parameter.data = parameter.data.float()
    how = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed,
        overlap_grad_reduce=layout.overlap,
        bucket_size=layout.bucket,
        num_distributed_optimizer_instances=layout.instances,
    )
    chunks = [DistributedDataParallel(config, how, chunk) for chunk in inner]
    for chunk in chunks:
        chunk.broadcast_params()
    trained = Trained(layout, config, chunks, _optimizer(layout, chunks))
    train(trained, steps)
    return trained


def _config(layout: Layout) -> TransformerConfig:
    dtype = torch.bfloat16 if layout.bf16 else torch.float32
    moe: dict[str, Any] = {}
    if layout.experts:
        moe = {
            "num_moe_experts": layout.experts,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "allgather" if (layout.etp or 1) > 1 else "alltoall",
            "moe_ffn_hidden_size": layout.ffn,
            "moe_router_load_balancing_type": "none",
        }
    return TransformerConfig(
        num_layers=layout.layers,
        hidden_size=layout.hidden,
        num_attention_heads=4,
        num_query_groups=layout.kv,
        ffn_hidden_size=layout.ffn,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=layout.bf16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        gated_linear_unit=layout.swiglu,
        activation_func=F.silu if layout.swiglu else F.gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        add_bias_linear=not layout.experts,
        **moe,
    )


def _chunk(layout: Layout, config: TransformerConfig, spec: Any, number: int) -> GPTModel:
    stage = {"vp_stage": number} if layout.vp else {}
    where = {"ignore_virtual": False, **stage} if layout.vp else {}
    chunk = GPTModel(
        config,
        spec,
        vocab_size=layout.words,
        max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=layout.tied,
        parallel_output=True,
        position_embedding_type="rope",
        **stage,
    )
    # Attention without TransformerEngine lacks context parallelism, so its ranks compute the same here.
    chunk.rotary_pos_emb.cp_group = None
    return chunk


def _optimizer(layout: Layout, chunks: list[Any]) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.01,
        use_distributed_optimizer=layout.distributed,
        bf16=layout.bf16,
        params_dtype=torch.bfloat16 if layout.bf16 else torch.float32,
        clip_grad=1.0,
    )
    return get_megatron_optimizer(config, chunks)


def batch(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randint(0, WORDS, (2, LENGTH), generator=generator)


def train(trained: Trained, steps: int, first: int = 0, micro: int = 4) -> list[float]:
    """Train on the same data in any layout, `micro` batches a step in all, and return the losses."""
    layout, chunks = trained.layout, trained.chunks
    size = layout.world // (layout.tp * layout.pp * layout.cp)
    rank = parallel_state.get_data_parallel_rank()
    trained.config.finalize_model_grads_func = finalize_model_grads
    trained.config.grad_scale_func = trained.optimizer.scale_loss
    losses = []
    for step in range(first, first + steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        trained.optimizer.zero_grad()
        mine = [step * micro + n for n in range(micro) if n % size == rank]
        data = [iter([batch(number) for number in mine]) for _ in chunks]
        parts = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=data if len(chunks) > 1 else data[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(mine),
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        done, _, _ = trained.optimizer.step()
        assert done
        losses.append(_mean([float(part["loss"]) for part in parts]))
    return losses


def _forward(data: Iterator[torch.Tensor], model: Any) -> Any:
    words = next(data)
    positions = torch.arange(LENGTH)[None].expand_as(words)
    mask = torch.tril(torch.ones(1, 1, LENGTH, LENGTH)) < 0.5
    out = model(words, positions, mask, labels=words)
    return out, lambda o: (o.float().mean(), {"loss": o.detach().float().mean()})


def _mean(losses: list[float]) -> float:
    """Return the mean over all ranks that have a loss."""
    both = torch.tensor([sum(losses), float(len(losses))], dtype=torch.float64)
    dist.all_reduce(both)
    return float(both[0] / both[1])
