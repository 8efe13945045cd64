"""One number for everything that a run has become: equal for two runs exactly when all their bits are.

It is computed with torch alone, so that it can vouch for what reknit saved and restored.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict


def fingerprint(model: Any, optimizer: Any, scheduler: Any, batches: Any) -> str:
    """Return a SHA-256 over weights, optimizer, scheduler, loader and all ranks' random generators.

    All ranks call it, and get the same.
    """
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    generators: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(generators, torch.get_rng_state())
    sha = hashlib.sha256()
    for part in (weights, moments, scheduler.state_dict(), batches.state_dict(), generators):
        _add(sha, part)
    return sha.hexdigest()


def _add(sha: Any, value: Any) -> None:
    """Feed a nested value to the hash, with its names and types."""
    if isinstance(value, torch.Tensor):
        sha.update(f"{value.dtype}{list(value.shape)}".encode())
        sha.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for name in sorted(value, key=str):
            sha.update(f"{name}=".encode())
            _add(sha, value[name])
    elif isinstance(value, list | tuple):
        for part in value:
            _add(sha, part)
    else:
        sha.update(json.dumps(value).encode())
