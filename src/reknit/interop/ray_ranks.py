"""Ranks in the processes of a Ray cluster, for imports that would take one host too long."""

from __future__ import annotations

import secrets
import socket
from importlib import import_module
from typing import TYPE_CHECKING, Any

from reknit import ranks
from reknit.errors import MissingExtraError, ReknitError, UsageError, typed
from reknit.interop.import_foreign import ImportReport, import_checkpoint

if TYPE_CHECKING:
    from os import PathLike


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
        group = ranks.connect(rank, size, at=f"tcp://{at}", token=token, job="import")
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
