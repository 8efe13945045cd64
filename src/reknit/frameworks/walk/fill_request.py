"""One request of a load: memory to fill, and its names in the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct, field

from reknit.frameworks.neutral import put_array
from reknit.frameworks.numbers import is_number, misfit
from reknit.frameworks.same_value import same_value
from reknit.types.shard import Shard
from reknit.types.wanted import reshaping

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from reknit.frameworks.walk.rank_catalog import RankCatalog
    from reknit.frameworks.walk.walk import Place, View
    from reknit.types.shard import TensorSpec


class FoundNumber(NamedTuple):
    """A number that was saved under names of a tensor, and the reason why it does not fit, or None."""

    places: list[Place]
    value: Any
    why: str | None


class FillRequest(Struct):
    """Memory to fill, with all its names in the target; with `resize`, also from another shape.

    If the checkpoint has none of these names, the load uses the first in `instead` that it has.  `early`
    memory is filled before live memory.
    """

    view: View
    tensor: Any
    resize: bool = False
    early: bool = False
    places: list[Place] = field(default_factory=list)
    instead: list[Place] = field(default_factory=list)

    def shards(self, place: Place) -> list[Shard]:
        """Return the parts of the tensor that this rank requests at a place."""
        view = self.view
        return [
            Shard(place.item, place.fqn, view.spec, box, view.replicas, memory=memory)
            for box, memory in view.parts
        ]

    def memories(self) -> list[Any]:
        """Return all memory that is written when this is filled, also from a copy in another byte order."""
        held = [memory for _, memory in self.view.parts]
        return [*held, self.tensor] if isinstance(self.tensor, np.ndarray) else held

    def wrong_shape(self, saved: TensorSpec) -> str | None:
        """Return why the memory cannot take a tensor of the saved shape, or None."""
        here = self.view.spec.shape
        alike = len(saved.shape) == len(here)
        if saved.shape == here or (self.resize and alike):
            return None
        why = f"its shape is {list(saved.shape)} in the checkpoint and {list(here)} here"
        if self.resize:
            return f"{why}; the number of dimensions may not differ"
        return why + reshaping(here) if alike else why

    def number(self, saved: RankCatalog, *, cast: bool) -> FoundNumber | None:
        """Return the number that was saved in the place of this tensor; None if the tensor has dimensions."""
        if self.view.spec.shape:
            return None
        values = {place: saved.look_up(place).value for place in self.places}
        places = [place for place, value in values.items() if is_number(value)]
        if not places:
            return None
        number = values[places[0]]
        why = misfit(number, self.view.spec.dtype, cast=cast)
        for other in places[1:]:
            if not same_value(number, values[other]):
                why = f"{other}, which is the same tensor here, is another number in the checkpoint"
        return FoundNumber(places, number, why)

    def fills(self, array: NDArray[Any]) -> list[Callable[[], None]]:
        """Return actions that fill the memory from an array of the whole tensor, and settle it."""

        def fill() -> None:
            for shard in self.shards(self.places[0]):
                put_array(np.asarray(array[shard.box.slices()]), shard.data)

        return [fill] if self.view.settle is None else [fill, self.view.settle]
