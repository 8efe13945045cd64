"""The order in which readers together take the samples of an epoch, and the part of each from a position on.

Reader `r` of `n` takes the `r`-th, `r + n`-th ... sample of the order.  So all readers together have taken
the first samples of the order, and any other number of readers can take the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from reknit.errors import CorruptError
from reknit.types.decoding import converted


class SampleOrder(NamedTuple):
    """The samples `first` to `first + length - 1`: as they are, or shuffled by `seed` and the epoch.

    `drawn` is an order that one reader draws from a generator of its own.
    """

    length: int
    first: int = 0
    seed: int | None = None
    drawn: bool = False

    def __str__(self) -> str:
        if self.drawn:
            return f"an order of {self.length} samples that one rank draws alone"
        how = "not shuffled" if self.seed is None else f"shuffled by seed {self.seed}"
        return f"the order of {self.length} samples from {self.first} on, {how}"

    def fits(self, other: SampleOrder) -> bool:
        """Return whether a position in this order is the same position in another one.

        Samples may be added to an order that is not shuffled.
        """
        if self.seed is None and not self.drawn:
            return other == SampleOrder(max(self.length, other.length), self.first)
        return self == other

    def numbers(self, epoch: int) -> torch.Tensor:
        """Return the numbers of all samples in their order, as torch's samplers make it."""
        if self.seed is None:
            return torch.arange(self.first, self.first + self.length)
        generator = torch.Generator()
        generator.manual_seed(self.seed + epoch)
        return torch.randperm(self.length, generator=generator) + self.first


class SampleReaders(NamedTuple):
    """The number of readers of an order, and the number of this one.

    With `drop_last` the last samples, of which there are not enough for all readers, are left out.  Otherwise
    the first samples of the order are read again, so that all readers take equally many.
    """

    number: int = 1
    reader: int = 0
    drop_last: bool = False

    def num_each(self, order: SampleOrder, position: int) -> int:
        """Return the number of samples that each reader takes after the first `position` ones."""
        left = max(order.length - position, 0)
        return left // self.number if self.drop_last else -(-left // self.number)

    def share(self, order: SampleOrder, epoch: int, position: int) -> list[int]:
        """Return the numbers of the samples that this reader takes after the first `position` ones."""
        each = self.num_each(order, position)
        places = torch.arange(each) * self.number + position + self.reader
        numbers: list[int] = order.numbers(epoch)[places % max(order.length, 1)].tolist()
        return numbers


class EpochPosition(NamedTuple):
    """The position of all readers in an epoch, as the checkpoint has it.

    `samples` is the number of samples that all readers together have taken, in batches of `batch`.  `order`
    is None if the loader is not known well enough to continue with other readers.  With `counted`, the loader
    is restored by leaving out as many batches.  `ended` is whether the end of the epoch was reached.
    `drawn` describes an order that a sampler of torch has drawn (see `drawn.drawn_order`).
    """

    order: SampleOrder | None
    batch: int | None
    workers: int
    counted: bool = False
    readers: int = 1
    samples: int = 0
    epoch: int = 0
    ended: bool = False
    drawn: dict[str, Any] | None = None

    def record(self) -> dict[str, Any]:
        """Return plain data for the checkpoint."""
        return self._asdict() | {"order": None if self.order is None else self.order._asdict()}

    @classmethod
    def of_record(cls, record: Any, where: object) -> EpochPosition:
        """Return the position that a checkpoint has at a place.  Raises `CorruptError` for anything else."""
        try:
            order = record["order"]
            found = cls(**record | {"order": None if order is None else SampleOrder(**order)})
            checked: EpochPosition = converted(found, cls)
        except (TypeError, KeyError, ValueError) as error:
            raise CorruptError(
                f"{where} is damaged: it is not a position of a data loader ({error})",
                remedy="load another checkpoint",
            ) from error
        return checked
