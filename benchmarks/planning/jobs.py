"""Jobs of many ranks, with the holdings that the framework of each rank would describe."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reknit.types.box import Box, flat_range_boxes
from reknit.types.shard import Shard, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

STATES = (("optimizer", "exp_avg."), ("optimizer", "exp_avg_sq."), ("optimizer", "master."))
"""The item and the prefix of the names of each optimizer state, all in float32."""


class Job(Protocol):
    """The holdings of every rank of a job."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""

    def shards(self, rank: int) -> list[Shard]:
        """Return the shards of a rank, without values."""


@dataclass(frozen=True)
class Fsdp2:
    """`tensors` matrices sharded by rows over all ranks; 4 `states` include those of their optimizer."""

    ranks: int
    tensors: int = 500
    states: int = 4

    def shards(self, rank: int) -> list[Shard]:
        """Return the rows of a rank."""
        box = Box((8 * rank, 0), (8, 4096))
        shape = (8 * self.ranks, 4096)
        kinds = (("model", "", "bfloat16"), *((item, prefix, "float32") for item, prefix in STATES))
        return [
            Shard(
                item,
                f"{prefix}layers.{n // 10}.{n % 10}.weight",
                TensorSpec(shape, dtype),
                box,
                (rank,),
                None,
            )
            for item, prefix, dtype in kinds[: self.states]
            for n in range(self.tensors)
        ]


class _Parameter(NamedTuple):
    """A parameter, and the dimension that tensor parallelism cuts, None for a parameter that is not cut."""

    name: str
    shape: tuple[int, ...]
    axis: int | None


TP, PP = 8, 16


class Model(NamedTuple):
    """The sizes of a transformer; the query and key-value projections are one matrix."""

    layers: int
    hidden: int
    kv: int
    ffn: int
    words: int


LLAMA_405B = Model(layers=126, hidden=16384, kv=2048, ffn=53248, words=128256)
TGPT_70B = Model(layers=80, hidden=8192, kv=2048, ffn=28672, words=128256)
"""The sizes that the paper gives: hidden 8192, 80 layers; the others are those of Llama 3.1 70B."""


def _stage(model: Model, stage: int, stages: int) -> Iterator[_Parameter]:
    """Yield the parameters of a stage: an equal share of the layers, one less where that is not possible."""
    hidden, ffn = model.hidden, model.ffn
    if stage == 0:
        yield _Parameter("embedding.word_embeddings.weight", (model.words, hidden), 0)
    # Two layers less than a multiple: the stages with the embedding and the output have one less.
    short = int(model.layers % stages != 0)
    share = (model.layers + 2 * short) // stages
    low = share * stage - short * (stage > 0)
    for layer in range(low, low + share - short * (stage in (0, stages - 1))):
        prefix = f"decoder.layers.{layer}"
        yield _Parameter(f"{prefix}.self_attention.linear_qkv.layer_norm_weight", (hidden,), None)
        yield _Parameter(f"{prefix}.self_attention.linear_qkv.weight", (hidden + model.kv, hidden), 0)
        yield _Parameter(f"{prefix}.self_attention.linear_proj.weight", (hidden, hidden), 1)
        yield _Parameter(f"{prefix}.mlp.linear_fc1.layer_norm_weight", (hidden,), None)
        yield _Parameter(f"{prefix}.mlp.linear_fc1.weight", (2 * ffn, hidden), 0)
        yield _Parameter(f"{prefix}.mlp.linear_fc2.weight", (hidden, ffn), 1)
    if stage == stages - 1:
        yield _Parameter("decoder.final_layernorm.weight", (hidden,), None)
        yield _Parameter("output_layer.weight", (model.words, hidden), 0)


@dataclass(frozen=True)
class Megatron:
    """A transformer with tensor and pipeline parallelism, and a distributed optimizer over `dp` ranks.

    Ranks count tensor parallelism first, then data, then pipeline.  The parameters of a stage lie end to end
    in one buffer.  Each data-parallel rank has the optimizer's state for an equal part of it: flat ranges of
    parameters, each up to 2 * ndim - 1 boxes.
    """

    dp: int
    tp: int = TP
    pp: int = PP
    model: Model = LLAMA_405B

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @cached_property
    def _stages(self) -> list[list[_Parameter]]:
        return [list(_stage(self.model, stage, self.pp)) for stage in range(self.pp)]

    def shards(self, rank: int) -> list[Shard]:
        """Return the parameters of a rank's stage, which data-parallel ranks share, and its own states."""
        tp, stage = rank % self.tp, rank // (self.tp * self.dp)
        base = self.tp * self.dp * stage
        mine, all_tp = _replicas(base, tp, self.dp, self.tp)
        row = tuple(range(rank - tp, rank - tp + self.tp))
        shards, pieces = [], []
        parameters = self._stages[stage]
        boxes = [_local(parameter, tp, self.tp) for parameter in parameters]
        total = sum(box.numel for box in boxes)
        turn = rank // self.tp % self.dp
        low, high = total * turn // self.dp, total * (turn + 1) // self.dp
        at = 0
        for parameter, box in zip(parameters, boxes, strict=True):
            whole = parameter.axis is None
            spec = TensorSpec(parameter.shape, "bfloat16")
            shards.append(Shard("model", parameter.name, spec, box, all_tp if whole else mine, None))
            first, end = max(low - at, 0), min(high - at, box.numel)
            if first < end:
                for piece in flat_range_boxes(box.lengths, first, end - first):
                    pieces.append((parameter, piece.shifted(box.offsets), row if whole else (rank,)))
            at += box.numel
        for item, prefix in STATES:
            shards += [
                Shard(item, prefix + p.name, TensorSpec(p.shape, "float32"), piece, replicas, None)
                for p, piece, replicas in pieces
            ]
        return shards


@lru_cache
def _replicas(base: int, tp: int, dp: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the replicas of a tensor-parallel rank of a stage, and all ranks of the stage."""
    return tuple(range(base + tp, base + width * dp, width)), tuple(range(base, base + width * dp))


@cache
def _local(parameter: _Parameter, tp: int, width: int) -> Box:
    """Return the box of a parameter of one of `width` tensor-parallel ranks."""
    if parameter.axis is None:
        return Box.whole(parameter.shape)
    part = parameter.shape[parameter.axis] // width
    offsets = tuple(part * tp if d == parameter.axis else 0 for d in range(len(parameter.shape)))
    lengths = tuple(part if d == parameter.axis else n for d, n in enumerate(parameter.shape))
    return Box(offsets, lengths)
