"""The call in the place of `ray.train.report` with which a training function of Ray Train saves.

All workers save one checkpoint together, through a `reknit.Checkpointer`.  Training continues while it is
written.  Ray registers it after its commit, from its own upload thread, as a small checkpoint of Ray that
names the place.  So any number of workers can resume, with `Checkpointer.resume`.
"""

from __future__ import annotations

import secrets
import socket
from functools import partial
from importlib import import_module
from numbers import Real
from typing import TYPE_CHECKING, Any

import reknit
from reknit.errors import MissingExtraError, ReknitError, UsageError, typed
from reknit.integrations.formats.import_ import ImportReport, import_checkpoint
from reknit.integrations.private_hooks import private

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from reknit import Checkpointer, PendingSave


class _ImportRank:
    """A rank of an import, in a process of its own."""

    def address(self) -> str:
        """Return an address of this host at which the ranks can meet."""
        ray: Any = import_module("ray")
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def run(self, rank: int, size: int, at: str, token: str, *, arguments: dict[str, Any]) -> ImportReport:
        """Import together with the other ranks, and return the report."""
        group = reknit.connect(rank, size, at=f"tcp://{at}", token=token, job="import")
        try:
            return import_checkpoint(**arguments, group=group)
        finally:
            group.close()


def import_on_ray(
    path: str | PathLike[str],
    to: str | PathLike[str],
    num_ranks: int,
    *,
    step: int | None = None,
    weights: str | None = None,
    overwrite: bool = False,
    workers: int | None = None,
) -> ImportReport:
    """Import as `import_checkpoint` does, with this many processes of a Ray cluster, of one core each.

    They are spread over the hosts, all of which reach both places under the same path or URL.  The cluster is
    the one that this process is connected to, or finds as Ray does (``RAY_ADDRESS``); otherwise Ray starts
    one on this host.  Raises `MissingExtraError` without Ray, and the errors of `import_checkpoint`.
    """
    if type(num_ranks) is not int or num_ranks < 1:
        raise UsageError(f"the number of ranks on Ray is a whole number from 1 on, not {num_ranks!r}")
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise MissingExtraError("Ray is not installed", remedy="pip install 'reknit[ray]'") from error
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False)
    try:
        options = {"step": step, "weights": weights, "overwrite": overwrite, "workers": workers}
        return _imported(ray, num_ranks, {"path": path, "to": to, **options})
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, ReknitError) else typed(error)) from None
    except ray.exceptions.RayError as error:
        raise typed(error) from error
    finally:
        if started:
            ray.shutdown()


def _imported(ray: Any, num_ranks: int, arguments: dict[str, Any]) -> ImportReport:
    if num_ranks > (cores := int(ray.cluster_resources().get("CPU", 0))):
        raise UsageError(f"the Ray cluster has {cores} cores for {num_ranks} ranks", remedy="ask for fewer")
    actor: Any = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(_ImportRank)
    actors = [actor.remote() for _ in range(num_ranks)]
    at, token = ray.get(actors[0].address.remote()), secrets.token_hex()
    running = [
        each.run.remote(rank, num_ranks, at, token, arguments=arguments) for rank, each in enumerate(actors)
    ]
    report: ImportReport = ray.get(running)[0]
    return report


_PATH, _STEP = "reknit_path", "reknit_step"
"""The names of the place and the step in the metadata of a checkpoint of Ray."""


def report(
    metrics: Mapping[str, Any],
    checkpointer: Checkpointer,
    step: int,
    state: Mapping[str, Any],
    *,
    force: bool = False,
) -> PendingSave | None:
    """Save `state` as it is after `step`, if the policy or `force` demands that, and report the metrics.

    All workers call it, as they do `ray.train.report`.  Without a save, only the metrics are reported, and
    the result is None.  Numbers among the metrics are also stored with the step.  The state may change as
    soon as this returns.  A save that fails later ends the training function, as a failed upload does.

    Raises `MissingExtraError`, and the errors of `Checkpointer.save`.
    """
    train = _ray_train()
    metrics = dict(metrics)
    numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, Real)}
    pending = checkpointer.save(step, state, numbers, force=force)
    if pending is None or pending.skipped:
        train.report(metrics)
        return None
    train.report(
        metrics,
        # Ray gives the place to `_committed` only, but it wants a checkpoint here.
        checkpoint=_in_storage(train, ""),
        checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=partial(_committed, train, pending, step),
        delete_local_checkpoint_after_upload=False,
    )
    return pending


def saved_path(checkpoint: Any) -> str:
    """Return the path or URL at which `report` saved a checkpoint of Ray, for `reknit.load`.

    The policy of the Checkpointer may have removed that step since; `reknit.latest` names the newest one.

    Raises `UsageError` for a checkpoint that `report` did not make.
    """
    found = checkpoint.get_metadata().get(_PATH)
    if not isinstance(found, str):
        raise UsageError(
            f"{checkpoint} was not reported by reknit.integrations.ray.report",
            remedy="open it with the calls that wrote it",
        )
    return found


def _committed(train: Any, pending: PendingSave, step: int, _: Any, name: str) -> Any:
    """Wait for the commit of a save; return the checkpoint of Ray that names its place.

    Every worker waits, so that a failure is raised on all of them.  Ray registers the checkpoint when all
    workers have returned it.
    """
    path = pending.result().path
    checkpoint = _in_storage(train, name)
    if train.get_context().get_world_rank() == 0:
        checkpoint.filesystem.create_dir(checkpoint.path)
        checkpoint.set_metadata({_PATH: path, _STEP: step})
    return checkpoint


def _in_storage(train: Any, name: str) -> Any:
    """Return the checkpoint of Ray with a name in the folder of this run, where Ray manages it."""
    storage = train.get_context().get_storage()
    path = private("ray", storage, "build_checkpoint_path_from_name")(name)
    return train.Checkpoint(path, filesystem=storage.storage_filesystem)


def _ray_train() -> Any:
    try:
        import ray.train
    except ImportError as error:
        raise MissingExtraError(
            f"reknit.integrations.ray needs Ray Train: {error}", remedy="pip install 'reknit[ray]'"
        ) from None
    return ray.train
