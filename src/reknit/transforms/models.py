"""The rules for families of models by their public name; `reknit.integrations.model_maps` has them."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import a rule when it is first asked for."""
    return getattr(import_module("reknit.integrations.model_maps"), name)
