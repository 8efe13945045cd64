"""Where does a reader stand among the ranks of a job?"""

from __future__ import annotations

from typing import Any, NamedTuple

from reknit.errors import UsageError


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
