"""Every kind of source: number `n` of each kind has the values 100 * n, 100 * n + 1 and so on."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZES = (3, 0, 2)
VALUES = [100 * n + k for n, size in enumerate(SIZES) for k in range(size)]


def installed(name: str) -> Any:
    """Import a module, ignoring its warnings, or skip the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed")


def numbers(source: int) -> list[int]:
    return [100 * source + k for k in range(SIZES[source])]


class Counted:
    """An iterable that keeps its position, and stays at its end."""

    def __init__(self, source: int) -> None:
        self.values, self.at = numbers(source), 0

    def __iter__(self) -> Iterator[int]:
        while self.at < len(self.values):
            self.at += 1
            yield self.values[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Anew(Counted):
    """A source that begins anew when it is loaded at its end."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"] % len(self.values)


class Live(Counted):
    """A source whose state is the object with which it counts."""

    def __init__(self, source: int) -> None:
        super().__init__(source)
        self.state = {"at": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["at"] < len(self.values):
            self.state["at"] += 1
            yield self.values[self.state["at"] - 1]

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


class ByIterator:
    """A source whose iterator has the state."""

    def __init__(self, source: int) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        return CountedIterator(self.source)


class CountedIterator(Counted):
    """An iterator with the methods of Grain's."""

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __iter__(self) -> CountedIterator:
        return self

    def __next__(self) -> int:
        if self.at >= len(self.values):
            raise StopIteration
        self.at += 1
        return self.values[self.at - 1]

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def node(make: Callable[[Any, list[int]], Any]) -> Callable[[int], Any]:
    return lambda source: make(installed("torchdata.nodes"), numbers(source))


def weighted(nodes: Any, values: list[int]) -> Any:
    return nodes.MultiNodeWeightedSampler(
        {"a": nodes.IterableWrapper(values)},
        {"a": 1.0},
        stop_criteria=nodes.StopCriteria.ALL_DATASETS_EXHAUSTED,
    )


def hugging_face(source: int) -> Any:
    rows = installed("datasets").Dataset.from_dict({"n": [-1, *numbers(source)]})  # not without any row
    return rows.to_iterable_dataset().filter(lambda row: row["n"] >= 0)


def grain(source: int) -> Any:
    rows = installed("grain").MapDataset.source([-1, *numbers(source)])
    return rows.filter(lambda n: n >= 0).to_iter_dataset()


def stateful_data_loader(source: int) -> Any:
    torchdata = installed("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(numbers(source), batch_size=None, collate_fn=int)


KINDS: dict[str, Callable[[int], Any]] = {
    "counted": Counted,
    "anew": Anew,
    "live": Live,
    "by iterator": ByIterator,
    "node": node(lambda nodes, values: nodes.IterableWrapper(values)),
    "sampler node": node(lambda nodes, values: nodes.SamplerWrapper(values)),
    "map node": node(lambda nodes, values: nodes.MapStyleWrapper(values, range(len(values)))),
    "mapper node": node(lambda nodes, values: nodes.Mapper(nodes.IterableWrapper(values), int)),
    "batched node": node(
        lambda nodes, values: nodes.Unbatcher(
            nodes.Batcher(nodes.IterableWrapper(values), 2, drop_last=False)
        )
    ),
    "prefetching node": node(
        lambda nodes, values: nodes.Prefetcher(nodes.IterableWrapper(values), prefetch_factor=2)
    ),
    "weighted node": node(weighted),
    "node loader": node(lambda nodes, values: nodes.Loader(nodes.IterableWrapper(values))),
    "node loader that stops": node(
        lambda nodes, values: nodes.Loader(nodes.IterableWrapper(values), restart_on_stop_iteration=False)
    ),
    "hugging face": hugging_face,
    "grain": grain,
    "stateful data loader": stateful_data_loader,
}
