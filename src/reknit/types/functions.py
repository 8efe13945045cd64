"""Recognise functions, which checkpoints do not hold."""

from __future__ import annotations

import inspect
from functools import partial

import numpy as np


def is_function(value: object) -> bool:
    """Return whether a value is a function: of Python or C, a method, a ufunc, or a wrapper of a function."""
    return inspect.isroutine(value) or isinstance(value, (partial, np.ufunc)) or hasattr(value, "__wrapped__")
