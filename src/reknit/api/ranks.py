"""The ranks that act together in a save or a load, and their connections."""

from __future__ import annotations

import operator
import os
import sys
import weakref
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast
from urllib.parse import urlsplit
from urllib.request import url2pathname

from msgspec import Struct

from reknit import plugins, system
from reknit.comm.group import SoloGroup, barrier, quietly
from reknit.environment import launch, store_token
from reknit.errors import UsageError
from reknit.frameworks.torch.torch_job import TorchCarrier, TorchStore, current_job, subgroup_job
from reknit.keywords import checked_call, is_text
from reknit.options import CommOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.group import Group
    from reknit.comm.meeting.rendezvous import Store
    from reknit.frameworks import TrainingJob


class ProcessGroup(Protocol):
    """The interface of a process group of torch, as far as users pass one."""

    def rank(self) -> int:
        """Return this rank's number in the group."""

    def size(self) -> int:
        """Return the number of ranks."""


class MeetingStore(Protocol):
    """The interface of a store of torch.distributed, as far as ranks meet there."""

    def wait(self, keys: Any, /) -> object:
        """Wait until all keys are there."""

    def check(self, keys: Any, /) -> bool:
        """Return whether all keys are there."""


AnyGroup: TypeAlias = "Group | ProcessGroup"

_alone: dict[int | None, SoloGroup] = {}


@checked_call
def alone() -> Group:
    """Return a group of this process alone, to pass as `group=` where a launcher started several processes.

    Each of them then saves and loads by itself, to and from a path of its own.
    """
    return _alone_as(None)


def _alone_as(generation: int | None) -> SoloGroup:
    """Return the group of a process that is alone, the same one each time for a generation or None."""
    # Not `functools.cache`, which gives two threads that come at once two groups.
    return _alone.setdefault(generation, SoloGroup(generation))


_trees: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()


os.register_at_fork(after_in_child=lambda: system.inherited.update(_trees))


class Ranks(Struct, frozen=True):
    """The group of ranks that act together, their ranks in torch, and the transport of bytes between them."""

    group: Group
    ranks: Sequence[int] | None
    carrier: Callable[[], TorchCarrier] | None


def acting(group: AnyGroup | None, options: CommOptions) -> Ranks:
    """Return the ranks that act together.

    `group` is a torch process group, a group of reknit (`comm.group.Group`), or None.  None stands for all
    ranks of torch's job, for all processes of JAX's job, or for a process that is alone.  Raises `UsageError`
    if torch and JAX have different jobs, or if a launcher started several processes without a connection:
    each of them would overwrite the saves of the others.
    """
    if group is not None and group is _alone.get(None):
        return Ranks(_alone_as(options.generation), None, None)
    if group is not None and hasattr(group, "give"):
        return Ranks(cast("Group", group), None, None)
    job = _of_all() if group is None else subgroup_job(group)
    if job is None:
        _check_launch()
    if job is None or job.size == 1:
        return Ranks(_alone_as(options.generation), None if job is None else job.ranks, None)
    carrier = partial(TorchCarrier, weakref.ref(job.identity)) if isinstance(job.store, TorchStore) else None
    return Ranks(_joined(job, options), job.ranks, carrier)


def _check_launch() -> None:
    """Raise `UsageError` if this process, which is in no job, was started with others."""
    if (started := launch()) is None:
        return
    torch_call, jax_call = "torch.distributed.init_process_group()", "jax.distributed.initialize()"
    if started.variable == "JAX_NUM_PROCESSES" or ("jax" in sys.modules and "torch" not in sys.modules):
        calls = jax_call
    else:
        calls = f"{torch_call} or {jax_call}" if "jax" in sys.modules else torch_call
    raise UsageError(
        f"{started.launcher} started {started.size} processes ({started.variable}={started.size}), but this "
        f"one is not connected to the others: each would act alone, on the same path",
        remedy=f"call {calls} before this call, in every process; pass group=reknit.alone() only if this "
        f"process is to save and load by itself",
    )


def own_rank() -> int:
    """Return the rank of this process in the job of torch or another library, else 0, without any message."""
    job = current_job() or next(iter(_other_jobs().values()), None)
    return 0 if job is None else job.rank


def _other_jobs() -> dict[str, TrainingJob]:
    """Return the jobs of libraries other than torch that connect this process, by library."""
    found = plugins.present("reknit.jobs")
    return {name: job for name, current in found if (job := current()) is not None} if found else {}


def _of_all() -> TrainingJob | None:
    """Return the job to act in: torch's where several libraries have jobs of the same processes.

    Raises `UsageError` where the processes differ.
    """
    jobs = _other_jobs() if (of_torch := current_job()) is None else {"torch": of_torch, **_other_jobs()}
    if not jobs:
        return None
    (first, job), *others = jobs.items()
    for name, other in others:
        if (job.rank, job.size) != (other.rank, other.size):
            raise UsageError(
                f"this process is rank {job.rank} of {job.size} for {first}.distributed and process "
                f"{other.rank} of {other.size} for {name}.distributed",
                remedy="give both the same numbers, or pass group=reknit.connect(rank, size, at=...)",
            )
    return job


