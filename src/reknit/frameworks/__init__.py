"""The objects of training frameworks as shards and blobs, and how a checkpoint fills them."""

from __future__ import annotations

import sys
from typing import Any


def imported(module: str, name: str) -> Any:
    """Return a class of a module that is already imported; otherwise ``()``, which has no instances."""
    return getattr(sys.modules.get(module), name, ())
