"""The contestants: reknit, torch DCP and Megatron's dist_checkpointing, each as its users call it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

import reknit

if TYPE_CHECKING:
    from benchmarks.rivals.background import UnderWay

OURS, DCP, MCP = "reknit", "DCP", "MCP"
"""MCP is the name of the paper for Megatron's dist_checkpointing."""

WRITERS = 2
"""Writer threads of a rank, for all contestants."""


class Job(Protocol):
    """A training whose state is saved beside it, and loaded again."""

    def save(self, path: str) -> UnderWay:
        """Begin a save to a new folder; the state may be changed when this returns."""

    def load(self, path: str) -> None:
        """Load a checkpoint into the training."""

    def close(self) -> None:
        """End all that runs beside the training."""


class ReknitJob:
    """A training that reknit saves."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def save(self, path: str) -> UnderWay:
        # No step of the optimizer lies between two saves, so that nothing must be taken from the last one.
        options = reknit.SaveOptions(reuse=False)
        return _Pending(reknit.save(path, self._state, wait=False, options=options))

    def load(self, path: str) -> None:
        reknit.load(path, self._state)

    def close(self) -> None:
        reknit.close()


class _Pending:
    """A save under way whose `result` waits for the checkpoint."""

    def __init__(self, handle: Any) -> None:
        self.result, self.done = handle.result, handle.done

    def staged(self) -> None:
        """Return at once."""


class DcpJob:
    """A training by FSDP that torch DCP saves: a reused stager, cached plans, and HDFS by fsspec."""

    def __init__(self, state: dict[str, Any]) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._model, self._optimizer = state["model"], state["optimizer"]
        # `async_save` uses collectives in the background, so it cannot share the trainer's group.
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(StagingOptions(False, False, False, False))

    def save(self, path: str) -> UnderWay:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.state_dict_saver import async_save

        return _Pending(
            async_save(
                self._state(),
                storage_writer=_writer(path),
                planner=DefaultSavePlanner(enable_plan_caching=True),
                async_stager=self._stager,
                process_group=self._group,
            )
        )

    def load(self, path: str) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        checkpoint.load(state, storage_reader=_reader(path))
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def close(self) -> None:
        self._stager.close()

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


def _writer(path: str) -> Any:
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    if path.startswith("hdfs://"):
        from benchmarks.paper.jobs import dcp_hdfs

        dcp_hdfs.register()
        return FsspecWriter(path, thread_count=WRITERS, sync_files=False)  # fsync is not in fsspec
    return FileSystemWriter(path, thread_count=WRITERS)


def _reader(path: str) -> Any:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    if path.startswith("hdfs://"):
        from benchmarks.paper.jobs import dcp_hdfs

        dcp_hdfs.register()
        return FsspecReader(path)
    return FileSystemReader(path)


class McpJob:
    """A training by Megatron-Core that its own package saves: fully parallel, with cached plans."""

    def __init__(self, trained: Any) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._trained, self._strategy = trained, _save_strategy()
        self._queue = AsyncCallsQueue()

    def save(self, path: str) -> UnderWay:
        import torch.distributed as dist
        from megatron.core import dist_checkpointing

        if dist.get_rank() == 0:
            os.makedirs(path, exist_ok=True)
        dist.barrier()
        request = dist_checkpointing.save(
            self._state(loading=False),
            path,
            sharded_strategy=self._strategy,
            validate_access_integrity=False,  # as after the first save of Megatron-LM
            async_sharded_save=True,
        )
        self._queue.schedule_async_request(request)
        return _Queued(self._queue)

    def load(self, path: str) -> None:
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self._state(loading=True), path)
        self._trained.chunks[0].module.load_state_dict(loaded["model"])
        self._trained.optimizer.load_state_dict(loaded["optimizer"])

    def close(self) -> None:
        self._queue.close()

    def _state(self, *, loading: bool) -> dict[str, Any]:
        # The one format of this version that can be loaded in every other layout.
        how = {"distrib_optim_sharding_type": "fully_reshardable", "non_homogeneous_layers": True}
        model = self._trained.chunks[0].module.sharded_state_dict(metadata=how)
        optimizer = self._trained.optimizer.sharded_state_dict(model, is_loading=loading, metadata=how)
        return {"model": model, "optimizer": optimizer}


class _Queued:
    """A save of Megatron's queue."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def staged(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        self._queue.maybe_finalize_async_calls(blocking=False)
        return not self._queue.get_num_unfinalized_calls()

    def result(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)


def _save_strategy() -> Any:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    inner = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=WRITERS)
    inner.use_cached_ckpt_structure = True
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return FullyParallelSaveStrategyWrapper(inner, group, do_cache_distribution=True)
