"""A language model over bytes: a small Llama with the names and the arithmetic of Hugging Face's.

Because names and arithmetic are the same, exported weights load into `transformers` unchanged.  `shard`
spreads the model over a mesh of devices: all of it along `dp` (FSDP2) and, where the mesh has more than one
rank along `tp`, the matrices along that as well (tensor parallelism).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Config:
    """Sizes of the model, by the names that Hugging Face gives them."""

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 160
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    rms_norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def hugging_face(self) -> dict[str, Any]:
        """Return the content of a `config.json` for these weights."""
        names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        heads = {"num_key_value_heads": self.num_attention_heads, "head_dim": self.head_dim}
        return {**names, **asdict(self), **heads, "tie_word_embeddings": False, "dtype": "float32"}


class Norm(nn.Module):
    """Division by the root mean square, then a learned scale."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over [batch, position, width], with as many heads as this rank has."""
        q, k, v = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q), rotate(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        num_rows, num_positions, _ = x.shape
        return x.view(num_rows, num_positions, -1, self.head_dim).transpose(1, 2)


def rotate(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Turn each pair of features of [batch, head, position, feature] by an angle that grows with position."""
    num_positions, width = x.shape[-2:]
    frequencies = 1.0 / base ** (torch.arange(0, width, 2) / width)
    angles = torch.arange(num_positions)[:, None] * frequencies
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class FeedForward(nn.Module):
    """The gated network of a layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position by itself."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and a feed-forward network, each added to what came in, with dropout in training."""

    def __init__(self, config: Config, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = Norm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform [batch, position, width]."""
        x = x + self.dropout(self.self_attn(self.input_layernorm(x)))
        out: Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return out


class Body(nn.Module):
    """Everything below the output head."""

    def __init__(self, config: Config, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, dropout) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config)

    def forward(self, ids: Tensor) -> Tensor:
        """Map bytes to features."""
        x: Tensor = self.embed_tokens(ids)
        for layer in [*self.layers, self.norm]:
            x = layer(x)
        return x


class TinyLlama(nn.Module):
    """The whole model: bytes [batch, position] to logits [batch, position, 256]."""

    def __init__(self, config: Config, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = Body(config, dropout)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        """Predict the next byte at every position."""
        logits: Tensor = self.lm_head(self.model(ids))
        return logits


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per byte, of each next byte of `rows`."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def shard(model: TinyLlama, mesh: DeviceMesh) -> TinyLlama:
    """Spread the model over `mesh`, which has the dimensions `dp` and `tp`; in place."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if mesh["tp"].size() > 1:
        plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        plan = {f"model.layers.*.{name}": style for name, style in plan.items()}
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model
