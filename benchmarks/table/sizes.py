"""The sizes of the states that the table measures, and the number of rounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Sizes of one run; `gib` is the state of all ranks together, but of each rank in `first_gib`."""

    gib: float = 2.0
    first_gib: float = 1.0
    tensors: int = 20_000
    dtensors: int = 15_000
    small_mb: int = 10
    warm_mb: int = 100
    lora_gib: float = 1.0
    dp: tuple[int, ...] = (70, 782)
    """Data-parallel sizes of the jobs of the root: 128 ranks for each."""
    beside: int = 500
    """Tensors of a job that is small enough for torch DCP's plan."""
    repeat: int = 7
    processes: int = 5
    """Rounds in which every contestant has new processes."""
    later: int = 4
    """Saves after the first."""
    digest_mib: int = 512
    formats_mib: int = 512
    import_mib: int = 4096
    events: int = 500_000
    sink_saves: int = 300
    loader_mib: int = 256
    """MiB of token buffers of each worker."""
    loader_files: int = 512
    steps: int = 50
    """Steps of a training without a save."""
    slow_s: float = 1.0
    """Seconds that a slow store takes for each file."""


DEFAULT = Sizes()
QUICK = Sizes(0.25, 0.125, 4_000, 2_000, 10, 50, 0.125, (8,), 500, 3, 2, 2, 64, 64, 256, 50_000, 30, 16, 64)
TINY = Sizes(0.005, 0.005, 50, 20, 1, 1, 0.005, (1,), 5, 1, 1, 1, 1, 1, 1, 100, 3, 1, 4, 2, 0.01)
