"""Where does a reader stand among the ranks of a job?"""

from __future__ import annotations

import logging
import sys
from typing import Any, NamedTuple

from reknit.environment import launch
from reknit.errors import UsageError

logger = logging.getLogger("reknit")

_PASS = "pass place=ReaderPlace(rank, size), or ReaderPlace.on_mesh(mesh, ...)"


class ReaderPlace(NamedTuple):
    """A rank's place in data parallelism: rank `rank` of `size` reads its own part of the data.

    `replica` numbers the ranks that read the same part, since they differ only in tensor, pipeline or another
    parallelism.  Number 0 saves the loader's state for all of them.
    """

    rank: int = 0
    size: int = 1
    replica: int = 0

    @classmethod
    def on_mesh(cls, mesh: Any, *names: str) -> ReaderPlace:
        """Return this rank's place on a (torch) device mesh, whose dimensions `names` are data-parallel."""
        dims, at, shape = mesh.mesh_dim_names, mesh.get_coordinate(), tuple(mesh.shape)
        if not dims or at is None or set(names) - set(dims) or not names:
            raise UsageError(
                f"this rank has no place along {', '.join(names)} on a mesh of {dims}",
                remedy="name the mesh's data-parallel dimensions, on a rank that is part of it",
            )
        rank, size, replica = 0, 1, 0
        for name, number, length in zip(dims, at, shape, strict=True):
            if name in names:
                rank, size = rank * length + number, size * length
            else:
                replica = replica * length + number
        return cls(rank, size, replica)

    @classmethod
    def of_job(cls) -> ReaderPlace:
        """Return the place of this process if all ranks of its job are data-parallel.

        The job is that of torch.distributed or of JAX, or that of torchrun before its ranks are connected.
        Raises `UsageError` if the job is not known: torch and JAX give different numbers, or a launcher has
        started several processes without any.
        """
        found = dict(filter(None, (_of_torch(), _of_jax())))
        if not found and (started := launch()) is not None:
            if started.rank is None:
                raise UsageError(
                    f"{started.launcher} started {started.size} processes ({started.variable}="
                    f"{started.size}), and this one has no number among them yet",
                    remedy=f"connect them before the loader is made, or {_PASS}",
                )
            found = {started.launcher: cls(started.rank, started.size)}
        if len(set(found.values())) > 1:
            answers = " and ".join(f"{rank} of {size} for {job}" for job, (rank, size, _) in found.items())
            raise UsageError(f"this process is rank {answers}", remedy=_PASS)
        job, place = next(iter(found.items()), ("", cls()))
        if place.size > 1 and place.rank == 0:
            logger.warning(
                "a data loader is divided between all %d ranks of %s; %s if some of them read the same",
                place.size,
                job,
                _PASS,
            )
        return place


def _of_torch() -> tuple[str, ReaderPlace] | None:
    """Return the place in torch's default process group, None without such a group."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return "torch.distributed", ReaderPlace(dist.get_rank(), dist.get_world_size())


def _of_jax() -> tuple[str, ReaderPlace] | None:
    """Return the place among the processes of JAX, None before ``jax.distributed.initialize``.

    `jax.process_index` has the same number, but starts JAX on all devices.
    """
    distributed = sys.modules.get("jax._src.distributed")
    state = getattr(distributed, "global_state", None)
    if state is None or state.client is None:
        return None
    return "jax.distributed", ReaderPlace(state.process_id, state.num_processes)
