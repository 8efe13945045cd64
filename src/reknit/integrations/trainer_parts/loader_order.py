"""In which order does a loader of torch read its samples, and how does it leave the first ones out?"""

from __future__ import annotations

import json
import random
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BELOW = ("sampler", "batch_sampler", "dataset", "base_dataloader")
"""The attributes of loaders, samplers and data sets that may have generators themselves."""


def batches_of(loader: Any) -> Any:
    """Return the sampler of whole batches of a loader, or None without one."""
    return loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler


def sampler_of(loader: Any) -> Any:
    """Return the sampler of single samples, below the samplers of batches."""
    found = batches_of(loader)
    while (below := getattr(found, "batch_sampler", None)) is not None:
        found = below
    return getattr(found, "sampler", None)


def batch_size(loader: Any) -> int | None:
    """Return the number of samples of a batch, or None if it changes."""
    size = getattr(batches_of(loader), "batch_size", None)
    return None if size is None else int(size)


def give_generators(loader: Any) -> None:
    """Give a loader and its sampler random generators of their own, unless they have some.

    Otherwise the order of samples depends on all random numbers, and these on the epochs that were begun.
    """
    for drawing in (sampler_of(loader), loader):
        if getattr(drawing, "generator", loader) is None:
            seed = int(torch.empty((), dtype=torch.int64).random_())
            drawing.generator = torch.Generator().manual_seed(seed)


def order_of(loader: Any) -> bytes | None:
    """Return the state of the generator that makes the next order of the samples, or None without one."""
    generator = getattr(sampler_of(loader), "generator", None)
    return None if generator is None else bytes(generator.get_state().numpy())


def set_order(loader: Any, order: bytes | None) -> None:
    """Set the state of the generator that makes the next order of the samples.

    A sampler that draws from the generator of the process gets one, which it had on more processes.
    """
    sampler = sampler_of(loader)
    if order is None or not hasattr(sampler, "generator"):
        return
    if sampler.generator is None:
        sampler.generator = torch.Generator()
    sampler.generator.set_state(torch.frombuffer(bytearray(order), dtype=torch.uint8))


def is_fixed(loader: Any) -> bool:
    """Return whether the order of an epoch does not depend on the generators of the process."""
    sampler = sampler_of(loader)
    seeded = callable(getattr(sampler, "set_epoch", None))
    return isinstance(loader.dataset, IterableDataset) or isinstance(sampler, SequentialSampler) or seeded


def generator_states(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield the states of the generators of a loader, its samplers and its data set, by their place."""
    for place, generator in _generators(loader):
        if isinstance(generator, torch.Generator):
            yield place, bytes(generator.get_state().cpu().numpy())
        elif isinstance(generator, random.Random):
            yield place, generator.getstate()
        else:  # integers of 128 bits
            state = _bits(generator).state
            yield place, json.dumps(state, default=lambda array: array.tolist())


def set_generators(loader: Any, states: Mapping[str, Any]) -> None:
    """Set the generators of a loader, its samplers and its data set."""
    for place, generator in _generators(loader):
        if (state := states.get(place)) is None:
            continue
        if isinstance(generator, torch.Generator):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        elif isinstance(generator, random.Random):
            version, words, cached = state
            generator.setstate((version, tuple(words), cached))
        else:
            _bits(generator).state = json.loads(state)


def _bits(generator: Any) -> Any:
    """Return the bit generator of a generator of NumPy."""
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator._bit_generator


def _generators(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield the generators that a loader, its samplers and its data set have, by their place."""
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    waiting, seen = [("loader", loader)], set()
    while waiting:
        place, owner = waiting.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, kinds):
                yield f"{place}.{name}", value
            elif name in _BELOW:
                waiting.append((f"{place}.{name}", value))


def batches_after(loader: Any, count: int) -> Iterator[Any]:
    """Return the batches of a loader after the first ones, which are read only if no sampler picks them."""
    sampler = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or type(sampler) is not BatchSampler:
        return islice(iter(loader), count, None)
    return _sampled_after(loader, sampler, count * sampler.batch_size)


def _sampled_after(loader: Any, batches: Any, count: int) -> Iterator[Any]:
    samples = batches.sampler
    batches.sampler = _RemainingSamples(samples, count)
    try:  # a loader asks its sampler when it makes its iterator, or for the first batch
        iterator = iter(loader)
        first = next(iterator, loader)
    finally:
        batches.sampler = samples
    if first is not loader:
        yield first
        yield from iterator


class _RemainingSamples:
    """The samples of a sampler after the first ones."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler, self._count = sampler, count

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._count, None)
