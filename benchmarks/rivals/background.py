"""Libraries that save in the background: reknit, every mode of torch DCP, and torch_checkpointing."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import reknit
from benchmarks.rivals.waiting import managed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class UnderWay(Protocol):
    """A save under way."""

    def staged(self) -> None:
        """Wait until the state may be changed."""

    def done(self) -> bool:
        """Return whether the save has ended."""

    def result(self) -> Any:
        """Wait for the checkpoint, or raise the error of the save."""


@dataclass
class Contender:
    """A way to save: `start` begins a save to a new folder."""

    name: str
    start: Callable[[str], UnderWay]
    close: Callable[[], None] = field(default=lambda: None)


class ReknitSave:
    """A save by reknit: staged eagerly, so the state may be changed once `save` returns."""

    def __init__(self, url: str, state: dict[str, Any]) -> None:
        self._pending = reknit.save(url, state, wait=False)

    def staged(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        return self._pending.done()

    def result(self) -> Any:
        return self._pending.result()


def reknit_contender(state: dict[str, Any]) -> Contender:
    return Contender("reknit", lambda path: ReknitSave(path, state))


def prepared_contender(state: dict[str, Any], folder: str) -> Contender:
    """Return reknit after `prepare`, which makes agents, plan and arenas before the first save."""
    reknit.close()
    reknit.prepare(folder, state)
    return Contender("reknit, prepared", lambda path: ReknitSave(path, state))


class LazySave(ReknitSave):
    """A save by reknit that copies while training goes on; the next step of the optimizer waits for it."""

    def __init__(self, url: str, state: dict[str, Any]) -> None:
        self._pending = reknit.save(url, state, wait=False, options=reknit.SaveOptions(stage="lazy"))
        self._step = state["optimizer"].step

    def result(self) -> Any:
        """Wait for the checkpoint, and take a step, without which no later save would be lazy."""
        report = super().result()
        self._step()
        return report


def lazy_contender(state: dict[str, Any]) -> Contender:
    """Return reknit that stages lazily, with the same tensors as parameters and states of an optimizer."""
    import torch

    model = {name: torch.nn.Parameter(tensor) for name, tensor in state["model"].items()}
    optimizer = torch.optim.AdamW(list(model.items()))  # without gradients its steps change nothing
    for name, parameter in model.items():
        optimizer.state[parameter] = state["optimizer"]["state"][name]
    owned = {"model": model, "optimizer": optimizer}
    return Contender("reknit, lazy", lambda path: LazySave(path, owned))


def slow_contender(state: dict[str, Any], sleep_s: float) -> Contender:
    """Return reknit on a storage that sleeps `sleep_s` per file."""
    from benchmarks.slow_store import open_slow
    from reknit.storage.registry import register

    register("slow", open_slow)
    return Contender(
        f"reknit, {sleep_s:g} s per file", lambda path: ReknitSave(f"slow://{sleep_s:g}{path}", state)
    )


class DcpSave:
    """A save by `async_save`, with a response of any kind."""

    def __init__(self, answer: Any) -> None:
        self._staging = getattr(answer, "staging_completion", None)
        self._upload = getattr(answer, "upload_completion", answer)

    def staged(self) -> None:
        """Wait for staging, if it runs in the background."""
        if self._staging is not None:
            self._staging.result()

    def done(self) -> bool:
        return bool(self._upload.done())

    def result(self) -> Any:
        return self._upload.result()


@dataclass(frozen=True)
class DcpBackgroundMode:
    """One setting of torch DCP.

    `stager` is ``"none"`` for the default of `async_save`, and ``"writer"`` for a `FileSystemWriter` that
    keeps the copy.  ``"reused"`` is one `DefaultStager` for all saves, in shared memory for a process; with
    ``"reused, asynchronous"`` it also copies in its own thread.  All but ``"none"`` cache plans.  Pinned
    memory needs a GPU.
    """

    process: bool
    stager: str
    threads: int

    @property
    def name(self) -> str:
        threads = f"{self.threads} writer thread" + "s" * (self.threads > 1)
        return f"DCP {'process' if self.process else 'thread'}, stager {self.stager}, {threads}"


# The number of writer threads does not change staging: only one kind of stager is tried with all of them.
DCP_MODES = (
    *(DcpBackgroundMode(False, "reused", threads) for threads in (1, 2, 4)),
    *(DcpBackgroundMode(True, "reused", threads) for threads in (1, 2, 4)),
    DcpBackgroundMode(False, "reused, asynchronous", 2),
    DcpBackgroundMode(True, "reused, asynchronous", 2),
    DcpBackgroundMode(False, "writer", 2),
    DcpBackgroundMode(False, "none", 1),
    DcpBackgroundMode(True, "none", 1),
)
DCP_QUICK_MODES = (DcpBackgroundMode(False, "reused", 2), DcpBackgroundMode(True, "reused", 2))


def dcp_contenders(
    state: dict[str, Any], modes: tuple[DcpBackgroundMode, ...]
) -> Iterator[tuple[str, Callable[[], Contender]]]:
    """Yield the name of every mode, and a function that makes its contender."""
    import torch.distributed as dist

    # `async_save` uses collectives in the background, so it cannot share the trainer's group.
    group = dist.new_group(backend="gloo")
    for mode in modes:
        yield mode.name, functools.partial(_dcp_contender, state, mode, group)


def _dcp_contender(state: dict[str, Any], mode: DcpBackgroundMode, group: Any) -> Contender:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

    kind = AsyncCheckpointerType.PROCESS if mode.process else AsyncCheckpointerType.THREAD
    common: dict[str, Any] = {"process_group": group, "async_checkpointer_type": kind}
    if mode.stager == "none":
        return Contender(mode.name, lambda path: DcpSave(async_save(state, checkpoint_id=path, **common)))
    common["planner"] = DefaultSavePlanner(enable_plan_caching=True)
    if mode.stager == "writer":
        writer = FileSystemWriter("", thread_count=mode.threads, cache_staged_state_dict=True)
        return Contender(
            mode.name,
            lambda path: DcpSave(async_save(state, checkpoint_id=path, storage_writer=writer, **common)),
        )
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=mode.process,
            use_async_staging="asynchronous" in mode.stager,
            use_non_blocking_copy=False,
        )
    )

    def start(path: str) -> UnderWay:
        writer = FileSystemWriter(path, thread_count=mode.threads)
        return DcpSave(async_save(state, storage_writer=writer, async_stager=stager, **common))

    return Contender(mode.name, start, stager.close)


def end_dcp_process() -> None:
    """End the process that DCP keeps for its process mode, for which it has no public function."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    executor._CHECKPOINT_PROCESS = None


class ManagedSave:
    """A save by torch_checkpointing's manager."""

    def __init__(self, manager: Any, path: str, state: dict[str, Any]) -> None:
        self._manager = manager
        self._written = manager.save(path, state)

    def staged(self) -> None:
        """Pass the lock that guards changes of the state."""
        with self._manager.lock():
            pass

    def done(self) -> bool:
        return bool(self._written.done())

    def result(self) -> Any:
        return self._written.result()


def torch_checkpointing_contender(state: dict[str, Any]) -> Contender:
    """Return torch_checkpointing with the settings that a CPU can use.

    Two things make it cheaper than the others here.  It never syncs its files.  And without a GPU it cannot
    gather the metadata for resharding, so only the same rank can load the file of a rank.
    """
    package = importlib.import_module("torch_checkpointing")
    writer = importlib.import_module("torch_checkpointing.checkpoint_writer")
    config = writer.CheckpointWriterConfig(file_write_max_threads=2)
    manager = managed("AsyncCheckpointSaverConfig", writer_config=config)
    return Contender(
        f"torch_checkpointing {package.__version__}, no sync",
        lambda path: ManagedSave(manager, path, state),
        manager.close,
    )
