"""A parameter of which this rank holds consecutive elements, as FSDP1 and ZeRO-3 keep theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from reknit.frameworks.torch.tensor import dtype_name
from reknit.frameworks.walk.walk import View
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.frameworks.torch.flat_part import FlatPart
    from reknit.frameworks.walk.walk import Place, Replicas


class FlatParameter(msgspec.Struct, frozen=True, eq=False):
    """A parameter of which this rank holds the range `part` of flat `memory`.

    `names` are its names in the module tree, several if it is tied.  `original` is the parameter that
    optimizers see, None if they see `flat`, which may hold others too: this one is number `number` in it.
    `replicas` have the same range, and `counter` are the ranks with its counters.  `settle` makes the library
    use new contents of the memory, without a message.
    """

    names: tuple[str, ...]
    original: Any
    flat: Any
    number: int
    memory: Any
    part: FlatPart
    replicas: Replicas
    counter: Replicas
    settle: Callable[[], None]

    @property
    def frozen(self) -> bool:
        """Whether it is not trained."""
        return not (self.flat if self.original is None else self.original).requires_grad

    def view(self, place: Place) -> View:
        """Return the view of this rank's range of the parameter."""
        spec = TensorSpec(self.part.shape, dtype_name(self.memory, place))
        memory = ("flat parameter", id(self.flat), self.number)
        return View(spec, self.part.unseen(self.memory), self.replicas, memory)
