"""A simulated accelerator for torch: does code for devices wait for, keep and release what it must?

The device runs on the CPU, so each machine has it. Its streams are threads, and each piece of work begins
after a delay that a seed draws. The host cannot touch its memory. So a copy that is read too early, or memory
that is used again too early, gives wrong bytes here as on a real device. It measures no speed.

`install("cuda")` puts it in the place of CUDA, in a torch that was built without CUDA: code for CUDA runs
unchanged. `install("sim")` makes it a device type of its own, as those of other makers are. Both change torch
for the rest of the process, so tests install it in processes of their own. `why_not` returns the reason if
the device cannot be built here.
"""

from __future__ import annotations

from tests.accelerator.build import why_not
from tests.accelerator.device import Accelerator, install, installed

__all__ = ["Accelerator", "install", "installed", "why_not"]
