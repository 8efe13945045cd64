"""Bytes on their way between ranks, through a process group of torch."""

from __future__ import annotations

from time import sleep
from typing import TYPE_CHECKING, Any

from reknit.errors import CommError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

_PAUSE_S = 0.0005


class TorchCarrier:
    """A process group as what carries bytes between hosts (see `engine.sharing.host_exchange.Carrier`).

    A group without a backend for CPU tensors, such as NCCL, carries them from and to the current device.
    Given is a weak reference: what the error of a load keeps alive must not keep a group that was destroyed.
    """

    def __init__(self, group: Callable[[], Any]) -> None:
        import torch
        import torch.distributed as dist

        self.size = dist.get_world_size(group())
        self._group, self._torch = group, torch
        on_cpu = "cpu:" in dist.get_backend_config(group())
        self._device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def all_well(self, well: bool, check: Callable[[], None]) -> bool:
        """Tell whether all ranks say that all is well."""
        dist = self._torch.distributed
        flag = self._torch.tensor([1 if well else 0], device=self._device)
        self._wait(
            lambda: dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._group(), async_op=True), check
        )
        return bool(flag.item())

    def swap(
        self,
        sent: NDArray[np.uint8],
        send_nbytes: list[int],
        received: NDArray[np.uint8],
        receive_nbytes: list[int],
        check: Callable[[], None],
    ) -> None:
        """Send and receive bytes, both packed in the order of ranks: so many to, and from, each rank."""
        torch = self._torch
        outgoing = torch.from_numpy(sent).to(self._device)
        host = torch.from_numpy(received)
        incoming = host if self._device.type == "cpu" else torch.empty_like(host, device=self._device)
        self._wait(
            lambda: torch.distributed.all_to_all_single(
                incoming, outgoing, receive_nbytes, send_nbytes, group=self._group(), async_op=True
            ),
            check,
        )
        if incoming is not host:
            host.copy_(incoming)

    def _wait(self, begin: Callable[[], Any], check: Callable[[], None]) -> None:
        """Begin an operation, and wait for its end; polled, as a wait that is given up ends the group."""
        try:
            with self._torch.inference_mode():
                work = begin()
                while not work.is_completed():
                    check()
                    sleep(_PAUSE_S)
                work.wait()
        except RuntimeError as error:
            raise CommError(
                f"the process group could not carry bytes: {error}",
                remedy='a rank has probably ended; LoadOptions(share="never") loads without it',
            ) from error
