"""Torch and reknit."""

import copyreg
from typing import Any

import hypothesis  # noqa: F401
import numpy  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.debug
import torch.distributed.tensor.parallel
import torch.nn.parallel  # noqa: F401

import tests.torchrun.models  # noqa: F401
from reknit.frameworks.torch.state_memory import StepBarrier
from tests.warm.ahead import WITH_TORCH, WITHOUT_TORCH, import_all

import_all(*WITHOUT_TORCH, *WITH_TORCH)

# Ranks show each other their holdings; the barriers of an optimizer are those of its process.
_no_barrier: Any = lambda _: (str, ("a barrier of another process",))  # noqa: E731
copyreg.pickle(StepBarrier, _no_barrier)
