"""Who are the ranks of a torch job, and where can they meet before they know each other?"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from reknit.errors import CommError, DeadlineError, UsageError
from reknit.frameworks import torch_private

if TYPE_CHECKING:
    from collections.abc import Sequence

_PREFIX = "reknit"


class TorchStore:
    """The key-value store by which torch's ranks found each other, under a prefix that nobody else uses."""

    def __init__(self, store: Any, prefix: str) -> None:
        import torch.distributed as dist

        self._store: Any = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

    def set(self, key: str, value: bytes) -> None:
        """Put `value` under `key`, over what was there.  Raises `CommError` when the store is gone."""
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise _lost(key, error) from error

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of `key`, waiting up to `timeout_s` for it.

        Raises `DeadlineError` when none came, `CommError` when the store is gone.
        """
        try:
            self._store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
            return bytes(self._store.get(key))
        except RuntimeError as error:
            # torch has no type for "waited too long" that all its stores raise; they all say it in words.
            if "timeout" not in str(error).lower():
                raise _lost(key, error) from error
            raise DeadlineError(
                f"no rank put {key!r} into torch's store within {timeout_s:g} s",
                remedy="check that all ranks make the same call",
            ) from error


def _lost(key: str, error: RuntimeError) -> CommError:
    return CommError(
        f"torch's store cannot be reached for {key!r}: {error}",
        remedy="the process that hosts the store (usually rank 0) has probably ended",
    )


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks that save and load together.

    `rank` and `size` count inside the job or subgroup, `ranks` are the job-wide numbers of its ranks.
    `identity` is the same object as long as it is the same group, for those who keep something per group.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    store: TorchStore
    identity: Any


def current_job() -> Job | None:
    """Return the job of torch's default process group, or None where there is none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    ranks = tuple(range(dist.get_world_size()))
    store = TorchStore(torch_private.default_store(), f"{_PREFIX}/all")
    return Job(dist.get_rank(), len(ranks), ranks, store, dist.group.WORLD)


def subgroup_job(group: Any) -> Job:
    """Return the job of some of torch's ranks, those of a process group.

    Raises `UsageError` on a rank that is not in the group.
    """
    import torch.distributed as dist

    rank = dist.get_rank(group)
    if rank < 0:
        raise UsageError(
            "this rank is not in the process group", remedy="call save and load on the group's ranks only"
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    store = TorchStore(torch_private.default_store(), f"{_PREFIX}/{_group_key(group, ranks)}")
    return Job(rank, len(ranks), ranks, store, group)


def _group_key(group: Any, ranks: Sequence[int]) -> str:
    """Return a name that a group's ranks agree on, and no other group has, not even one of the same ranks."""
    listed = ",".join(map(str, ranks))
    return hashlib.sha256(f"{torch_private.group_name(group)}:{listed}".encode()).hexdigest()[:32]
