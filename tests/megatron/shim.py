"""Megatron-Core on a machine without a GPU, with a replacement for CUDA on the CPU.

Call `install` before the first import of megatron, in a process that does nothing else.  All code that
decides about the place and the values of a tensor remains Megatron's own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MAKERS = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like")


class _Stream:
    """A stream or an event on a device that does everything in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, *_: Any) -> _Stream:
        return self


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the state that Apex and TransformerEngine keep: the step is counted in the group."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        **_: Any,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "bias_correction": bias_correction})
        self.adam_w_mode = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue  # as in the real ones, a group without parameters counts no steps
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    self._move(parameter, parameter.grad, group)

    def _move(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        first, second = group["betas"]
        mean = state["exp_avg"].lerp_(grad, 1 - first)
        square = state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        size = (square / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(mean / (1 - first ** group["step"]), size, value=-group["lr"])


def install() -> None:
    """Replace CUDA, and import the modules of Megatron that need changes."""
    _answer_for_cuda()
    _put_cuda_tensors_on_the_cpu()
    if not hasattr(np, "product"):
        vars(np)["product"] = np.prod  # Megatron before 0.16 is older than NumPy 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _adapt_megatron()


def _answer_for_cuda() -> None:
    cuda: Any = torch.cuda
    stream = _Stream()
    cuda.current_device = lambda: "cpu"
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    for name in ("synchronize", "manual_seed", "empty_cache"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda _=None: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *_, **__: stream
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor"):
        setattr(cuda, name, getattr(torch, name))


def _put_cuda_tensors_on_the_cpu() -> None:
    base: Any = torch.Tensor
    module: Any = torch.nn.Module
    collectives: Any = dist
    plain_type, all_to_all = base.type, dist.all_to_all_single

    def type_name(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        answer = plain_type(tensor, *args, **kwargs)
        # Optimizers sort parameters by this name, and refuse parameters of other devices.
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return made

    def listed(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    def exchange(out: Any, given: Any, out_sizes: Any = None, given_sizes: Any = None, **kwargs: Any) -> Any:
        # The token dispatcher keeps sizes in tensors as long as they are not on a GPU.
        out_sizes = listed(kwargs.pop("output_split_sizes", out_sizes))
        given_sizes = listed(kwargs.pop("input_split_sizes", given_sizes))
        return all_to_all(out, given, out_sizes, given_sizes, **kwargs)

    base.type = type_name
    base.cuda = module.cuda = lambda self, *_, **__: self
    for name in _MAKERS:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    collectives.all_to_all_single = exchange


@cache
def _results_of_writers() -> Any:
    """Return a queue of a forked process: Megatron starts one, which takes seconds to import torch."""
    return multiprocessing.get_context("fork").Manager().Queue()


def _adapt_megatron() -> None:
    import megatron.core.optimizer as optimizers
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    modules: Any = (optimizers, filesystem_async, distrib_optimizer, random, moe_utils)
    optimizers, filesystem_async, distrib_optimizer, random, moe_utils = modules
    filesystem_async._get_write_results_queue = _results_of_writers
    # The paths of production, which a plain torch optimizer does not take.
    optimizers.Adam = distrib_optimizer.Adam = FusedAdam
    optimizers.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the name is read, but missing without TransformerEngine
