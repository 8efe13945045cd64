"""Which ranks act together in a save or a load, and how do they reach each other?"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.comm.base import SoloGroup
from reknit.frameworks.torch_carrier import TorchCarrier
from reknit.frameworks.torch_job import current_job, subgroup_job
from reknit.options import quiet_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.base import Group
    from reknit.frameworks.torch_job import Job
    from reknit.options import CommOptions

_ALONE = SoloGroup()
_trees: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()


class Ranks(NamedTuple):
    """Those that act together, their torch ranks if they have some, and what carries bytes between them."""

    group: Group
    ranks: Sequence[int] | None
    carrier: Callable[[], TorchCarrier] | None


def acting(group: Any, options: CommOptions) -> Ranks:
    """Return the ranks that act together.

    `group` is a torch process group, a group of reknit's own (`comm.base.Group`), or None for all ranks of
    the job, or for a process that is alone.
    """
    if group is not None and hasattr(group, "exchange"):
        return Ranks(group, None, None)
    job = current_job() if group is None else subgroup_job(group)
    if job is None or job.size == 1:
        return Ranks(_ALONE, None if job is None else job.ranks, None)
    return Ranks(_joined(job, options), job.ranks, partial(TorchCarrier, weakref.ref(job.identity)))


def _joined(job: Job, options: CommOptions) -> Group:
    """Return the tree of a job's ranks, joined once for as long as torch's group lives."""
    group = _trees.get(job.identity)
    if group is None:
        quiet_grpc()
        from reknit.comm.tree import TreeGroup  # gRPC is loaded only when there is someone to talk to

        group = TreeGroup.join(job.store, job.rank, job.size, job="reknit", options=options)
        _trees[job.identity] = group
        weakref.finalize(job.identity, group.close)
    return group
