"""Large arrays in the state of a loader's source: stored as tensors, which no save or load holds twice."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.errors import FormatError
from reknit.frameworks import tree
from reknit.frameworks.neutral import from_neutral, is_renewable, record_of, to_neutral
from reknit.frameworks.stateful import Unfilled, rebuild
from reknit.types import shard
from reknit.types.shard import Tagged, TensorSpec

if TYPE_CHECKING:
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Place

_BYTES = "bytes"
"""In a placeholder, in place of the library of a tensor: a binary value, stored as a tensor of `uint8`."""


_PARTIAL = (
    "the rest of this loader's state is to be loaded, and needs it.  Name all of it or nothing in `only`"
)


class _Binary(Unfilled):
    """Memory for a binary value."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.empty(nbytes, np.uint8)

    def filled(self) -> bytes:
        """Return the binary value."""
        return self.memory.tobytes()


def parted(value: Any, place: Place, source: int, saving: Saving) -> Any:
    """Return a source's state in neutral form, and collect its large arrays, if it has many bytes of them.

    `place` is that of all sources' states, and the names of the arrays begin with the number of the source.
    """
    where = f"{place}: source {source}"
    sizes: list[int] = []

    def measure(path: tree.Path, leaf: Any) -> Any:
        nbytes = _nbytes(leaf, place, saving)
        sizes.append(nbytes)
        return leaf if nbytes else tree.DESCEND

    tree.map_leaves(value, measure, where)
    if sum(sizes) <= shard.INLINE_NBYTES:
        return to_neutral(value, where)

    def part(path: tree.Path, leaf: Any) -> Any:
        nbytes = _nbytes(leaf, place, saving)
        is_large = shard.is_large(nbytes, shard.INLINE_NBYTES)
        if not is_large or not all(type(key) in (str, int) for key in path):
            return tree.DESCEND
        relative = tree.join(str(source), *(tree.escape(key, where) for key in path))
        if type(leaf) is bytes:
            library, record, leaf = _BYTES, {}, np.frombuffer(leaf, np.uint8)
        else:
            library, record = saving.library_of(leaf, place).library, record_of(leaf)
        # The other ranks of the job have other sources, and none of them has this array.
        saving.tensor(leaf, place.below(relative), (saving.world.rank,))
        return Tagged("tensor", {"library": library, "path": relative, **record})

    return to_neutral(tree.map_leaves(value, part, where), where)


def _nbytes(leaf: Any, place: Place, saving: Saving) -> int:
    """Return the size of a binary value, or of an array that is whole on this rank; 0 for other values."""
    if type(leaf) is bytes:
        return len(leaf)
    library = saving.arrays(leaf)
    if library is None or not is_renewable(leaf) or saving.opened(leaf, place) is not None:
        return 0
    spec = library.form(leaf)
    if spec is None or saving.look(leaf, place, fill=False).num_elements != spec.numel:
        return 0  # as a plain value it is refused by name
    return spec.nbytes


def rejoined(value: Any, place: Place, loading: Loading) -> Any:
    """Request the arrays of a source's saved state, and return the state with memory for them.

    `stateful.completed` makes the state of it once the memory is filled.
    """

    def binary(path: tree.Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tagged) or leaf.tag != "tensor" or not isinstance(leaf.value, dict):
            return tree.DESCEND
        at = place.below(str(leaf.value.get("path")))
        if not loading.takes(at):
            loading.report_mismatched(at, _PARTIAL)
            return b""
        if leaf.value.get("library") != _BYTES:
            return tree.DESCEND
        spec = loading.saved.spec(at)
        if spec is None:
            loading.report_missing(at, "the checkpoint does not have it")
            return b""
        if spec != TensorSpec((prod(spec.shape),), "uint8"):
            raise FormatError(f"{at} is a {spec}, and not a binary value")
        unfilled = _Binary(spec.numel)
        loading.tensor(unfilled.memory, at, early=True)
        return unfilled

    return rebuild(tree.map_leaves(from_neutral(value), binary), place, loading, {}, early=True)[1]
