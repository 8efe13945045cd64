"""The marks of tests that need a device, and run on the one of the machine.

`tests.running.elsewhere` runs them with the simulated device on a machine without a real one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.accelerator import why_not
from tests.ranks import run

if TYPE_CHECKING:
    from collections.abc import Callable

on_cuda = pytest.mark.device("cuda")
"""Needs CUDA: a real one, or the simulated device in its place."""

on_simulated_cuda = pytest.mark.device("simulated cuda")
"""Needs the controls of the simulated device, in the place of CUDA."""

on_simulated_own = pytest.mark.device("simulated own")
"""Needs the simulated device as a device type of its own, "sim"."""

every_device = pytest.mark.parametrize(
    "device_type", [pytest.param("cuda", marks=on_cuda), pytest.param("sim", marks=on_simulated_own)]
)
"""Runs on CUDA, real or simulated, and on a device type of its own."""

every_simulated_device = pytest.mark.parametrize(
    "device_type",
    [pytest.param("cuda", marks=on_simulated_cuda), pytest.param("sim", marks=on_simulated_own)],
)
"""Runs on both kinds of the simulated device."""

WARM = {"cuda": "simulated_cuda", "simulated cuda": "simulated_cuda", "simulated own": "simulated_own"}
"""For each argument of the mark, the module of `tests.warm` that installs the simulated device."""


def run_simulated(
    world: int, fn: Callable[..., Any], *args: Any, device_type: str = "cuda", **options: Any
) -> list[Any]:
    """Call a function on ranks as `tests.ranks.run` does, each of which has simulated devices of its own."""
    if reason := why_not():
        pytest.skip(reason)
    return run(
        world, fn, *args, warm={"cuda": "simulated_cuda", "sim": "simulated_own"}[device_type], **options
    )