def _joined(job: TrainingJob, options: CommOptions) -> Group:
    """Return the tree of a job's ranks, joined once for as long as torch's group lives."""
    if job.identity in system.inherited:
        from reknit.comm.round_errors import forked

        raise forked(job.rank)
    group = _trees.get(job.identity)
    if group is None:
        group = _tree(job.store, job.rank, job.size, "reknit", options)
        _trees[job.identity] = group
        weakref.finalize(job.identity, group.close)
    return group


def _tree(store: Store, rank: int, size: int, job: str, options: CommOptions) -> Group:
    from reknit.comm.tree.tree_group import TreeGroup  # a job of one rank does not need it

    return TreeGroup.join(store, rank, size, job=job, options=options)


@checked_call
def connect(
    rank: int,
    size: int,
    *,
    at: str | os.PathLike[str] | MeetingStore,
    job: str = "job",
    token: str | None = None,
    options: CommOptions | None = None,
) -> Group:
    """Return the group of `size` processes of a job without torch.distributed, once all of them are there.

    Pass it as `group=` to `reknit.save`, `reknit.load` and `reknit.prepare`, and close it at the end.  Every
    process calls this once with a `rank` of its own, and with equal `at` and `job`.  `at` is the meeting
    place: a folder that all processes see, as a path or ``file://`` URL; ``tcp://host:port``, a free port of
    the host of rank 0; a store of torch, such as a ``TCPStore``; or ``jax://``, after
    ``jax.distributed.initialize``.  `job` separates groups that meet in one place at the same time; a job
    that is started again may use the same name.

    For ``tcp://``, `token` is a secret of at least 16 letters, the same for all, or stands in the environment
    variable ``REKNIT_TOKEN``.  Every process with this secret can take part; with the other meeting places,
    every process that can list or read the folder or the store.

    Raises `DeadlineError` naming the ranks that did not come within `options.connect_timeout_s`, `CommError`
    when a token is wrong or a process cannot be reached, `UsageError`.
    """
    if options is not None and not isinstance(options, CommOptions):
        raise UsageError(f"options is a reknit.CommOptions here, not a {type(options).__name__}")
    options = options or CommOptions()
    rank, size = _whole("rank", rank), _whole("size", size)
    if not 0 <= rank < size:
        raise UsageError(f"rank must be within 0 .. size - 1, not {rank} of {size}")
    if not is_text(job):
        raise UsageError(f"job is a name, not {job!r}")
    with ExitStack() as meeting:
        store = _meeting_store(at, rank, size, options, token=token, last=meeting)
        if size == 1:
            return SoloGroup(options.generation)
        group = _tree(store, rank, size, job, options)
        try:
            # When all have come out of this round, none needs the store any more.
            barrier(group, "connect", options.connect_timeout_s)
        except BaseException:
            group.close()
            raise
    return group


def _whole(name: str, number: Any) -> int:
    try:
        return operator.index(number)
    except TypeError as error:
        raise UsageError(f"{name} is a whole number, not {number!r}") from error


def _meeting_store(
    at: Any, rank: int, size: int, options: CommOptions, *, token: str | None, last: ExitStack
) -> Store:
    """Return the store in which ranks meet; `last` closes it, if necessary.  Raises `UsageError`."""
    scheme, colon, _ = at.partition("://") if isinstance(at, str) else ("", "", "")
    if colon and scheme.lower() == "tcp":
        return _addressed(at, rank, size, options, token=token, last=last)
    if token is not None:
        raise UsageError("a token is for at='tcp://host:port' only")
    if colon and scheme.lower() == "file":
        parts = urlsplit(at)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise UsageError(f"{at!r} names no folder of this host", remedy="write file:///path/of/folder")
        return _folder_store(url2pathname(parts.path))
    if colon and (meeting := plugins.find("reknit.jobs", f"{scheme.lower()}://", f"at={at!r}")) is not None:
        return cast("Store", meeting("reknit/connect"))
    if not colon and isinstance(at, (str, os.PathLike)) and os.fspath(at):
        return _folder_store(at)
    if hasattr(at, "wait") and hasattr(at, "check"):
        return TorchStore(at, "reknit/connect")
    raise UsageError(
        f"ranks cannot meet at {at!r}",
        remedy="give a folder, 'tcp://host:port', a store of torch.distributed, or 'jax://'",
    )


def _folder_store(folder: str | os.PathLike[str]) -> Store:
    from reknit.comm.meeting.rendezvous import FolderStore  # most ranks meet in torch's own store

    return FolderStore(folder)


def _addressed(
    at: str, rank: int, size: int, options: CommOptions, *, token: str | None, last: ExitStack
) -> Store:
    """Return the store at an address: rank 0 serves it, the others connect."""
    with quietly():
        from reknit.comm.meeting import address_store  # it speaks gRPC

    point = address_store.Point.of(at)
    secret = address_store.checked_token(store_token() if token is None else token)
    if rank == 0 and size > 1:
        from reknit.comm.meeting.address_store import ServedStore

        return last.enter_context(ServedStore(point, size, secret, options))
    remote = address_store.RemoteStore(point, secret, options)
    last.callback(remote.close)
    return remote
