"""Torch and reknit."""

import hypothesis  # noqa: F401
import numpy  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.debug
import torch.distributed.tensor.parallel
import torch.nn.parallel  # noqa: F401

import tests.torchrun.models  # noqa: F401
