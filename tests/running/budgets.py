"""What may the tests of each folder cost?

Seconds are an aim, on two cores; processes and servers are limits.  Raise them with the test that needs more.
"""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """The largest costs of the tests of one folder."""

    seconds: int = 0
    processes: int = 0
    servers: tuple[str, ...] = ()


BUDGETS: dict[str, Budget] = {
    ".": Budget(50, 130),
    "attacks": Budget(20, 4),
    "benchmarks": Budget(50, 30),
    "cli": Budget(50, 32, ("s3", "gcs", "azure", "hdfs")),
    "comm": Budget(80, 100),
    "compat": Budget(35, 80),
    "dataloader": Budget(40, 64),
    "deepspeed": Budget(110, 46),
    "docs": Budget(140, 66),
    "engine": Budget(100, 104),
    "examples": Budget(60, 57),
    "faults": Budget(190, 720),
    "format": Budget(20),
    "frameworks": Budget(80, 320),
    "integrations": Budget(180, 380),
    "interop": Budget(30, 14),
    "jax": Budget(75, 8),
    "megatron": Budget(90, 178),
    "monitor": Budget(60, 32, ("clickhouse", "prometheus")),
    "mutants": Budget(20, 20),
    "planner": Budget(15),
    "processes": Budget(20, 8),
    "prose": Budget(5),
    "running": Budget(20, 8),
    "runs": Budget(50, 80, ("azure", "gcs", "hdfs", "s3")),
    "simulation": Budget(45, 4),
    "storage": Budget(250, 46, ("s3", "gcs", "azure", "hdfs", "rclone")),
    "testing": Budget(60, 60),
    "torchrun": Budget(140, 354, ("s3", "gcs", "azure", "hdfs")),
    "transforms": Budget(35, 5),
    "types": Budget(10, 8),
    "vescale": Budget(20, 30),
    "world": Budget(45),
}
