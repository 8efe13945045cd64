"""What may the tests of each folder cost?

Seconds are an aim, on two cores; processes and servers are limits.  Raise them with the test that needs more.
Each limit has room for the processes that all lanes share: they count for the folder that needs them first.
"""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """The largest costs of the tests of one folder."""

    seconds: int = 0
    processes: int = 0
    servers: tuple[str, ...] = ()


BUDGETS: dict[str, Budget] = {
    ".": Budget(55, 160),
    "accelerator": Budget(30, 30),
    "attacks": Budget(20, 12),
    "benchmarks": Budget(50, 46),
    "cli": Budget(50, 56, ("s3", "gcs", "azure", "hdfs")),
    "comm": Budget(80, 108),
    "compat": Budget(35, 88),
    "dataloader": Budget(40, 78),
    "deepspeed": Budget(120, 66),
    "docs": Budget(90, 82),
    "engine": Budget(105, 188),
    "examples": Budget(40, 40),
    "faults": Budget(190, 740),
    "events": Budget(20, 8),
    "format": Budget(20, 8),
    "frameworks": Budget(80, 400),
    "integrations": Budget(180, 390),
    "interop": Budget(30, 22),
    "jax": Budget(60, 16),
    "megatron": Budget(100, 235),
    "monitor": Budget(60, 40, ("prometheus",)),
    "mutants": Budget(20, 28),
    "planner": Budget(15, 8),
    "processes": Budget(20, 16),
    "prose": Budget(5, 8),
    "running": Budget(20, 16),
    "runs": Budget(60, 156, ("azure", "gcs", "hdfs", "s3")),
    "simulation": Budget(45, 12),
    "storage": Budget(250, 80, ("s3", "gcs", "azure", "hdfs", "rclone")),
    "stores": Budget(60, 20, ("hdfs",)),
    "testing": Budget(20, 45),
    "torchrun": Budget(100, 300, ("s3", "gcs", "azure", "hdfs")),
    "transforms": Budget(35, 13),
    "types": Budget(10, 16),
    "vescale": Budget(20, 38),
    "world": Budget(45, 8),
}
