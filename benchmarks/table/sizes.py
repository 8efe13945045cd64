"""The sizes of the states that the table measures, and the number of rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sizes:
    """Sizes of one run; `gib` is the state of all ranks together, but of each rank in `first_gib`."""

    gib: float = 2.0
    first_gib: float = 1.0
    tensors: int = 20_000
    dtensors: int = 15_000
    small_tensors: int = 1_600
    """Tensors of a model of FSDP2 that is loaded again and again."""
    small_mb: int = 10
    warm_mb: int = 100
    warm_gib: float = 1.0
    lora_gib: float = 1.0
    jax_mb: int = 200
    leaves: int = 1_500
    dp: tuple[int, ...] = (70,)
    """Data-parallel sizes of the jobs of the root: 128 ranks for each."""
    beside: int = 500
    """Tensors of a job that is small enough for torch DCP's plan."""
    repeat: int = 10
    processes: int = 3
    """Rounds in which every contestant has new processes."""
    later: int = 2
    """Saves after the first."""
    digest_mib: int = 512
    formats_mib: int = 512
    import_mib: int = 2048
    events: int = 200_000
    sink_saves: int = 200
    loader_mib: int = 128
    """MiB of token buffers of each worker."""
    loader_files: int = 512
    steps: int = 50
    """Steps of a training without a save."""
    slow_s: float = 1.0
    """Seconds that a slow store takes for each file."""

    def with_rounds(self, rounds: int | None) -> Sizes:
        """Return these sizes with so many rounds, if given."""
        return self if rounds is None else replace(self, repeat=rounds, processes=rounds)


DEFAULT = Sizes()
QUICK = Sizes(
    gib=0.25,
    first_gib=0.125,
    tensors=4_000,
    dtensors=2_000,
    small_tensors=400,
    warm_mb=50,
    warm_gib=0.125,
    lora_gib=0.125,
    jax_mb=20,
    leaves=200,
    dp=(8,),
    repeat=3,
    processes=2,
    digest_mib=64,
    formats_mib=64,
    import_mib=256,
    events=50_000,
    sink_saves=30,
    loader_mib=16,
    loader_files=64,
)
TINY = Sizes(
    gib=0.005,
    first_gib=0.005,
    tensors=50,
    dtensors=20,
    small_tensors=20,
    small_mb=1,
    warm_mb=1,
    warm_gib=0.005,
    lora_gib=0.005,
    jax_mb=4,
    leaves=20,
    dp=(1,),
    beside=5,
    repeat=1,
    processes=1,
    later=1,
    digest_mib=1,
    formats_mib=1,
    import_mib=1,
    events=100,
    sink_saves=3,
    loader_mib=1,
    loader_files=4,
    steps=2,
    slow_s=0.01,
)
