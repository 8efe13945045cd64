"""torchdata's StatefulDataLoader over sources, whose workers' states are rewritten for another layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from reknit.dataloader.loader import ReaderPlace
from reknit.dataloader.reshard import Readers, Turns, shards_of_rank, states_of_next_pass, unread
from reknit.dataloader.sources import check_sources
from reknit.errors import StateError, UsageError
from reknit.plugins.framework import LoaderShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_FIELDS = ("source", "left", "num_items", "value")


class SourceDataset(IterableDataset[Any]):
    """An iterable dataset for a StatefulDataLoader: every worker of every rank reads its part of the sources.

    The arguments are those of `sources.SourceLoader`.  With another dataset that owns its shards the loader
    works as well, if its ``state_dict`` in a worker returns them as this one's does.
    """

    def __init__(
        self,
        open_source: Callable[[int], Iterable[Any]],
        num_sources: int,
        *,
        place: ReaderPlace | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.place = ReaderPlace.of_job() if place is None else place
        self.sizes = list(sizes or [1] * num_sources)
        self._open = open_source
        self._turns: Turns | None = None

    def __iter__(self) -> Iterator[Any]:
        turns = self._started()
        if turns.is_over:
            turns = self._turns = turns.next_pass()
        return turns

    def _started(self) -> Turns:
        if self._turns is None:
            worker = get_worker_info()
            number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
            readers = Readers(self.place.size, count)
            mine = unread(self.sizes, [0] * len(self.sizes), readers, self.place.rank)
            states = {shard.source: None for shard in mine if shard.worker == number}
            self._turns = Turns(self._open, self.sizes, states)
        return self._turns

    def state_dict(self) -> dict[str, Any]:
        """Return the shards that this worker reads, as of the last value that it gave."""
        shards = self._started().shards()
        return {"shards": [{name: getattr(shard, name) for name in _FIELDS} for shard in shards]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these shards."""
        states = {shard["source"]: shard["value"] for shard in state["shards"]}
        self._turns = Turns(self._open, self.sizes, states)


class ShardedDataLoader:
    """An iterator over a StatefulDataLoader that can go on with other numbers of ranks and of workers.

    Its dataset is a `SourceDataset`, or one with a `place`, `sizes` and a state like that one's.  The loader
    has to take its snapshot with every batch, which is its default.  A ``for`` after the end is the next
    epoch; each reader keeps its sources.
    """

    def __init__(self, loader: Any) -> None:
        if loader.snapshot_every_n_steps != 1:
            raise UsageError(
                f"the loader takes a snapshot every {loader.snapshot_every_n_steps} steps",
                remedy="pass snapshot_every_n_steps=1 to it",
            )
        self._loader = loader
        self._place: ReaderPlace = loader.dataset.place
        self._sizes: list[int] = loader.dataset.sizes
        self._readers = Readers(self._place.size, max(loader.num_workers, 1))
        self._iterator: Iterator[Any] | None = None
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:
        """Return this loader; after its end, at the beginning of the next epoch."""
        if self._is_over:
            self._begin(self._next_epoch(), _first_turn(self._readers.num_workers))
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        try:
            return next(self._iterator)
        except StopIteration:
            self._is_over = True
            raise

    def replicated_state(self) -> dict[str, Any]:
        """Return the number of sources, and of the ranks and workers that read them."""
        return {"sources": len(self._sizes), "ranks": self._readers[0], "workers": self._readers[1]}

    def sharded_state(self) -> list[LoaderShard]:
        """Return the shards of all workers, as of the last batch that was taken."""
        if self._place.replica:
            return []
        workers, turn = _parts(self._loader.state_dict())
        return [
            LoaderShard(
                shard["source"],
                self._place.rank,
                number,
                shard["left"],
                shard["num_items"],
                {"turn": turn, "value": shard["value"]},
            )
            for number, worker in enumerate(workers)
            for shard in worker["shards"]
        ]

    def choose_shards(self, replicated: Any, saved: Sequence[LoaderShard]) -> list[LoaderShard]:
        """Return the shards with which this rank continues.  Raises `StateError`."""
        check_sources(replicated, len(self._sizes))
        before = Readers(replicated["ranks"], replicated["workers"])
        return shards_of_rank(saved, [0] * len(self._sizes), before, self._readers, self._place.rank)

    def load_shards(self, replicated: Any, shards: Sequence[LoaderShard]) -> None:
        """Continue with these shards in the present workers."""
        workers: list[dict[str, Any]] = [{"shards": []} for _ in range(self._readers.num_workers)]
        for shard in shards:
            entry = {name: getattr(shard, name) for name in _FIELDS} | {"value": shard.value["value"]}
            workers[shard.worker]["shards"].append(entry)
        same = (replicated["ranks"], replicated["workers"]) == tuple(self._readers)
        turn = shards[0].value["turn"] if same and shards else _first_turn(len(workers))
        self._begin(workers, turn)

    def _begin(self, workers: Sequence[dict[str, Any]], turn: dict[str, int]) -> None:
        """Continue with these states of the workers' datasets."""
        self._iterator, self._is_over = None, False
        one_process = self._loader.num_workers == 0
        self._loader.load_state_dict(_alone(workers[0]) if one_process else _with_workers(workers, turn))

    def _next_epoch(self) -> list[dict[str, Any]]:
        """Return the states with which the workers' datasets begin the next epoch."""
        if not isinstance(self._loader.dataset, SourceDataset):
            raise UsageError(
                f"this loader has given all its batches, and its dataset is a "
                f"{type(self._loader.dataset).__name__}, whose next epoch cannot be derived from its state",
                remedy="make a new StatefulDataLoader and ShardedDataLoader for each epoch",
            )
        workers, _ = _parts(self._loader.state_dict())
        return [
            {
                "shards": [
                    shard | {"value": value}
                    for shard, value in zip(worker["shards"], _anew(worker["shards"]), strict=True)
                ]
            }
            for worker in workers
        ]


