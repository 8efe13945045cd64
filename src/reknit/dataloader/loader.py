"""The token loader: packs samples of several token sets into batches, and resumes in any layout."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.dataloader.process import ProcessWorker
from reknit.dataloader.reader import LocalWorker, Reader
from reknit.dataloader.reshard import Readers, shards_of_rank, unread
from reknit.dataloader.token_sets import Corpus, Recipe, TokenSet
from reknit.environment import launch
from reknit.errors import StateError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.dataloader.reader import Batch
    from reknit.plugins.framework import LoaderShard

    Worker = LocalWorker | ProcessWorker


logger = logging.getLogger("reknit")

_PASS = "pass place=ReaderPlace(rank, size), or ReaderPlace.on_mesh(mesh, ...)"


class ReaderPlace(NamedTuple):
    """A rank's place in data parallelism: rank `rank` of `size` reads its own part of the data.

    `replica` numbers the ranks that read the same part, since they differ only in tensor, pipeline or another
    parallelism.  Number 0 saves the loader's state for all of them.
    """

    rank: int = 0
    size: int = 1
    replica: int = 0

    @classmethod
    def on_mesh(cls, mesh: Any, *names: str) -> ReaderPlace:
        """Return this rank's place on a (torch) device mesh, whose dimensions `names` are data-parallel."""
        dims, at, shape = mesh.mesh_dim_names, mesh.get_coordinate(), tuple(mesh.shape)
        if not dims or at is None or set(names) - set(dims) or not names:
            raise UsageError(
                f"this rank has no place along {', '.join(names)} on a mesh of {dims}",
                remedy="name the mesh's data-parallel dimensions, on a rank that is part of it",
            )
        rank, size, replica = 0, 1, 0
        for name, number, length in zip(dims, at, shape, strict=True):
            if name in names:
                rank, size = rank * length + number, size * length
            else:
                replica = replica * length + number
        return cls(rank, size, replica)

    @classmethod
    def of_job(cls) -> ReaderPlace:
        """Return the place of this process if all ranks of its job are data-parallel.

        The job is that of torch.distributed or of JAX, or that of torchrun before its ranks are connected.
        Raises `UsageError` if the job is not known: torch and JAX give different numbers, or a launcher has
        started several processes without any.
        """
        found = dict(filter(None, (_of_torch(), _of_jax())))
        if not found and (started := launch()) is not None:
            if started.rank is None:
                raise UsageError(
                    f"{started.launcher} started {started.size} processes ({started.variable}="
                    f"{started.size}), and this one has no number among them yet",
                    remedy=f"connect them before the loader is made, or {_PASS}",
                )
            found = {started.launcher: cls(started.rank, started.size)}
        if len(set(found.values())) > 1:
            answers = " and ".join(f"{rank} of {size} for {job}" for job, (rank, size, _) in found.items())
            raise UsageError(f"this process is rank {answers}", remedy=_PASS)
        job, place = next(iter(found.items()), ("", cls()))
        if place.size > 1 and place.rank == 0:
            logger.warning(
                "a data loader is divided between all %d ranks of %s; %s if some of them read the same",
                place.size,
                job,
                _PASS,
            )
        return place


