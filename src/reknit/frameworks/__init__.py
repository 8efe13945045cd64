"""The objects of training frameworks as shards and blobs, and how a checkpoint fills them."""

from __future__ import annotations

import sys
from typing import Any

from msgspec import Struct


class TrainingJob(Struct, frozen=True):
    """The ranks that save and load together, of torch or of JAX.

    `rank` and `size` count inside the job or subgroup, `ranks` are the job-wide numbers of its ranks.
    `store` is a `comm.meeting.rendezvous.Store`.  `identity` is one object for the lifetime of a group, as a
    key for data that is kept per group.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    store: Any
    identity: Any


def imported(module: str, name: str) -> Any:
    """Return a class of a module that is already imported; otherwise ``()``, which has no instances."""
    return getattr(sys.modules.get(module), name, ())
