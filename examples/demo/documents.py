"""Documents to read: sources of Python's standard library, as rows of bytes of very different lengths."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

from reknit.dataloader import TokenSet


def documents(pattern: str, num_samples: int, longest: int) -> list[np.ndarray]:
    """Return the first bytes of the first files that match, in the order of their names."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob(pattern))[:num_samples]
    return [np.frombuffer(path.read_bytes()[:longest], np.uint8) for path in paths]


def token_sets() -> list[TokenSet]:
    """Return what the demo reads: modules, and half as much of packages, each cut into eight sources."""
    sizes = {"num_samples": 96, "longest": 6000}
    return [
        TokenSet(
            name=name, open=documents, arguments={"pattern": pattern, **sizes}, ratio=ratio, num_partitions=8
        )
        for name, pattern, ratio in (("modules", "*.py", 2.0), ("packages", "[a-j]*/*.py", 1.0))
    ]