def _of_torch() -> tuple[str, ReaderPlace] | None:
    """Return the place in torch's default process group, None without such a group."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return "torch.distributed", ReaderPlace(dist.get_rank(), dist.get_world_size())


def _of_jax() -> tuple[str, ReaderPlace] | None:
    """Return the place among the processes of JAX, None before ``jax.distributed.initialize``.

    `jax.process_index` has the same number, but starts JAX on all devices.
    """
    distributed = sys.modules.get("jax._src.distributed")
    state = getattr(distributed, "global_state", None)
    if state is None or state.client is None:
        return None
    return "jax.distributed", ReaderPlace(state.process_id, state.num_processes)


_FORM = 1
"""Of the replicated state and the shards."""


class TokenLoader:
    """An iterator of `Batch`es: this rank's share of the token sets, in micro-batches of `token_budget`.

    Samples are read into a token buffer of `buffer_tokens` (four batches, if not given), and leave it first
    in, first out, as far as they fit into a batch.  Token sets take turns so that each has its `ratio` of the
    tokens until it is exhausted.  With `shuffle`, the order of a source's samples depends only on `seed`,
    epoch and source.  `epochs` is the number of passes, None for endless.  Tokens have `dtype`; batches are
    padded with `padding`.

    `place` says which part of the data this rank reads; without it, all ranks of the job are data-parallel
    (`ReaderPlace.of_job`).  With `num_workers`, that many processes read and
    pack, `prefetch` batches ahead; batches of the workers come round robin, always in the same order.  With
    `in_process` the workers run in this process.  With `save_every`, workers have their state ready whenever
    that many batches were taken since the last save or load, so that a save does not wait (`expect_save`).

    Put it into the state that is saved and loaded.  On the same number of ranks and workers it continues with
    the very same batches; on others all sources are reassigned, with the samples that wait in buffers.  No
    sample is lost or repeated, and those of a source keep their order.  A batch that was taken counts as
    consumed.
    """

    def __init__(
        self,
        token_sets: Sequence[TokenSet],
        *,
        token_budget: int,
        place: ReaderPlace | None = None,
        num_workers: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = 1,
        buffer_tokens: int | None = None,
        dtype: str = "int32",
        padding: int = 0,
        prefetch: int = 2,
        save_every: int | None = None,
        in_process: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        self.place = ReaderPlace.of_job() if place is None else place
        rank, size, replica = self.place
        _check(token_budget >= 1, "token_budget is at least 1")
        _check(epochs is None or epochs >= 1, "epochs is at least 1, or None for ever")
        _check(save_every is None or save_every >= 1, "save_every is at least 1, or None")
        _check(num_workers >= 0 and prefetch >= 0, "num_workers and prefetch are not negative")
        _check(0 <= rank < size and replica >= 0, f"there is no place {rank} of {size}, replica {replica}")
        buffered = 4 * token_budget if buffer_tokens is None else buffer_tokens
        _check(buffered >= 1, "buffer_tokens is at least 1")
        self._recipe = Recipe(
            token_budget=token_budget,
            buffer_tokens=buffered,
            seed=seed,
            shuffle=shuffle,
            epochs=epochs,
            dtype=dtype,
            padding=padding,
        )
        self._readers = Readers(size, max(num_workers, 1))
        self._processes = num_workers > 0 and not in_process
        self._depth = prefetch if num_workers else 0
        self._timeout_s = timeout_s
        self._save_every = save_every
        self._corpus = Corpus(token_sets)
        filled = sum(source.length > 0 for source in self._corpus.sources)
        _check(
            epochs is not None or filled >= size,
            f"{size} ranks cannot read {filled} sources for ever: split the token sets into more partitions",
        )
        self._kinds = [source.token_set for source in self._corpus.sources]
        self._workers: list[Worker] = []
        self._ended: set[int] = set()
        self._until_save = save_every or 0
        weakref.finalize(self, _close, self._workers)

    # Reading.

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        workers = self._started()
        # The worker that has given least is next: so they take turns without a counter that has to be saved.
        while live := self._live():
            number = min(live)[1]
            batch = workers[number].take()
            if batch is not None:
                self._until_save -= 1
                if self._until_save <= 0:
                    self._plan_next()
                return batch
            self._ended.add(number)
        raise StopIteration

    def expect_save(self, in_batches: int = 1) -> None:
        """Let workers prepare their state as of that many batches from now, for a planned save."""
        workers = self._started()
        if self.place.replica:
            return
        given = [worker.given for worker in workers]
        live = [number for _, number in self._live()]
        for _ in range(in_batches if live else 0):
            given[min(live, key=lambda number: (given[number], number))] += 1
        for worker, count in zip(workers, given, strict=True):
            worker.prepare(count)

    @property
    def worker_pids(self) -> list[int]:
        """Ids of the worker processes, which are started by the first use."""
        return [worker.pid for worker in self._started() if isinstance(worker, ProcessWorker)]

    def close(self) -> None:
        """End the worker processes; a loader that is used again starts new ones, from the beginning."""
        _close(self._workers)

    def _live(self) -> list[tuple[int, int]]:
        """Return the number of batches of each worker, and its own number, for workers that may have more."""
        return [(w.given, n) for n, w in enumerate(self._workers) if n not in self._ended]

    def _plan_next(self) -> None:
        if self._save_every is not None:
            self._until_save = self._save_every
            self.expect_save(self._save_every)

    def _started(self) -> list[Worker]:
        """Return the workers; without any, start them from the beginning."""
        if not self._workers:
            lengths = [source.length for source in self._corpus.sources]
            self._start(unread(lengths, self._kinds, self._readers, self.place.rank), same=False)
        return self._workers

    def _start(self, shards: Sequence[LoaderShard], *, same: bool) -> None:
        """Replace the workers by new ones that read this rank's shards."""
        self.close()
        self._ended = set()
        states: list[dict[int, Any]] = [{} for _ in range(self._readers.num_workers)]
        for shard in shards:
            states[shard.worker][shard.source] = shard.value
        try:
            for mine in states:
                self._workers.append(self._worker(mine, same=same))
        except BaseException:
            self.close()  # some of the workers would read only a part of the sources
            raise
        self._plan_next()

    def _worker(self, states: dict[int, Any], *, same: bool) -> Worker:
        sets, recipe, depth = self._corpus.sets, self._recipe, self._depth
        if self._processes:
            return ProcessWorker(sets, recipe, states, same=same, depth=depth, timeout_s=self._timeout_s)
        return LocalWorker(Reader(self._corpus, recipe, states, same=same), depth)

    # The state in a checkpoint (`protocols.ShardOwned`).

    def replicated_state(self) -> dict[str, Any]:
        """Return the common state of all ranks: the recipe, and the number of readers."""
        return {
            "form": _FORM,
            "ranks": self._readers.num_ranks,
            "workers": self._readers.num_workers,
            **self._fixed(),
            "token_budget": self._recipe.token_budget,
        }

    def _fixed(self) -> dict[str, Any]:
        """Return the values that must be equal when a run resumes."""
        corpus = self._corpus
        sets = zip(corpus.sets, corpus.lengths, strict=True)
        return {
            "token_sets": [{"name": s.name, "length": n, "partitions": s.num_partitions} for s, n in sets],
            "seed": self._recipe.seed,
            "shuffle": self._recipe.shuffle,
            "dtype": self._recipe.dtype,
        }

    def sharded_state(self) -> list[LoaderShard]:
        """Return the state of all sources that this rank reads, as of the last batch that was taken."""
        if self.place.replica:
            return []
        workers = self._started()
        for worker in workers:
            worker.prepare(worker.given)  # all of them at once, unless this was sent before
        found = [
            shard._replace(rank=self.place.rank, worker=number)
            for number, worker in enumerate(workers)
            for shard in worker.shards()
        ]
        self._plan_next()
        return found

    def choose_shards(self, replicated: Any, saved: Sequence[LoaderShard]) -> list[LoaderShard]:
        """Return the shards with which this rank continues.  Raises `StateError` for other data."""
        before = self._checked(replicated)
        return shards_of_rank(saved, self._kinds, before, self._readers, self.place.rank)

    def load_shards(self, replicated: Any, shards: Sequence[LoaderShard]) -> None:
        """Continue with these shards; drop the batches that workers have made ahead."""
        self._start(shards, same=self._checked(replicated) == self._readers)

    def _checked(self, replicated: Any) -> Readers:
        """Return the readers of the saved loader.  Raises `StateError` if this one cannot continue."""
        if not isinstance(replicated, Mapping) or replicated.get("form") != _FORM:
            raise StateError(
                "the saved value is not a state of a token loader that this version of reknit supports"
            )
        for name, here in self._fixed().items():
            if replicated.get(name) != here:
                raise StateError(
                    f"the loader that was saved has {name} = {replicated.get(name)!r}, and this one {here!r}",
                    remedy="read the same data in the same order; ratios, epochs and the layout may change",
                )
        if replicated["token_budget"] > self._recipe.token_budget:
            raise StateError(
                f"items for batches of {replicated['token_budget']} tokens wait in the saved buffers, and "
                f"batches have {self._recipe.token_budget} here",
                remedy="keep the token budget, or choose a larger one",
            )
        return Readers(int(replicated["ranks"]), int(replicated["workers"]))


def _close(workers: list[Worker]) -> None:
    """End all workers at the same time."""
    for worker in workers:
        worker.leave()
    for worker in workers:
        worker.close()
    workers.clear()


def _check(ok: object, message: str) -> None:
    if not ok:
        raise UsageError(message)
