"""The ranks of a torch job, and the key-value store through which they connect."""

from __future__ import annotations

import hashlib
import sys
import time
from typing import TYPE_CHECKING, Any

from reknit.errors import CommError, DeadlineError, UsageError
from reknit.frameworks.torch import torch_private
from reknit.frameworks.training_job import TrainingJob

if TYPE_CHECKING:
    from collections.abc import Sequence


_PREFIX = "reknit"
_BATCH = 512
_FIRST_PAUSE_S = 0.005
_LAST_PAUSE_S = 0.5


class TorchStore:
    """The key-value store of torch's ranks, under a prefix of reknit."""

    is_open = True

    def __init__(self, store: Any, prefix: str) -> None:
        import torch.distributed as dist

        self._store: Any = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

    def set(self, key: str, value: bytes) -> None:
        """Put `value` under `key`, and replace an earlier one.  Raises `CommError` if the store is gone."""
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise _lost(key, error) from error

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of `key`, waiting up to `timeout_s` for it.

        Raises `DeadlineError` if no value came, and `CommError` if the store is gone.
        """
        return self.get_many([key], timeout_s)[0]

    def get_many(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Return the values of `keys`, many per call if the store can; waits and raises as `get` does."""
        # torch's server takes time that grows with the square of the keys in a call, beyond a few hundred.
        batches = [list(keys[first : first + _BATCH]) for first in range(0, len(keys), _BATCH)]
        values: list[bytes] = []
        for batch in batches:
            timeout_s -= self._wait(batch, timeout_s)
            try:
                if self._store.has_extended_api():
                    values += map(bytes, self._store.multi_get(batch))
                else:
                    values += [bytes(self._store.get(key)) for key in batch]
            except RuntimeError as error:
                raise _lost(batch[0], error) from error
        return values

    @property
    def master(self) -> str | None:
        """The host of the process that holds the values, None for a store without one."""
        store = self._store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return getattr(store, "host", None)

    def _wait(self, keys: list[str], timeout_s: float) -> float:
        """Wait until all keys have values; return the seconds that this took.

        The store is polled, since torch's own `wait` writes warnings into the log of a rank each time that it
        ends in vain.
        """
        waited_s, pause_s = 0.0, _FIRST_PAUSE_S
        try:
            while not self._store.check(keys):
                if waited_s >= timeout_s:
                    raise DeadlineError(
                        f"no rank put {_first(keys)} into torch's store within {timeout_s:g} s",
                        remedy="check that all ranks make the same call",
                    )
                nap_s = min(pause_s, timeout_s - waited_s)
                time.sleep(nap_s)
                waited_s, pause_s = waited_s + nap_s, min(_LAST_PAUSE_S, pause_s * 1.5)
        except RuntimeError as error:
            raise _lost(keys[0], error) from error
        return waited_s


def _first(keys: Sequence[str]) -> str:
    return repr(keys[0]) if len(keys) == 1 else f"all of {len(keys)} keys like {keys[0]!r}"


def _lost(key: str, error: RuntimeError) -> CommError:
    return CommError(
        f"torch's store cannot be reached for {key!r}: {error}",
        remedy="the process that hosts the store (usually rank 0) has probably ended",
    )


def current_job() -> TrainingJob | None:
    """Return the job of torch's default process group, or None without such a group."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    ranks = tuple(range(dist.get_world_size()))
    store = TorchStore(torch_private.default_store(), f"{_PREFIX}/all")
    return TrainingJob(dist.get_rank(), len(ranks), ranks, store, dist.group.WORLD)


def subgroup_job(group: Any) -> TrainingJob:
    """Return the job of some of torch's ranks, those of a process group.

    Raises `UsageError` on a rank that is not in the group.
    """
    import torch.distributed as dist

    known = group is dist.GroupMember.NON_GROUP_MEMBER or isinstance(group, dist.ProcessGroup)
    if not known:
        raise UsageError(
            f"group is a process group of torch or a group of reknit.connect, not a {type(group).__name__}",
            remedy="of a DeviceMesh, pass mesh.get_group()",
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise UsageError(
            "this rank is not in the process group", remedy="call save and load on the group's ranks only"
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    store = TorchStore(torch_private.default_store(), f"{_PREFIX}/{_group_key(group, ranks)}")
    return TrainingJob(rank, len(ranks), ranks, store, group)


def _group_key(group: Any, ranks: Sequence[int]) -> str:
    """Return a name on which a group's ranks agree, and which no other group has, even of the same ranks."""
    listed = ",".join(map(str, ranks))
    return hashlib.sha256(f"{torch_private.group_name(group)}:{listed}".encode()).hexdigest()[:32]
