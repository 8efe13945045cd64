"""The places of ranks along the dimensions of a mesh, by which torch's collectives cut and join tensors.

A shard belongs where its rank stands in the process group of a mesh dimension.  By default, torch sorts the
ranks of these groups.  In a mesh with ranks in another order, places and coordinates differ.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.errors import StateError
from reknit.frameworks.torch import torch_private

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.frameworks.walk.walk import Place, World

ORDER_REMEDY = (
    "give the mesh ascending ranks along each dimension, or from torch 2.15 on make it with "
    "preserve_rank_order=True"
)


class MeshPlaces(NamedTuple):
    """The coordinate of this rank in a mesh, and its place in the process group of each dimension.

    `by_rank` is None if all groups along a dimension have one order: ranks with equal coordinates then have
    equal places, too.  Otherwise it has the places of all ranks in groups of sorted ranks.
    """

    coordinate: tuple[int, ...]
    place: tuple[int, ...]
    by_rank: NDArray[np.int64] | None

    @property
    def moved(self) -> bool:
        """Whether the place of this rank is not its coordinate."""
        return self.place != self.coordinate

    def require_filled(self, dims: Sequence[int], name: Place) -> None:
        """Raise `StateError` if no rank is at some place along these dimensions, which cut a tensor.

        Torch itself loses a part of such a tensor when it cuts it.
        """
        if self.by_rank is None or not dims:
            return
        *sizes, _ = self.by_rank.shape
        taken = {tuple(one) for one in self.by_rank[..., list(dims)].reshape(-1, len(dims)).tolist()}
        if len(taken) < prod(sizes[dim] for dim in dims):
            raise StateError(
                f"{name} is a DTensor on a mesh whose ranks do not ascend, and the sorted process groups of "
                "torch put two ranks at one place of it",
                remedy=ORDER_REMEDY,
            )


def on_mesh(mesh: Any, world: World) -> MeshPlaces:
    """Return the places on a mesh that has this rank.  Sends nothing."""
    return world.once(("places", id(mesh)), lambda: _find(mesh), mesh)


def _find(mesh: Any) -> MeshPlaces:
    coordinate = tuple(mesh.get_coordinate())
    place = coordinate
    if torch_private.has_groups(mesh):
        place = tuple(mesh.get_local_rank(dim) for dim in range(len(coordinate)))
    ranks = np.array(mesh.mesh.tolist())
    by_rank = [ranks.argsort(axis=dim).argsort(axis=dim) for dim in range(ranks.ndim)]
    one_order = all(map(_is_one_order, by_rank, range(ranks.ndim)))
    if one_order or torch_private.keeps_order(mesh):
        return MeshPlaces(coordinate, place, None)
    return MeshPlaces(coordinate, place, np.stack(by_rank, axis=-1))


def _is_one_order(places: NDArray[np.int64], dim: int) -> bool:
    """Return whether the places along a dimension are the same on all its lines."""
    lines = np.moveaxis(places, dim, -1).reshape(-1, places.shape[dim])
    return bool((lines == lines[:1]).all())
