"""The ranks of a torch job, the store through which they connect, and bytes sent by its groups."""

from __future__ import annotations

import hashlib
import sys
import time
from contextlib import ExitStack, contextmanager
from time import sleep
from typing import TYPE_CHECKING, Any

from reknit.errors import CommError, DeadlineError, ShortageError, UsageError
from reknit.frameworks import TrainingJob
from reknit.frameworks.torch import torch_private
from reknit.types import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


_PAUSE_S = 0.0005
_CPU = "cpu"
_REMEDY = 'a rank has probably ended; LoadOptions(share="never") loads without it'
_DEVICE_REMEDY = (
    "a rank has probably ended, or several have the same current device: give each its own, for example with "
    'torch.cuda.set_device; LoadOptions(share="never") loads without the group'
)


class TorchCarrier:
    """A process group that carries bytes between hosts (see `engine.sharing.host_exchange.Carrier`).

    They are sent from host memory to host memory if the group has a backend for that, such as gloo.
    Otherwise they are sent over the devices of its backend, such as NCCL.  A group that is bound to a device
    with a backend of its own (`init_process_group(device_id=...)`) sends them over that device.

    The carrier has a weak reference to the group: the error of a load may keep the carrier alive, and must
    not keep a destroyed group.  A device is used from `reserve` to `release` only.
    """

    def __init__(self, group: Callable[[], Any]) -> None:
        import torch.distributed as dist

        self.size = dist.get_world_size(group())
        self._group = group
        self._backends = _backends(group())
        self.kind = _kind(self._backends, group().bound_device_id)
        self._device: Any = None
        self._flag: Any = None
        self._sent: Any = None
        self._received: Any = None
        self._stream: Any = None
        self._event: Any = None

    def __str__(self) -> str:
        return f"{self._backends[self.kind]} on {self._device or self.kind}"

    def reserve(self, send_nbytes: int, receive_nbytes: int) -> None:
        """Take memory for the largest swap.  Raises `ShortageError` if a device does not have it."""
        torch, bound = sys.modules["torch"], self._group().bound_device_id
        if self.kind == _CPU:
            self._device = torch.device(_CPU)
        elif bound is not None and bound.type == self.kind:
            self._device = bound
        else:
            self._device = torch.device(self.kind, devices.module_of(self.kind).current_device())
        try:
            with devices.on_device(self._device):
                if self.kind != _CPU and devices.has_streams(self._device):
                    self._stream = devices.side_stream(self._device)
                    self._event = devices.new_event(self._device)
                with self._queueing():
                    # Floats, which every backend can add: some do not support integers.
                    self._flag = torch.zeros(1, device=self._device)
                    if self.kind != _CPU:
                        self._sent, self._received = (
                            torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                            for nbytes in (send_nbytes, receive_nbytes)
                        )
        except RuntimeError as error:
            self.release()
            raise ShortageError(
                f"{self._device} has no {send_nbytes + receive_nbytes} bytes to exchange the data that "
                f"ranks read with other hosts: {error}",
                remedy='free memory of the device, or load with LoadOptions(share="never")',
            ) from error

    def release(self) -> None:
        """Release the memory."""
        self._flag = self._sent = self._received = None

    def all_well(self, check: Callable[[], None], *, well: bool) -> bool:
        """Return whether all ranks report success."""
        dist = sys.modules["torch"].distributed
        with self._carrying(check):
            self._flag.fill_(1.0 if well else 0.0)
            # A sum, which no rank has by itself if the operation fails without an error.
            self._await(dist.all_reduce(self._flag, group=self._group(), async_op=True), check)
            return int(self._flag.item()) == self.size

    def swap(
        self,
        sent: Bytes,
        send_nbytes: list[int],
        received: Bytes,
        receive_nbytes: list[int],
        check: Callable[[], None],
    ) -> None:
        """Send and receive bytes, packed in the order of ranks: so many to, and from, each rank."""
        torch = sys.modules["torch"]
        outgoing, host = torch.from_numpy(sent), torch.from_numpy(received)
        incoming = host
        with self._carrying(check):
            if self.kind != _CPU:
                outgoing = self._sent[: len(sent)].copy_(outgoing)
                incoming = self._received[: len(received)]
            work = torch.distributed.all_to_all_single(
                incoming, outgoing, receive_nbytes, send_nbytes, group=self._group(), async_op=True
            )
            self._await(work, check)
            if incoming is not host:
                host.copy_(incoming)

    @contextmanager
    def _carrying(self, check: Callable[[], None]) -> Iterator[None]:
        """Queue work on the carrier's stream in this block; turn errors of torch into errors of the group."""
        try:
            with self._queueing():
                self._settle(check)
                yield
        except RuntimeError as error:
            raise CommError(
                f"the process group ({self}) could not carry bytes: {error}",
                remedy=_REMEDY if self.kind == _CPU else _DEVICE_REMEDY,
            ) from error

    @contextmanager
    def _queueing(self) -> Iterator[None]:
        """Queue on the carrier's stream in this block, in every mode of torch that the caller may use."""
        torch, last = sys.modules["torch"], ExitStack()
        with last:
            # Each thread has a mode of its own, and tensors made in inference mode are read-only elsewhere.
            last.enter_context(torch.inference_mode(mode=False))
            last.enter_context(torch.no_grad())
            if self.kind != _CPU:
                # First the device: leaving a stream restores the one before, if it is of another device.
                last.enter_context(devices.on_device(self._device))
            if self._stream is not None:
                last.enter_context(devices.on_stream(self._stream))
            yield

    def _await(self, work: Any, check: Callable[[], None]) -> None:
        """Wait for the end of an operation; polled, as an abandoned wait ends the group."""
        _poll(work.is_completed, check)
        work.wait()
        self._settle(check)

    def _settle(self, check: Callable[[], None]) -> None:
        """Wait until the stream is idle, so that later copies do not wait."""
        if self._stream is not None:
            self._event.record(self._stream)
            _poll(self._event.query, check)