def _anew(shards: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the value of each shard of a worker at the beginning of the next epoch."""
    states = states_of_next_pass({shard["source"]: shard["value"] for shard in shards})
    return [states[shard["source"]] for shard in shards]


# From here on: the form of torchdata's state (0.11).  Nothing but the datasets' own states and whose turn it
# is says anything about the position in iterable datasets; counters begin anew.

_MAIN = {
    "_sampler_iter_state": None,
    "_sampler_iter_yielded": 0,
    "_index_sampler_state": None,
    "_IterableDataset_len_called": None,
    "_shared_seed": None,
}
_FETCHER = {"dataset_iter_state": None, "fetcher_ended": False}


def _alone(dataset: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a loader without workers."""
    own = {"dataset_state": dataset, "fetcher_state": dict(_FETCHER)}
    return {**_MAIN, **own, "_num_yielded": 0, "_iterator_finished": False}


def _first_turn(num_workers: int) -> dict[str, int]:
    """Return the worker of the last batch, and the seed of the workers' generators, of a new loader."""
    return {"last": num_workers - 1, "seed": int(torch.empty((), dtype=torch.int64).random_())}


def _with_workers(datasets: Sequence[dict[str, Any]], turn: dict[str, int]) -> dict[str, Any]:
    """Return the state of a loader with workers."""
    workers = {
        f"worker_{n}": {"worker_id": n, "dataset_state": dataset, "fetcher_state": dict(_FETCHER)}
        for n, dataset in enumerate(datasets)
    }
    snapshot = {
        "_snapshot_step": 0,
        "_last_yielded_worker_id": turn["last"],
        "_main_snapshot": {**_MAIN, "_num_workers": len(datasets), "_base_seed": turn["seed"]},
        "_worker_snapshots": workers,
    }
    return {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": False}


def _parts(state: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the states of all workers' datasets, and which worker gave the last batch, with the seed."""
    try:
        if "_snapshot" not in state:
            return [state["dataset_state"]], {"last": 0, "seed": 0}
        snapshot = state["_snapshot"]
        workers = snapshot["_worker_snapshots"]
        datasets = [workers[f"worker_{n}"]["dataset_state"] for n in range(len(workers))]
        if state["_steps_since_snapshot"] or any("shards" not in dataset for dataset in datasets):
            raise KeyError("shards")
        turn = {"last": snapshot["_last_yielded_worker_id"], "seed": snapshot["_main_snapshot"]["_base_seed"]}
    except (KeyError, TypeError) as error:
        raise StateError(
            "the state of the StatefulDataLoader has a form that this version of reknit does not support",
            remedy="use torchdata 0.11, and a dataset whose state_dict returns its shards",
        ) from error
    return datasets, turn
