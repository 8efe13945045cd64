"""torchtitan's debug model and its own trainer, on the CPU with gloo.

torchtitan is made for accelerators: it chooses one when it is imported, reads its memory, and sums gradients
in a way that gloo lacks.  `on_cpu` prepares torch for that, before the first import of torchtitan.
"""

from __future__ import annotations

import runpy
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY, LENGTH, LAYERS = 2048, 16, 2


def on_cpu() -> None:
    """Let torchtitan take the CPU for an accelerator."""
    accelerator: dict[str, Any] = {
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=2**34),
        "memory_stats": lambda device=None: defaultdict(int),
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    for name, function in accelerator.items():
        setattr(torch.cpu, name, function)
    vars(torch._utils)["_get_available_device_type"] = lambda: "cpu"
    import torchtitan.distributed.utils

    torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None


class Numbers(IterableDataset[Any]):
    """Random tokens that depend on the data-parallel rank and the position."""

    def __init__(self, rank: int) -> None:
        self._rank, self._at = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self._at += 1
            generator = torch.Generator().manual_seed(1000 * self._at + self._rank)
            tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
            yield {"input": tokens[:-1], "positions": torch.arange(LENGTH)}, tokens[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]


@cache
def parts() -> tuple[Any, Any]:
    """Return the configs of a tokenizer and a data loader that need no files."""
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokenizer(BaseTokenizer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    class Loader(ParallelAwareDataloader):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
            pass

        def __init__(
            self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
        ) -> None:
            super().__init__(
                Numbers(dp_rank),
                dp_rank,
                dp_world_size,
                batch_size=local_batch_size,
                snapshot_every_n_steps=1,
            )

    return Tokenizer.Config(), Loader.Config()


def config_of(folder: str, steps: int, parallel: dict[str, Any], checkpoint: dict[str, Any]) -> Any:
    """Return the config of the example, small enough for the CPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    path = Path(__file__).parents[2] / "examples" / "trainers" / "titan.py"
    example: Any = SimpleNamespace(**runpy.run_path(str(path)))
    config = example.config_of(folder, steps)
    config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer, config.dataloader = parts()
    config.training.seq_len, config.training.local_batch_size = LENGTH, 2
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.lr_scheduler.total_steps = 10
    config.optimizer.implementation = "for-loop"
    config.validator.enable = False
    config.metrics.log_freq = 10**9
    config.debug.seed = 1
    config.parallelism.spmd_backend = "partial_dtensor"  # the default needs a newer torch than 2.13
    for name, value in parallel.items():
        setattr(config.parallelism, name, value)
    for name, value in checkpoint.items():
        setattr(config.checkpoint, name, value)
    config.checkpoint.__post_init__()
    return config


def trainer_of(folder: str, steps: int, parallel: dict[str, Any] | None = None, **checkpoint: Any) -> Any:
    """Return a trainer of torchtitan for this rank."""
    from torch.distributed.fsdp import FSDPModule

    trainer = config_of(folder, steps, parallel or {}, checkpoint).build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return trainer
