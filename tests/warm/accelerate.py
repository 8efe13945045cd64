"""Accelerate, and torch's stateful loaders, which it wraps."""

import torchdata.stateful_dataloader
from accelerate import Accelerator, data_loader, utils

import tests.warm.plain  # noqa: F401

_ = Accelerator, data_loader, utils, torchdata.stateful_dataloader
