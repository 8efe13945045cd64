"""Torch without reknit, which each rank imports itself, as every process of its own does."""

import numpy  # noqa: F401
import pytest  # noqa: F401
import torch.distributed  # noqa: F401
