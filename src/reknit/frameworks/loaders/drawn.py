"""The orders that torch's own random samplers draw, which no state of torchdata has.

torchdata restores a loader with such a sampler by leaving out as many samples as were taken.  It leaves them
out of an order that is drawn anew.  So the order of the present epoch is stored beside the loader's state.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader.sampler import RandomSampler as StatelessInBatches
from torchdata.stateful_dataloader.sampler import _StatefulRandomSamplerIterator as OfTorchdata

from reknit.frameworks.loaders import torchdata_state

if TYPE_CHECKING:
    from collections.abc import Mapping

_KINDS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_ORDER = "_reknit_order"
_LISTED: type = type(iter([]))
_MOST_NUMBERS = 1 << 26
"""More numbers of an order would be too large for one value of a checkpoint."""


def drawing_sampler(loader: Any) -> Any:
    """Return the sampler of torch that draws the order of a loader, or None."""
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = batches.sampler if isinstance(batches, BatchSampler) else batches
    kind = _kind(sampler)
    # In batches of torch, a sampler of torchdata has no state either.
    is_drawn = kind in _KINDS or (kind is StatelessInBatches and type(batches) is BatchSampler)
    return sampler if is_drawn else None


def drawn_order(loader: Any, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return plain data for the order within which a loader with this state stands.

    The result is None if no sampler of torch has drawn one, or if the epoch is over.  It has nothing but a
    length if the order cannot be read: a sampler that has given its last number, to workers that read ahead,
    has forgotten it.
    """
    sampler = drawing_sampler(loader)
    if sampler is None or state["_iterator_finished"]:
        return None
    batches = torchdata_state.num_batches(state)
    if not 0 < batches < len(loader.sampler if loader.batch_sampler is None else loader.batch_sampler):
        return None
    record: dict[str, Any] = {"length": len(sampler)}
    numbers = _of_sampler(loader._iterator._sampler_iter)
    if isinstance(numbers, DrawnBefore):
        record = dict(numbers.record)
    elif numbers is not None:
        record |= _found(sampler, numbers)
    if sampler.generator is not None and len(record) > 1:
        record["generator"] = sampler.generator.get_state().numpy().tobytes()
    return record


def unfit(loader: Any, order: Mapping[str, Any]) -> str | None:
    """Return the reason why a loader cannot continue within an order that was drawn, or None."""
    sampler = drawing_sampler(loader)
    if sampler is None:
        return (
            "it was saved within an order that a sampler of torch drew, and its sampler is another one here"
        )
    if len(order) == 1:
        return (
            "its sampler has no state, and its order could not be read: workers had taken the last numbers "
            "ahead, or it draws several times, or it is too long; use shuffle=True"
        )
    if len(sampler) != order["length"]:
        return f"it was saved within an order of {order['length']} samples, and has {len(sampler)} here"
    return None


def give_order(loader: Any, order: dict[str, Any] | None) -> None:
    """Let the next epoch of a loader have an order that was drawn before; all others are drawn as ever."""
    sampler = drawing_sampler(loader)
    kind: Any = _kind(sampler)
    sampler.__class__ = kind if order is None else _ordered(kind)
    setattr(sampler, _ORDER, order)


class Ordered:
    """Part of the class of a sampler whose next iterator has an order that was drawn before."""

    __slots__ = ()
    kind: type
    """The class that the sampler had."""

    def __iter__(self) -> DrawnBefore:
        return DrawnBefore(self, getattr(self, _ORDER))


class DrawnBefore(Iterator[int]):
    """The numbers of an epoch in an order that was drawn before.

    torchdata makes an iterator and then another one in its place.  So the first number, not the first
    iterator, gives the sampler its own class back.
    """

    def __init__(self, sampler: Any, record: dict[str, Any]) -> None:
        self.record = record
        self._sampler = sampler
        self._rest: Iterator[int] | None = None

    def __next__(self) -> int:
        if self._rest is None:
            self._rest = self._numbers()
        return next(self._rest)

    def _numbers(self) -> Iterator[int]:
        sampler, record = self._sampler, self.record
        sampler.__class__ = _kind(sampler)
        setattr(sampler, _ORDER, None)
        drawn = iter(sampler)  # the generators go on as in every epoch
        next(drawn, None)
        if sampler.generator is not None and "generator" in record:
            sampler.generator.set_state(torch.frombuffer(bytearray(record["generator"]), dtype=torch.uint8))
        for number in _order_of(sampler, record):
            yield number
            next(drawn, None)


def _order_of(sampler: Any, record: Mapping[str, Any]) -> list[int]:
    """Return the numbers of an order that was found in an iterator."""
    if "seed" not in record:
        numbers: list[int] = np.frombuffer(record["numbers"], dtype="<i8").tolist()
        return numbers
    generator = torch.Generator().manual_seed(record["seed"])
    return list(RandomSampler(sampler.data_source, sampler.replacement, len(sampler), generator))


@cache
def _ordered(kind: type) -> type:
    return type(kind.__name__, (kind, Ordered), {"kind": kind, "__iter__": Ordered.__iter__})


def _kind(sampler: Any) -> type:
    kind: type = sampler.kind if isinstance(sampler, Ordered) else type(sampler)
    return kind


def _found(sampler: Any, running: Any) -> dict[str, Any]:
    """Return the order of an iterator of a sampler: its seed, or its numbers.

    Samplers of torch are generators, whose frames hold an iterator over the list of all numbers.
    """
    if isinstance(sampler, RandomSampler):
        own = running.gi_frame.f_locals.get("generator")
        if sampler.generator is None and own is not None:
            return {"seed": own.initial_seed()}
        if sampler.replacement or len(sampler) > len(sampler.data_source):
            return {}  # it draws several lists, of which only the present one is there
    if isinstance(running, OfTorchdata):
        lists = [running.perm]
    else:
        held = (*gc.get_referents(running), *gc.get_referents(running.gi_frame))
        lists = [one.__reduce__()[1][0] for one in held if type(one) is _LISTED]
    numbers = next((one for one in lists if len(one) == len(sampler)), None)
    if numbers is None or len(numbers) > _MOST_NUMBERS:
        return {}
    if isinstance(sampler, SubsetRandomSampler):
        numbers = [sampler.indices[number] for number in numbers]
    return {"numbers": np.asarray(numbers, dtype="<i8").tobytes()}


def _of_sampler(found: Any) -> Any:
    """Return the iterator of the sampler inside an iterator of a loader, None if it has ended."""
    while found is not None and not isinstance(found, (DrawnBefore, OfTorchdata)):
        local = {} if getattr(found, "gi_frame", None) is None else found.gi_frame.f_locals
        if isinstance(local.get("self"), _KINDS):
            return found
        if isinstance(found, islice):
            found = next((one for one in gc.get_referents(found) if isinstance(one, Iterator)), None)
        else:
            found = getattr(found, "sampler_iter", None) or local.get("sampler_iter")
    return found
