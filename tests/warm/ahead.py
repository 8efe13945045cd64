"""The modules that saves and loads import when they are first called, imported once for all forks.

There are hundreds of them.  A rank that imports them itself takes five times as long for its first save.
"""

from __future__ import annotations

import importlib
import pkgutil

from reknit.comm.group import quietly

WITHOUT_TORCH = ("api", "comm", "engine", "format", "planner", "runs")
WITH_TORCH = ("frameworks.torch", "frameworks.walk")


def import_all(*packages: str) -> None:
    """Import packages and modules of reknit, with all that is inside them."""
    with quietly():  # gRPC must not act in the forks
        for name in packages:
            package = importlib.import_module(f"reknit.{name}")
            for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"reknit.{name}."):
                importlib.import_module(module.name)
