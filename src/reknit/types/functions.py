"""Functions, which no checkpoint holds."""

from __future__ import annotations

import inspect
from functools import partial

import numpy as np


def is_function(value: object) -> bool:
    """Tell whether a value is a function: of Python or C, a method, a ufunc, or one that wraps another."""
    return inspect.isroutine(value) or isinstance(value, (partial, np.ufunc)) or hasattr(value, "__wrapped__")