def _poll(ready: Callable[[], bool], check: Callable[[], None]) -> None:
    while not ready():
        check()
        sleep(_PAUSE_S)


def _backends(group: Any) -> dict[str, str]:
    """Return the backend of a group for each type of device for which it has one."""
    import torch.distributed as dist

    try:
        pairs = dist.get_backend_config(group).split(",")
    except (AssertionError, ValueError):  # of a group that torch itself has not made
        return {}
    return dict(pair.split(":", 1) for pair in pairs if ":" in pair)


def _kind(backends: dict[str, str], bound: Any) -> str:
    """Return the type of device over which a group with these backends carries bytes, or an empty text."""
    own = bound is not None and backends.get(bound.type) != backends.get(_CPU)
    known: list[str] = [bound.type] if own and bound.type in backends else []
    for kind in (*known, _CPU, *backends):
        if kind in backends and (kind == _CPU or _is_there(kind)):
            return kind
    return ""


def _is_there(kind: str) -> bool:
    """Return whether this process has a device of a type."""
    module = devices.module_of(kind)
    return module is not None and hasattr(module, "current_device") and bool(module.is_available())


_PREFIX = "reknit"
_BATCH = 512
_FIRST_PAUSE_S = 0.005
_LAST_PAUSE_S = 0.5


class TorchStore:
    """The key-value store of torch's ranks, under a prefix of reknit."""

    is_open = True

    def __init__(self, store: Any, prefix: str) -> None:
        import torch.distributed as dist

        self._store: Any = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

    def set(self, key: str, value: bytes) -> None:
        """Put `value` under `key`, and replace an earlier one.  Raises `CommError` if the store is gone."""
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise _lost(key, error) from error

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of `key`, waiting up to `timeout_s` for it.

        Raises `DeadlineError` if no value came, and `CommError` if the store is gone.
        """
        return self.get_many([key], timeout_s)[0]

    def get_many(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Return the values of `keys`, many per call if the store can; waits and raises as `get` does."""
        # torch's server takes time that grows with the square of the keys in a call, beyond a few hundred.
        batches = [list(keys[first : first + _BATCH]) for first in range(0, len(keys), _BATCH)]
        values: list[bytes] = []
        for batch in batches:
            timeout_s -= self._wait(batch, timeout_s)
            try:
                if self._store.has_extended_api():
                    values += map(bytes, self._store.multi_get(batch))
                else:
                    values += [bytes(self._store.get(key)) for key in batch]
            except RuntimeError as error:
                raise _lost(batch[0], error) from error
        return values

    @property
    def master(self) -> str | None:
        """The host of the process that holds the values, None for a store without one."""
        store = self._store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return getattr(store, "host", None)

    def _wait(self, keys: list[str], timeout_s: float) -> float:
        """Wait until all keys have values; return the seconds that this took.

        The store is polled, since torch's own `wait` writes warnings into the log of a rank each time that it
        ends in vain.
        """
        waited_s, pause_s = 0.0, _FIRST_PAUSE_S
        try:
            while not self._store.check(keys):
                if waited_s >= timeout_s:
                    raise DeadlineError(
                        f"no rank put {_first(keys)} into torch's store within {timeout_s:g} s",
                        remedy="check that all ranks make the same call",
                    )
                nap_s = min(pause_s, timeout_s - waited_s)
                time.sleep(nap_s)
                waited_s, pause_s = waited_s + nap_s, min(_LAST_PAUSE_S, pause_s * 1.5)
        except RuntimeError as error:
            raise _lost(keys[0], error) from error
        return waited_s


def _first(keys: Sequence[str]) -> str:
    return repr(keys[0]) if len(keys) == 1 else f"all of {len(keys)} keys like {keys[0]!r}"


def _lost(key: str, error: RuntimeError) -> CommError:
    return CommError(
        f"torch's store cannot be reached for {key!r}: {error}",
        remedy="the process that hosts the store (usually rank 0) has probably ended",
    )


def current_job() -> TrainingJob | None:
    """Return the job of torch's default process group, or None without such a group."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    ranks = tuple(range(dist.get_world_size()))
    store = TorchStore(torch_private.default_store(), f"{_PREFIX}/all")
    return TrainingJob(dist.get_rank(), len(ranks), ranks, store, dist.group.WORLD)


def subgroup_job(group: Any) -> TrainingJob:
    """Return the job of some of torch's ranks, those of a process group.

    Raises `UsageError` on a rank that is not in the group.
    """
    import torch.distributed as dist

    known = group is dist.GroupMember.NON_GROUP_MEMBER or isinstance(group, dist.ProcessGroup)
    if not known:
        raise UsageError(
            f"group is a process group of torch or a group of reknit.connect, not a {type(group).__name__}",
            remedy="of a DeviceMesh, pass mesh.get_group()",
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise UsageError(
            "this rank is not in the process group", remedy="call save and load on the group's ranks only"
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    store = TorchStore(torch_private.default_store(), f"{_PREFIX}/{_group_key(group, ranks)}")
    return TrainingJob(rank, len(ranks), ranks, store, group)


def _group_key(group: Any, ranks: Sequence[int]) -> str:
    """Return a name on which a group's ranks agree, and which no other group has, even of the same ranks."""
    listed = ",".join(map(str, ranks))
    return hashlib.sha256(f"{torch_private.group_name(group)}:{listed}".encode()).hexdigest()[:32]
