"""The form of the state of torchdata's StatefulDataLoader (0.11) over a map-style dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from reknit.frameworks.loaders.sample_order import EpochPosition
from reknit.frameworks.loaders.samplers import reading_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reknit.frameworks.loaders.samplers import KnownReading

_SAMPLES = "samples_yielded"
_INSIDE = "sampler_iter_state"


def position_of(loader: Any, state: Mapping[str, Any], num_ranks: int) -> EpochPosition:
    """Return the position of a loader with this state, as of the last batch that was taken."""
    main, more = _main(state)
    batches = main["_sampler_iter_yielded"] + more
    reading = reading_of(loader, num_ranks)
    if reading is None:
        counted = bool(batches) and _is_counted(loader, state)
        return EpochPosition(None, batch_size(loader), loader.num_workers, counted=counted)
    samples, start = main["_sampler_iter_state"] or {}, continued_from(state) or {}
    taken = samples[_SAMPLES] + more * reading.batch if _SAMPLES in samples else batches * reading.batch
    begun = start.get("start", 0)
    order, readers = reading.order, reading.readers
    taken = min(taken, readers.num_each(order, begun))
    return EpochPosition(
        order,
        reading.batch,
        loader.num_workers,
        readers=readers.number,
        samples=begun + taken * readers.number,
        epoch=start.get("epoch", getattr(reading.sampler, "epoch", 0)),
        ended=bool(state["_iterator_finished"]),
    )


def num_batches(state: Mapping[str, Any]) -> int:
    """Return the number of batches that were taken in the present epoch."""
    main, more = _main(state)
    number: int = main["_sampler_iter_yielded"] + more
    return number


def batch_size(loader: Any) -> int | None:
    """Return the number of samples of a batch, or None if it is not known."""
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    size = getattr(batches, "batch_size", loader.batch_size)
    return size if isinstance(size, int) else None


def _main(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """Return the state of the sampler, and how many batches were taken since."""
    if "_snapshot" not in state:
        return state, 0
    return state["_snapshot"]["_main_snapshot"], state["_steps_since_snapshot"]


def _is_counted(loader: Any, state: Mapping[str, Any]) -> bool:
    """Return whether torchdata restores a loader by leaving out as many batches as were taken."""
    if not isinstance(loader.dataset, IterableDataset):
        main = _main(state)[0]
        return main["_sampler_iter_state"] is None and main["_index_sampler_state"] is None
    workers = state["_snapshot"]["_worker_snapshots"].values() if "_snapshot" in state else [state]
    fetched = [worker.get("fetcher_state") or {} for worker in workers]
    return all(worker.get("dataset_state") is None for worker in workers) and all(
        one.get("dataset_iter_state") is None for one in fetched
    )


def continued_from(state: Mapping[str, Any]) -> Mapping[str, int] | None:
    """Return the state of `SamplesFrom` in a loader's state, None if the epoch began at its first sample."""
    samples = _main(state)[0]["_sampler_iter_state"] or {}
    inside = samples.get(_INSIDE) if _SAMPLES in samples else samples
    return inside if inside is not None and "start" in inside else None


def state_at(loader: Any, reading: KnownReading, position: EpochPosition) -> dict[str, Any]:
    """Return the state of a loader that begins at a position."""
    samples = {"start": position.samples, "taken": 0, "epoch": position.epoch}
    return _state(loader, reading, samples, taken=0)


def redivided(loader: Any, reading: KnownReading, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a loader with a drawn order for other workers, or batches of another size."""
    main, _ = _main(state)
    position = position_of(loader, state, 1)
    taken = position.samples
    inside = main["_sampler_iter_state"]
    return _state(
        loader,
        reading,
        {"yielded": taken, "generator": (inside.get(_INSIDE) or inside)["generator"]},
        taken=taken,
        ended=position.ended,
    )


def _state(
    loader: Any, reading: KnownReading, samples: dict[str, Any], *, taken: int, ended: bool = False
) -> dict[str, Any]:
    """Return a loader's state, given the state of its sampler's iterator after `taken` samples."""
    sampler = reading.sampler
    index = {"yielded": 0} if reading.batches is None and hasattr(sampler, "state_dict") else None
    main = {
        "_sampler_iter_state": samples if reading.batches is None else {_SAMPLES: taken, _INSIDE: samples},
        "_sampler_iter_yielded": -(-taken // reading.batch),
        "_index_sampler_state": index,
        "_IterableDataset_len_called": None,
        "_shared_seed": None,
    }
    count = loader.num_workers
    if not count:
        own = {"dataset_state": None, "fetcher_state": None, "_num_yielded": 0}
        return {**main, **own, "_iterator_finished": ended}
    workers = {
        f"worker_{n}": {"worker_id": n, "dataset_state": None, "fetcher_state": None} for n in range(count)
    }
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
    snapshot = {
        "_snapshot_step": 0,
        "_last_yielded_worker_id": count - 1,
        "_main_snapshot": {**main, "_num_workers": count, "_base_seed": seed},
        "_worker_snapshots": workers,
    }
    return {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": ended}


def num_workers(state: Any) -> int | None:
    """Return the number of workers in the state of a loader, or None for an unknown form."""
    try:
        found = state["_snapshot"]["_main_snapshot"]["_num_workers"] if "_snapshot" in state else 0
    except (KeyError, TypeError):
        return None
    return found if isinstance(found, int) and (found or "_num_yielded" in state) else None
