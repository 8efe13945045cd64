"""Accelerate, and torch's stateful loaders, which it wraps."""

from importlib import import_module
from importlib.util import find_spec

import torchdata.stateful_dataloader
from accelerate import Accelerator, data_loader, utils

import reknit.integrations.accelerate  # noqa: F401
import tests.warm.plain  # noqa: F401

_ = Accelerator, data_loader, utils, torchdata.stateful_dataloader
if find_spec("datasets"):
    import_module("datasets")  # a loader that is prepared may be one of theirs
