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
HIDDEN, FFN, VOCABULARY = 16384, 53248, 128256


def _stage(stage: int) -> Iterator[_Parameter]:
    """Yield the parameters of a stage of Llama 3.1 405B: 8 layers, or 7 with the embedding or the output."""
    if stage == 0:
        yield _Parameter("embedding.word_embeddings.weight", (VOCABULARY, HIDDEN), 0)
    ends = (0, PP - 1)
    low = 8 * stage - (stage > 0)
    for layer in range(low, low + (7 if stage in ends else 8)):
        prefix = f"decoder.layers.{layer}"
        yield _Parameter(f"{prefix}.self_attention.linear_qkv.layer_norm_weight", (HIDDEN,), None)
        yield _Parameter(f"{prefix}.self_attention.linear_qkv.weight", (HIDDEN + 2048, HIDDEN), 0)
        yield _Parameter(f"{prefix}.self_attention.linear_proj.weight", (HIDDEN, HIDDEN), 1)
        yield _Parameter(f"{prefix}.mlp.linear_fc1.layer_norm_weight", (HIDDEN,), None)
        yield _Parameter(f"{prefix}.mlp.linear_fc1.weight", (2 * FFN, HIDDEN), 0)
        yield _Parameter(f"{prefix}.mlp.linear_fc2.weight", (HIDDEN, FFN), 1)
    if stage == PP - 1:
        yield _Parameter("decoder.final_layernorm.weight", (HIDDEN,), None)
        yield _Parameter("output_layer.weight", (VOCABULARY, HIDDEN), 0)


@dataclass(frozen=True)
class Megatron:
    """405B parameters with TP 8, PP 16 and a distributed optimizer over `dp` ranks.

    Ranks count tensor parallelism first, then data, then pipeline.  The parameters of a stage lie end to end
    in one buffer.  Each data-parallel rank has the optimizer's state for an equal part of it: flat ranges of
    parameters, each up to 2 * ndim - 1 boxes.
    """

    dp: int

    @property
    def ranks(self) -> int:
        return TP * PP * self.dp

    @cached_property
    def _stages(self) -> list[list[_Parameter]]:
        return [list(_stage(stage)) for stage in range(PP)]

    def shards(self, rank: int) -> list[Shard]:
        """Return the parameters of a rank's stage, which data-parallel ranks share, and its own states."""
        tp, stage = rank % TP, rank // (TP * self.dp)
        base = TP * self.dp * stage
        mine, all_tp = _replicas(base, tp, self.dp)
        row = tuple(range(rank - tp, rank - tp + TP))
        shards, pieces = [], []
        parameters = self._stages[stage]
        boxes = [_local(parameter, tp) for parameter in parameters]
        total = sum(box.numel for box in boxes)
        turn = rank // TP % self.dp
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
def _replicas(base: int, tp: int, dp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the replicas of a tensor-parallel rank of a stage, and all ranks of the stage."""
    return tuple(range(base + tp, base + TP * dp, TP)), tuple(range(base, base + TP * dp))


@cache
def _local(parameter: _Parameter, tp: int) -> Box:
    """Return a tensor-parallel rank's box of a parameter."""
    if parameter.axis is None:
        return Box.whole(parameter.shape)
    part = parameter.shape[parameter.axis] // TP
    offsets = tuple(part * tp if d == parameter.axis else 0 for d in range(len(parameter.shape)))
    lengths = tuple(part if d == parameter.axis else n for d, n in enumerate(parameter.shape))
    return Box(offsets, lengths)
